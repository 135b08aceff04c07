"""A plan as an entry of a catalog file."""

from __future__ import annotations

from hearth.planning.plan import Layout, PlanRequest


def shape_name(model: str, request: PlanRequest) -> str:
    """A name for the shape: the model's own, and the GPUs."""
    leaf = model.rstrip("/").rsplit("/", 1)[-1].lower().replace(".", "p")
    return f"accounts/mine/trainingShapes/{leaf}-{request.gpus}x{request.gpu_memory_gib:g}g"


def catalog_entry(model: str, request: PlanRequest, layout: Layout) -> str:
    """TOML for a catalog file: the shape of the trainer and of the deployment that goes with it.

    ``model`` is the ``base_model`` of requests.
    """
    trainer = layout.trainer
    mode = "POLICY_TRAINER" if trainer.lora_rank is None else "LORA_TRAINER"
    splits = layout.replica.gpus
    fields: dict[str, str | int | None] = {
        "base_model": model,
        "trainer_mode": mode,
        "context_length": request.context,
        "dtype": trainer.dtype,
        "ranks": trainer.ranks,
        "offload_optimizer": trainer.offload_optimizer or None,
        "micro_batch_tokens": trainer.micro_batch_tokens,
        "recompute_above": trainer.recompute_above,
        "engine": layout.replica.engine,
    }
    lines = [f'[shapes."{shape_name(model, request)}"]']
    for name, value in fields.items():
        if value is not None:
            lines.append(f"{name} = {_format_value(value)}")
    if splits > 1:
        lines.append(f"engine_options = {{ tensor_parallel_size = {splits} }}")
    return "\n".join(lines) + "\n"


def _format_value(value: str | int) -> str:
    if isinstance(value, int):
        return str(value).lower()
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
