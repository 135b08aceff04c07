"""Whether a model can be trained and served on some GPUs, and how to divide them.

Trainer and deployment share a single GPU. More GPUs are divided between the trainer's ranks and the
deployment's replicas, so that neither waits long for the other.
"""

from __future__ import annotations

import bisect
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from hearth.errors import ConfigError
from hearth.planning.architecture import Architecture, LoraPart
from hearth.planning.memory import (
    GIB,
    SNAPSHOTS_IN_MEMORY,
    Dtype,
    Machine,
    OptimizerName,
    ReplicaSetting,
    TrainerSetting,
    choose_copies,
    choose_sums,
    delta_bytes,
    host_bytes,
    replica_bytes,
    snapshot_bytes,
    trainer_bytes,
)
from hearth.planning.rates import Gpu, sampling_tokens_per_s, training_tokens_per_s

USABLE_SHARE = 0.9
"""Of a GPU's memory. The rest is for CUDA itself, communication buffers and fragments."""
GPUS_OF_A_MACHINE = 8
"""More GPUs are several machines, on which Ray places the workers."""
MOST_REPLICAS = 64
"""Of one deployment."""
MICRO_BATCH_TOKENS = 16384
"""Default size of a trainer's pass."""
FEWEST_SEQUENCES = 8
"""Completions that each replica has room for at least, if the user names no number."""
MOST_SEQUENCES = 64
"""Completions that a replica takes at a time by default (``max_batch_size``)."""
SHARED_SEQUENCES = 16
"""Completions on a GPU that trainer and deployment share, if the user names no number."""
_SPLITS = (1, 2, 4, 8)
_MOST_GPUS = 1024
_MOST_FINE_STEPS = 128
_SMALL_RANK = 32

