"""A plan as an entry of a catalog file."""

from __future__ import annotations

from hearth.planning.plan import Layout, Question


def shape_name(model: str, question: Question) -> str:
    """A name for the shape: the model's own, and the GPUs."""
    leaf = model.rstrip("/").rsplit("/", 1)[-1].lower().replace(".", "p")
    return f"accounts/mine/trainingShapes/{leaf}-{question.gpus}x{question.gpu_memory_gib:g}g"


def catalog_entry(model: str, question: Question, layout: Layout) -> str:
    """TOML for a catalog file: the shape of the trainer and of the deployment that goes with it.

    ``model`` is what requests will name as ``base_model``.
    """
    trainer = layout.trainer
    mode = "POLICY_TRAINER" if trainer.lora_rank is None else "LORA_TRAINER"
    splits = layout.replica.gpus
    fields: dict[str, str | int | None] = {
        "base_model": model,
        "trainer_mode": mode,
        "context_length": question.context,
        "dtype": trainer.dtype,
        "ranks": trainer.ranks,
        "offload_optimizer": trainer.offload_optimizer or None,
        "micro_batch_tokens": trainer.micro_batch_tokens,
        "recompute_above": trainer.recompute_above,
        "engine": layout.replica.engine,
    }
    lines = [f'[shapes."{shape_name(model, question)}"]']
    for name, value in fields.items():
        if value is not None:
            lines.append(f"{name} = {_text(value)}")
    if splits > 1:
        lines.append(f"engine_options = {{ tensor_parallel_size = {splits} }}")
    return "\n".join(lines) + "\n"


def _text(value: str | int) -> str:
    if isinstance(value, int):
        return str(value).lower()
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
