"""Whether a model can be trained and served on some GPUs, and how to divide them.

One GPU is shared by trainer and deployment. More are divided: some for the trainer's ranks, some
for the deployment's replicas, so that neither waits long for the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from hearth.errors import ConfigError
from hearth.planning.architecture import Architecture
from hearth.planning.memory import (
    GIB,
    ITEMSIZE,
    SNAPSHOTS_IN_MEMORY,
    Dtype,
    ReplicaSetting,
    TrainerSetting,
    activation_bytes_per_token,
    host_bytes,
    replica_bytes,
    snapshot_bytes,
    trainer_bytes,
)
from hearth.planning.rates import Gpu, drawing_tokens_per_s, training_tokens_per_s

USABLE_SHARE = 0.9
"""Of a GPU's memory. The rest is for CUDA itself, communication buffers and fragments."""
GPUS_OF_A_MACHINE = 8
"""More than these are several machines, which Ray places workers on."""
MOST_REPLICAS = 64
"""Of one deployment."""
MICRO_BATCH_TOKENS = 16384
"""What a trainer packs into a pass where nobody says otherwise."""
CHANGED_SHARE = 0.03
"""Bytes of a delta over those of a base, as measured in benchmarks/RESULTS.md for bfloat16."""
_SPLITS = (1, 2, 4, 8)
_MOST_GPUS = 1024
_FINE = 128
_SMALL_RANK = 32