Placement = Literal["inline", "process", "ray"]


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """A model, the GPUs there are, and how they are to be used.

    Raises:
        ConfigError: a value breaks its rule.
    """

    model: Architecture
    gpus: int
    context: int
    """Tokens of the longest sequence, prompt included."""
    gpu_memory_gib: float = 80.0
    lora_rank: int | None = None
    lora_targets: tuple[LoraPart, ...] = ("attn", "mlp")
    dtype: Dtype = "bfloat16"
    optimizer: OptimizerName = "adamw"
    has_reference: bool = False
    offload_optimizer: bool = False
    """Have ranks keep their parts of weights, gradients and moments in the host's memory."""
    concurrent: int | None = None
    """Completions in flight at one time, over all replicas; None is as many as there is room for,
    up to 64 of a replica, and 16 where trainer and deployment share a GPU."""
    learning_rate: float = 1e-5
    """Which of the weights' elements a step changes in bfloat16 follows from it."""
    host_memory_gib: float | None = None
    """Memory of each machine; layouts that fit it go before others. None compares nothing."""

    def __post_init__(self) -> None:
        for name in ("gpus", "context", "concurrent", "lora_rank"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be >= 1, got {value}")
        if not self.lora_targets:
            raise ConfigError("lora_targets must be one or more of attn, mlp, unembed, got none")
        for name in ("gpu_memory_gib", "host_memory_gib", "learning_rate"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be > 0, got {value}")
        longest = self.model.max_positions
        if longest is not None and self.context > longest:
            raise ConfigError(
                f"context must be at most {longest}, the positions of the model, got {self.context}"
            )

        trains_experts = self.lora_rank is None or "mlp" in self.lora_targets
        if self.optimizer == "muon" and trains_experts and self.model.sparse_layers:
            raise ConfigError(
                "optimizer must be 'adamw' or 'adamw_8bit' for the experts of a mixture, got "
                "'muon': a layer's are one tensor; or train an adapter with lora_targets that "
                "leave out mlp"
            )

    @property
    def room(self) -> int:
        """Usable bytes of each GPU."""
        return int(self.gpu_memory_gib * GIB * USABLE_SHARE)

    @property
    def adapts_experts(self) -> bool:
        """Whether an adapter changes a mixture's experts."""
        has_part = self.lora_rank is not None and "mlp" in self.lora_targets
        return has_part and self.model.sparse_layers > 0


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The GPUs of trainer and deployment, and what each GPU holds."""

    placement: Placement
    trainer: TrainerSetting
    replica: ReplicaSetting
    replicas: int
    is_shared: bool
    """Whether trainer and deployment are on one GPU."""
    trainer_bytes: dict[str, int]
    """Of each rank."""
    replica_bytes: dict[str, int]
    """Of each GPU of each replica."""

    @property
    def gpus(self) -> int:
        """GPUs that are used."""
        if self.is_shared:
            return 1
        return self.trainer.ranks + self.replicas * self.replica.gpus

    def excess(self, room: int) -> dict[str, int]:
        """Bytes that a GPU lacks, by the worker that needs them; empty if everything fits."""
        trainer, replica = sum(self.trainer_bytes.values()), sum(self.replica_bytes.values())
        needed = {"trainer": trainer, "deployment": replica}
        if self.is_shared:
            needed = {"trainer and deployment": trainer + replica}
        return {name: size - room for name, size in needed.items() if size > room}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The answer to a ``PlanRequest``."""

    fits: bool
    layout: Layout
    """If nothing fits, the layout that misses least memory."""
    host_bytes: dict[str, int]
    """Memory of the machine that needs most: at the ``start``, and in a weight ``sync``."""
    base_bytes: int
    """Of a weight sync that sends all weights."""
    delta_bytes: int
    """Estimate for a weight sync that sends changed elements."""
    shortage: dict[str, int]
    """Bytes that a GPU lacks, by the worker that needs them."""
    host_shortage: dict[str, int] = field(default_factory=dict[str, int])
    """Bytes that a machine lacks, at the ``start`` or in a ``sync``; empty if it is not known."""
    advice: list[str] = field(default_factory=list[str])
    """Changes that would fit, the smallest of each kind."""


def make_plan(request: PlanRequest) -> Plan:
    """Whether it fits, how to divide the GPUs, and if not, what would fit."""
    best = find_best_layout(request)
    layout = _keep_most(request, best or find_nearest_layout(request))
    base = snapshot_bytes(request.model, layout.trainer)
    return Plan(
        fits=best is not None,
        layout=layout,
        host_bytes=_host_bytes(request, layout),
        base_bytes=base,
        delta_bytes=delta_bytes(request.model, layout.trainer, request.learning_rate),
        shortage={} if best is not None else layout.excess(request.room),
        host_shortage=_host_shortage(request, layout),
        advice=[] if best is not None else list(_advice(request)),
    )


def _host_shortage(request: PlanRequest, layout: Layout) -> dict[str, int]:
    if request.host_memory_gib is None:
        return {}
    room = int(request.host_memory_gib * GIB)
    host = _host_bytes(request, layout)
    return {when: size - room for when, size in host.items() if size > room}


def _host_bytes(request: PlanRequest, layout: Layout) -> dict[str, int]:
    """Of the machine that needs most: the first one, with rank 0, or one of replicas alone."""
    ranks, split = layout.trainer.ranks, layout.replica.gpus
    first = min(ranks, GPUS_OF_A_MACHINE)
    beside = 0 if layout.is_shared else (GPUS_OF_A_MACHINE - first) // split
    if layout.is_shared or request.gpus <= GPUS_OF_A_MACHINE:
        beside = layout.replicas
    alone = min(layout.replicas, GPUS_OF_A_MACHINE // split)
    options = {"learning_rate": request.learning_rate, "is_inline": layout.placement == "inline"}
    machines = [
        host_bytes(request.model, layout.trainer, layout.replica, Machine(first, beside), **options)
    ]
    if not layout.is_shared and beside < alone:
        machine = Machine(0, alone)
        machines.append(
            host_bytes(request.model, layout.trainer, layout.replica, machine, **options)
        )
    return {when: max(machine[when] for machine in machines) for when in machines[0]}


def shape_name(model: str, request: PlanRequest) -> str:
    """A name for the shape: the model's own, and the GPUs."""
    leaf = model.rstrip("/").rsplit("/", 1)[-1].lower().replace(".", "p")
    return f"accounts/mine/trainingShapes/{leaf}-{request.gpus}x{request.gpu_memory_gib:g}g"


def catalog_entry(model: str, request: PlanRequest, layout: Layout) -> str:
    """TOML for a catalog file: the shape of the trainer and of the deployment that goes with it.

    ``model`` is the ``base_model`` of requests. A reference that is a trainer of its own has a
    shape too.
    """
    trainer, name = layout.trainer, shape_name(model, request)
    mode = "POLICY_TRAINER" if trainer.lora_rank is None else "LORA_TRAINER"
    fields: dict[str, str | int | None] = {
        "base_model": model,
        "trainer_mode": mode,
        "context_length": request.context,
        "dtype": trainer.dtype,
        "ranks": trainer.ranks,
        "offload_optimizer": trainer.offload_optimizer or None,
        "micro_batch_tokens": trainer.micro_batch_tokens,
        "recompute_above": trainer.recompute_above,
    }
    served: dict[str, str | int | None] = {
        "engine": layout.replica.engine,
        "replicas": layout.replicas,
    }
    entry = _format_shape(name, fields | served)
    if layout.replica.gpus > 1:
        entry += f"engine_options = {{ tensor_parallel_size = {layout.replica.gpus} }}\n"
    if _has_reference_trainer(request):
        fields |= {"trainer_mode": "FORWARD_ONLY", "recompute_above": None}
        entry += "\n" + _format_shape(f"{name}-reference", fields)
    return entry


def _format_shape(name: str, fields: Mapping[str, str | int | None]) -> str:
    given = [f"{key} = {_format_value(value)}\n" for key, value in fields.items() if value]
    return f'[shapes."{name}"]\n' + "".join(given)


def _has_reference_trainer(request: PlanRequest) -> bool:
    """Whether the reference is a trainer of its own; an adapter's is its base."""
    return request.has_reference and request.lora_rank is None


CATALOG_FILE = "shapes.toml"


def commands(model: str, source: str, request: PlanRequest, layout: Layout) -> list[str]:
    """What serves the shape, whose TOML is in ``CATALOG_FILE``, and trains on it, in a shell.

    ``source`` is the folder or hub id behind ``model``: prompts are tokenized with it.
    """
    name = shape_name(model, request)
    train = ["hearth", "train", "rl", "--base-model", model]
    if model.startswith("accounts/"):
        train += ["--deployment.tokenizer-model", source]
    train += ["--max-seq-len", str(request.context)]
    if request.optimizer != "adamw":
        train += ["--optimizer", request.optimizer]
    if request.lora_rank is not None:
        train += ["--lora-rank", str(request.lora_rank), "--lora-targets", *request.lora_targets]
    if layout.trainer.merges_adapter:
        train += ["--first-checkpoint-type", "merged_base"]
    if not request.has_reference:
        train += ["--kl-beta", "0"]
    train += ["--trainer.training-shape-id", name]
    if _has_reference_trainer(request):
        train += ["--trainer.reference-training-shape-id", f"{name}-reference"]
    if layout.placement == "inline":
        return [f"export HEARTH_CATALOG={CATALOG_FILE}", shlex.join(train)]
    return [
        f"hearth serve --catalog {CATALOG_FILE} --placement {layout.placement}",
        "export HEARTH_URL=http://127.0.0.1:8000 HEARTH_API_KEY=x   # in another terminal",
        shlex.join(train),
    ]


def find_best_layout(request: PlanRequest) -> Layout | None:
    """The layout that fits and makes steps shortest; None if none fits."""
    if request.gpus == 1:
        return next(
            (layout for layout in _shared_layouts(request) if not layout.excess(request.room)), None
        )
    gpu = Gpu()

    def cost(layout: Layout) -> tuple[bool, float, int]:
        # Of equally fast layouts, the one with fewer GPUs.
        is_short = bool(_host_shortage(request, layout))
        return is_short, _token_s(request, layout, gpu), layout.gpus

    candidates: list[Layout] = []
    for split in _SPLITS:
        fitting = [
            layout for layout in _divided_layouts(request, split) if not layout.excess(request.room)
        ]
        candidates += sorted(fitting, key=cost)[:1]
        # A replica needs several GPUs only if one is too small, or replicas would be too many.
        if candidates and candidates[-1].replicas < MOST_REPLICAS:
            break
    return min(candidates, key=cost, default=None)


def find_nearest_layout(request: PlanRequest) -> Layout:
    """The layout that misses least memory."""
    layouts = list_layouts(request)
    return min(layouts, key=lambda layout: sum(layout.excess(request.room).values()))


def list_layouts(request: PlanRequest) -> list[Layout]:
    """All layouts that are tried, whether they fit or not."""
    if request.gpus == 1:
        return list(_shared_layouts(request))
    return [layout for split in _SPLITS for layout in _divided_layouts(request, split)]


def _shared_layouts(request: PlanRequest) -> Iterator[Layout]:
    """One GPU: the whole platform in the recipe's process, then in processes of their own."""
    sequences = request.concurrent or SHARED_SEQUENCES
    embedded = _replica(request, engine="embedded", gpus=1, sequences=sequences)
    placements: tuple[Placement, ...] = ("inline", "process")
    for placement in placements:
        # In one process the deployment loads from the snapshots that the trainer keeps in memory.
        kept = SNAPSHOTS_IN_MEMORY if placement == "inline" else 0
        replica = replace(embedded, stages_weights=placement == "process")
        used = replica_bytes(request.model, replica)
        trainer = _trainer(request, ranks=1, room=request.room - sum(used.values()), kept=kept)
        yield Layout(
            placement=placement,
            trainer=trainer,
            replica=replica,
            replicas=1,
            is_shared=True,
            trainer_bytes=trainer_bytes(request.model, trainer),
            replica_bytes=used,
        )


def _divided_layouts(request: PlanRequest, split: int) -> Iterator[Layout]:
    """Some GPUs for ranks, the others for replicas of ``split`` each."""
    placement: Placement = "process" if request.gpus <= GPUS_OF_A_MACHINE else "ray"
    for ranks in _rank_counts(request):
        replicas = min(MOST_REPLICAS, (request.gpus - ranks) // split)
        # vLLM gives each GPU as many heads.
        if replicas == 0 or request.model.heads % split:
            continue
        trainer = _trainer(request, ranks=ranks, room=request.room)
        replica = _replica(request, engine="vllm", gpus=split, sequences=FEWEST_SEQUENCES)
        if request.adapts_experts:
            # vLLM is sent the whole model: it serves no adapter of experts.
            trainer = replace(trainer, merges_adapter=True)
            replica = replace(replica, lora_rank=None)
        if request.concurrent is not None:
            replica = replace(replica, sequences=-(-request.concurrent // replicas))
        else:
            replica = replace(replica, sequences=_count_sequences(request, replica))
        yield Layout(
            placement=placement,
            trainer=trainer,
            replica=replica,
            replicas=replicas,
            is_shared=False,
            trainer_bytes=trainer_bytes(request.model, trainer),
            replica_bytes=replica_bytes(request.model, replica),
        )


def _rank_counts(request: PlanRequest) -> range:
    """Ranks to try: any number of few GPUs, whole machines of many."""
    if request.optimizer == "adamw_8bit" and request.lora_rank is None:
        # A trainer of several ranks refuses it.
        return range(1, 2)
    if request.gpus <= _MOST_FINE_STEPS:
        return range(1, request.gpus)
    return range(GPUS_OF_A_MACHINE, request.gpus, GPUS_OF_A_MACHINE)


def _count_sequences(request: PlanRequest, replica: ReplicaSetting) -> int:
    """Completions of their whole context that a replica has room for, within limits."""
    used = sum(replica_bytes(request.model, replica).values())
    more = replace(replica, sequences=replica.sequences + 1)
    each = sum(replica_bytes(request.model, more).values()) - used
    free = (request.room - used) // each
    return max(FEWEST_SEQUENCES, min(MOST_SEQUENCES, replica.sequences + free))


def _replica(
    request: PlanRequest, *, engine: Literal["embedded", "vllm"], gpus: int, sequences: int
) -> ReplicaSetting:
    return ReplicaSetting(
        engine=engine,
        dtype=request.dtype,
        gpus=gpus,
        context=request.context,
        sequences=sequences,
        lora_rank=request.lora_rank,
        lora_targets=request.lora_targets,
    )


def _trainer(request: PlanRequest, *, ranks: int, room: int, kept: int = 0) -> TrainerSetting:
    """The fastest setting that fits: large passes, and all activations kept if there is room."""
    plain = TrainerSetting(
        dtype=request.dtype,
        ranks=ranks,
        lora_rank=request.lora_rank,
        lora_targets=request.lora_targets,
        optimizer=request.optimizer,
        has_reference=request.has_reference,
        snapshots_on_device=kept,
        offload_optimizer=request.offload_optimizer and ranks > 1,
        micro_batch_tokens=max(request.context, MICRO_BATCH_TOKENS),
    )
    memory = int(request.gpu_memory_gib * GIB)
    plain = choose_copies(request.model, plain, memory, ranks_of_machine=GPUS_OF_A_MACHINE)
    plain = replace(plain, sums_whole=choose_sums(request.model, plain, memory))
    if _needs(request, plain) <= room:
        return plain
    large = replace(plain, recompute_above=1)
    if _needs(request, large) <= room:
        return large
    small = replace(plain, micro_batch_tokens=request.context)
    return small if _needs(request, small) <= room else replace(small, recompute_above=1)


def _keep_most(request: PlanRequest, layout: Layout) -> Layout:
    """With recomputation of those passes only that have too many tokens for the room."""
    trainer = layout.trainer
    if not trainer.recomputes:
        return layout
    room = request.room - layout.is_shared * sum(layout.replica_bytes.values())

    def is_too_long(tokens: int) -> bool:
        plain = replace(trainer, micro_batch_tokens=tokens, recompute_above=None)
        return _needs(request, plain) > room

    longer = range(2, trainer.micro_batch_tokens)
    most = 1 + bisect.bisect_left(longer, True, key=is_too_long)
    return replace(layout, trainer=replace(trainer, recompute_above=most))


def _needs(request: PlanRequest, setting: TrainerSetting) -> int:
    return sum(trainer_bytes(request.model, setting).values())


def _token_s(request: PlanRequest, layout: Layout, gpu: Gpu) -> float:
    """Seconds per token while sampling and training run side by side: the slower of the two."""
    trained = training_tokens_per_s(request.model, layout.trainer, request.context, gpu)
    sampled = sampling_tokens_per_s(request.model, layout.replica, gpu)
    return max(1 / (trained * layout.trainer.ranks), 1 / (sampled * layout.replicas))


def _advice(request: PlanRequest) -> Iterator[str]:
    """Changes that make it fit, each by itself."""
    if request.dtype == "float32" and _fits(replace(request, dtype="bfloat16")):
        yield "bfloat16 fits: --dtype bfloat16"
    if request.lora_rank is None:
        yield from _advise_adapter(request)
    more = (gpus for gpus in _doubles(request.gpus) if _fits(replace(request, gpus=gpus)))
    if gpus := next(more, 0):
        yield f"more GPUs fit, with more ranks or replicas: --gpus {gpus}"
    for name in ("context", "concurrent"):
        value: int = getattr(request, name) or SHARED_SEQUENCES
        less = (half for half in _halves(value) if _fits(replace(request, **{name: half})))
        if half := next(less, 0):
            yield f"less of it at a time fits: --{name} {half}"
    away = replace(request, offload_optimizer=True)
    if request.gpus > 2 and not request.offload_optimizer and _fits(away):
        yield "weights and moments in the host's memory fit: --offload-optimizer"
    if request.has_reference and _fits(replace(request, has_reference=False)):
        yield "no reference fits: kl_beta=0, or an adapter, which shares its base with it"


def _advise_adapter(request: PlanRequest) -> Iterator[str]:
    """An adapter in place of all parameters; with fewer completions at a time where it must be."""
    adapter = replace(request, lora_rank=_SMALL_RANK, dtype="bfloat16")
    flags = f"--lora-rank {_SMALL_RANK}"
    if request.dtype != adapter.dtype:
        flags += f" --dtype {adapter.dtype}"
    if _fits(adapter):
        yield f"an adapter fits: {flags}"
        return
    for half in _halves(request.concurrent or SHARED_SEQUENCES):
        if _fits(replace(adapter, concurrent=half)):
            yield f"an adapter with fewer completions at a time fits: {flags} --concurrent {half}"
            return


def _fits(request: PlanRequest) -> bool:
    return find_best_layout(request) is not None


def _doubles(value: int) -> Iterator[int]:
    while (value := 2 * value) <= _MOST_GPUS:
        yield value


def _halves(value: int) -> Iterator[int]:
    while (value := value // 2) >= 1:
        yield value


def _format_value(value: str | int) -> str:
    if isinstance(value, int):
        return str(value).lower()
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
