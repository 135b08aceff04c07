"""``hearth plan``: whether a model fits some GPUs, and how to divide them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

import orjson
import tyro
from rich.console import Console
from rich.table import Table

from hearth.control.catalog import read_catalog
from hearth.exit_codes import exit_code
from hearth.planning.architecture import LoraPart
from hearth.planning.memory import GIB, ITEMSIZE, OptimizerName
from hearth.planning.plan import (
    CATALOG_FILE,
    Layout,
    Plan,
    PlanRequest,
    catalog_entry,
    commands,
    make_plan,
)


@dataclass(frozen=True, kw_only=True)
class PlanFlags:
    """Say whether a model fits some GPUs, and which shape to choose."""

    model: str
    """A registered name, a folder with a config.json, or a hub id, of which only that is read."""
    gpus: int
    """Number of GPUs."""
    context: int
    """Tokens of the longest sequence, prompt included."""
    gpu_memory_gib: float = 80.0
    """Memory of each GPU, in GiB."""
    lora_rank: int | None = None
    """Train an adapter of this rank instead of all parameters."""
    lora_targets: tuple[LoraPart, ...] = ("attn", "mlp")
    """Parts that the adapter changes, as in a recipe's settings."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of the weights."""
    optimizer: OptimizerName = "adamw"
    """As in a recipe: how much is kept of each trained weight."""
    reference: bool = True
    """Count the frozen reference that a recipe's kl_beta asks for by default; an adapter's is its
    base."""
    learning_rate: float = 1e-5
    """As in a recipe: the size of a weight sync follows from it."""
    offload_optimizer: bool = False
    """Have ranks keep their parts of weights, gradients and moments in the host's memory."""
    concurrent: int | None = None
    """Completions in flight at one time, over all replicas; if it is not given, as many as there is
    room for: up to 64 of a replica, and 16 where trainer and deployment share a GPU."""
    host_memory_gib: float | None = None
    """Memory of each machine, in GiB, to compare with."""
    json: bool = False
    """One JSON object with bytes instead of tables."""


def plan(arguments: list[str]) -> int:
    """Say whether a model fits some GPUs, and which shape to choose."""
    flags = tyro.cli(PlanFlags, args=arguments, prog="hearth plan")

    def run() -> None:
        # Slow to import, and --help must be fast.
        from hearth.models.configs import read_config
        from hearth.models.sizes import read_architecture

        source = read_catalog().find_model(flags.model).source
        request = PlanRequest(
            model=read_architecture(read_config(source)),
            gpus=flags.gpus,
            context=flags.context,
            gpu_memory_gib=flags.gpu_memory_gib,
            lora_rank=flags.lora_rank,
            lora_targets=flags.lora_targets,
            dtype=flags.dtype,
            optimizer=flags.optimizer,
            has_reference=flags.reference,
            learning_rate=flags.learning_rate,
            offload_optimizer=flags.offload_optimizer,
            concurrent=flags.concurrent,
            host_memory_gib=flags.host_memory_gib,
        )
        result = make_plan(request)
        if flags.json:
            text = orjson.dumps(as_json(flags, source, request, result)).decode()
            Console(soft_wrap=True).print_json(text)
        else:
            _show(flags, source, request, result)

    return exit_code(run)


def as_json(flags: PlanFlags, source: str, request: PlanRequest, plan: Plan) -> dict[str, object]:
    """All that the tables show, in bytes; ``source`` is the folder or hub id behind the model."""
    model = request.model
    return {
        "model": flags.model,
        "parameters": model.parameters,
        "active_parameters": model.active_parameters,
        "trained_parameters": _count_trained(request),
        "kv_bytes_per_token": model.kv_bytes_per_token(ITEMSIZE[request.dtype]),
        "usable_bytes": request.room,
        **asdict(plan),
        "catalog": catalog_entry(flags.model, request, plan.layout) if plan.fits else None,
        "commands": commands(flags.model, source, request, plan.layout) if plan.fits else [],
    }


def _show(flags: PlanFlags, source: str, request: PlanRequest, plan: Plan) -> None:
    console = Console(soft_wrap=True, highlight=False, markup=False)
    model, layout = request.model, plan.layout
    console.print(
        f"{flags.model}: {model.parameters:,} parameters, {_count_trained(request):,} trained; a "
        f"token of context takes {model.kv_bytes_per_token(ITEMSIZE[request.dtype]):,} bytes"
    )
    machine = f"{request.gpus} x {request.gpu_memory_gib:g} GiB at {request.context:,} tokens"
    console.print(
        f"{'fits' if plan.fits else 'does not fit'} {machine}: {_describe_layout(layout)}\n"
    )
    _print_table(console, "trainer, each rank", layout.trainer_bytes)
    _print_table(console, "deployment, each GPU of a replica", layout.replica_bytes)
    console.print(f"usable of a GPU: {_gib(request.room)} GiB")
    console.print(
        f"weight sync: base {_gib(plan.base_bytes)} GiB, later ones about "
        f"{_gib(plan.delta_bytes)} GiB at a learning rate of {request.learning_rate:g}"
    )
    given = request.host_memory_gib
    console.print(
        f"memory of the fullest machine: {_gib(plan.host_bytes['start'])} GiB at the start, "
        f"{_gib(plan.host_bytes['sync'])} GiB in a weight sync"
        f"{'' if given is None else f'; it has {given:g} GiB'}\n"
    )
    for who, missing in plan.shortage.items():
        console.print(f"short: GPU memory of the {who}, by {_gib(missing)} GiB")
    for when, missing in plan.host_shortage.items():
        console.print(f"short: memory of a machine in its {when}, by {_gib(missing)} GiB")
    for advice in plan.advice:
        console.print(f"  {advice}")
    if plan.fits:
        console.print(f"# {CATALOG_FILE}, a catalog file")
        console.print(catalog_entry(flags.model, request, layout))
        console.print("# in a shell; more settings: hearth train rl --help")
        for command in commands(flags.model, source, request, layout):
            console.print(command)


def _describe_layout(layout: Layout) -> str:
    if layout.is_shared:
        return "trainer and deployment on one GPU"
    each = f" of {layout.replica.gpus} GPUs" if layout.replica.gpus > 1 else ""
    ranks, replicas = _count(layout.trainer.ranks, "rank"), _count(layout.replicas, "replica")
    copies = layout.trainer.copies
    where = f", on {copies} machines that hold the weights each" if copies > 1 else ""
    return (
        f"{ranks} of the trainer{where}, {replicas}{each}, "
        f"{layout.replicas * layout.replica.sequences} completions at a time"
    )


def _count(count: int, name: str) -> str:
    return f"{count} {name}{'s' if count > 1 else ''}"


def _print_table(console: Console, title: str, parts: Mapping[str, int]) -> None:
    table = Table(title, "GiB", box=None, pad_edge=False)
    table.columns[1].justify = "right"
    for name, num_bytes in parts.items():
        table.add_row(f"  {name}", _gib(num_bytes))
    table.add_row("  sum", _gib(sum(parts.values())))
    console.print(table)


def _count_trained(request: PlanRequest) -> int:
    if request.lora_rank is None:
        return request.model.parameters
    return request.model.lora_parameters(request.lora_rank, request.lora_targets)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f}"