Placement = Literal["inline", "process", "ray"]


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is to be planned.

    Raises:
        ConfigError: a value breaks its rule.
    """

    model: Architecture
    gpus: int
    context: int
    """Tokens of the longest sequence, prompt included."""
    gpu_memory_gib: float = 80.0
    lora_rank: int | None = None
    dtype: Dtype = "bfloat16"
    has_reference: bool = False
    offload_optimizer: bool = False
    """Have ranks keep their parts of weights, gradients and moments in the host's memory."""
    concurrent: int = 64
    """Completions in flight at one time, over all replicas."""

    def __post_init__(self) -> None:
        for name in ("gpus", "context", "concurrent", "lora_rank"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be >= 1, got {value}")
        if not self.gpu_memory_gib > 0:
            raise ConfigError(f"gpu_memory_gib must be > 0, got {self.gpu_memory_gib}")
        longest = self.model.max_positions
        if longest is not None and self.context > longest:
            raise ConfigError(
                f"context must be at most {longest}, the positions of the model, got {self.context}"
            )

    @property
    def room(self) -> int:
        """Usable bytes of each GPU."""
        return int(self.gpu_memory_gib * GIB * USABLE_SHARE)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Who gets which GPUs, and what each then holds."""

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
        """Bytes that are missing on a GPU, by who is short of them; empty where all fits."""
        trainer, replica = sum(self.trainer_bytes.values()), sum(self.replica_bytes.values())
        wanted = {"trainer": trainer, "deployment": replica}
        if self.is_shared:
            wanted = {"trainer and deployment": trainer + replica}
        return {name: one - room for name, one in wanted.items() if one > room}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The answer to a question."""

    fits: bool
    layout: Layout
    """Where nothing fits, the nearest that there is."""
    host_bytes: int
    """CPU memory of the trainer for publishing weights."""
    base_bytes: int
    """Of a weight sync that sends everything."""
    delta_bytes: int
    """Of one that sends what has changed, roughly."""
    shortage: dict[str, int]
    """Bytes that are missing on a GPU, by who is short of them."""
    advice: list[str] = field(default_factory=list[str])
    """What would fit."""


def answer(question: Question) -> Plan:
    """Whether it fits, how to divide the GPUs, and else what would."""
    best = best_layout(question)
    layout = best or nearest_layout(question)
    base = snapshot_bytes(question.model, layout.trainer)
    return Plan(
        fits=best is not None,
        layout=layout,
        host_bytes=0
        if layout.placement == "inline"
        else host_bytes(question.model, layout.trainer),
        base_bytes=base,
        delta_bytes=base if question.lora_rank is not None else _delta_bytes(base, question.dtype),
        shortage={} if best is not None else layout.excess(question.room),
        advice=[] if best is not None else list(_advice(question)),
    )


def best_layout(question: Question) -> Layout | None:
    """The layout that fits and makes steps shortest; None where none fits."""
    if question.gpus == 1:
        return next(
            (layout for layout in _shared_layouts(question) if not layout.excess(question.room)),
            None,
        )
    gpu = Gpu()
    found: list[Layout] = []
    for split in _SPLITS:
        fitting = [
            layout
            for layout in _divided_layouts(question, split)
            if not layout.excess(question.room)
        ]
        # Of layouts that are as fast, the one with fewer GPUs.
        found += sorted(fitting, key=lambda one: (_token_s(question, one, gpu), one.gpus))[:1]
        # Several GPUs to a replica are for where one is too small, or replicas would be too many.
        if found and found[-1].replicas < MOST_REPLICAS:
            break
    return min(found, key=lambda one: (_token_s(question, one, gpu), one.gpus), default=None)


def nearest_layout(question: Question) -> Layout:
    """The layout that misses least memory."""
    found = list(_shared_layouts(question))
    if question.gpus > 1:
        found = [layout for split in _SPLITS for layout in _divided_layouts(question, split)]
    return min(found, key=lambda one: sum(one.excess(question.room).values()))


def _shared_layouts(question: Question) -> Iterator[Layout]:
    """One GPU: the whole platform in the recipe's process, then in processes of their own."""
    served = _replica(question, engine="embedded", gpus=1, sequences=question.concurrent)
    placements: tuple[Placement, ...] = ("inline", "process")
    for placement in placements:
        # In one process a snapshot in memory is both what is kept and what is loaded from.
        kept = SNAPSHOTS_IN_MEMORY if placement == "inline" else 0
        replica = replace(served, stages_weights=placement == "process")
        held = replica_bytes(question.model, replica)
        trainer = _trainer(question, ranks=1, room=question.room - sum(held.values()), kept=kept)
        yield Layout(
            placement=placement,
            trainer=trainer,
            replica=replica,
            replicas=1,
            is_shared=True,
            trainer_bytes=trainer_bytes(question.model, trainer),
            replica_bytes=held,
        )


def _divided_layouts(question: Question, split: int) -> Iterator[Layout]:
    """Some GPUs for ranks, the others for replicas of ``split`` each."""
    placement: Placement = "process" if question.gpus <= GPUS_OF_A_MACHINE else "ray"
    for ranks in _rank_counts(question.gpus):
        replicas = min(MOST_REPLICAS, (question.gpus - ranks) // split)
        if replicas == 0 or split > question.model.kv_heads:
            continue
        trainer = _trainer(question, ranks=ranks, room=question.room)
        sequences = -(-question.concurrent // replicas)
        replica = _replica(question, engine="vllm", gpus=split, sequences=sequences)
        yield Layout(
            placement=placement,
            trainer=trainer,
            replica=replica,
            replicas=replicas,
            is_shared=False,
            trainer_bytes=trainer_bytes(question.model, trainer),
            replica_bytes=replica_bytes(question.model, replica),
        )


def _rank_counts(gpus: int) -> range:
    """Ranks to try: any number of few GPUs, whole machines of many."""
    if gpus <= _FINE:
        return range(1, gpus)
    return range(GPUS_OF_A_MACHINE, gpus, GPUS_OF_A_MACHINE)


def _replica(
    question: Question, *, engine: Literal["embedded", "vllm"], gpus: int, sequences: int
) -> ReplicaSetting:
    return ReplicaSetting(
        engine=engine,
        dtype=question.dtype,
        gpus=gpus,
        context=question.context,
        sequences=sequences,
        lora_rank=question.lora_rank,
    )


def _trainer(question: Question, *, ranks: int, room: int, kept: int = 0) -> TrainerSetting:
    """The fastest setting that fits: large passes, and activations kept as far as there is room."""
    plain = TrainerSetting(
        dtype=question.dtype,
        ranks=ranks,
        lora_rank=question.lora_rank,
        has_reference=question.has_reference,
        snapshots_on_device=kept,
        offload_optimizer=question.offload_optimizer and ranks > 1,
        micro_batch_tokens=max(question.context, MICRO_BATCH_TOKENS),
    )
    if _needs(question, plain) <= room:
        return plain
    large = _recomputing(question, plain, room)
    if _needs(question, large) <= room:
        return large
    small = replace(plain, micro_batch_tokens=question.context)
    return small if _needs(question, small) <= room else _recomputing(question, small, room)


def _recomputing(question: Question, plain: TrainerSetting, room: int) -> TrainerSetting:
    """With recomputation above as many tokens as there is room for without."""
    least = replace(plain, recompute_above=1)
    held = trainer_bytes(question.model, least)
    rest = sum(held.values()) - held["activations"] - held.get("recomputed layer", 0)
    most = (room - rest) // activation_bytes_per_token(question.model, plain)
    return replace(plain, recompute_above=max(1, min(most, plain.micro_batch_tokens - 1)))


def _needs(question: Question, setting: TrainerSetting) -> int:
    return sum(trainer_bytes(question.model, setting).values())


def _token_s(question: Question, layout: Layout, gpu: Gpu) -> float:
    """Seconds of a token, drawn and trained side by side: the slower of the two."""
    trained = training_tokens_per_s(question.model, layout.trainer, question.context, gpu)
    drawn = drawing_tokens_per_s(question.model, layout.replica, gpu)
    return max(1 / (trained * layout.trainer.ranks), 1 / (drawn * layout.replicas))


def _delta_bytes(base: int, dtype: Dtype) -> int:
    # An optimizer step changes every bit pattern in float32.
    return base if ITEMSIZE[dtype] == 4 else round(CHANGED_SHARE * base)


def _advice(question: Question) -> Iterator[str]:
    """Single changes that make it fit."""
    if question.dtype == "float32" and _fits(replace(question, dtype="bfloat16")):
        yield "bfloat16 fits: --dtype bfloat16"
    if question.lora_rank is None and _fits(replace(question, lora_rank=_SMALL_RANK)):
        yield f"an adapter fits: --lora-rank {_SMALL_RANK}"
    gpus = next((one for one in _doubled(question.gpus) if _fits(replace(question, gpus=one))), 0)
    if gpus:
        yield f"more GPUs fit, with more ranks or replicas: --gpus {gpus}"
    for name in ("context", "concurrent"):
        value: int = getattr(question, name)
        less = next((one for one in _halved(value) if _fits(replace(question, **{name: one}))), 0)
        if less:
            yield f"less of it at a time fits: --{name} {less}"
    away = replace(question, offload_optimizer=True)
    if question.gpus > 2 and not question.offload_optimizer and _fits(away):
        yield "weights and moments in the host's memory fit: --offload-optimizer"
    if question.has_reference and _fits(replace(question, has_reference=False)):
        yield "no reference fits: kl_beta=0, or an adapter, which shares its base with it"


def _fits(question: Question) -> bool:
    return best_layout(question) is not None


def _doubled(value: int) -> Iterator[int]:
    while (value := 2 * value) <= _MOST_GPUS:
        yield value


def _halved(value: int) -> Iterator[int]:
    while (value := value // 2) >= 1:
        yield value
