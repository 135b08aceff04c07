"""Checked examples into micro-batches, padded or packed.

Legend: T tokens of a datum, K candidate targets per token, B datums of a padded batch, L its padded
length, S tokens of a packed batch; R real tokens of either, datum after datum; N layers with
experts, E experts that a token goes to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hearth.errors import ConfigError
from hearth.kernels.training import Tree
from hearth.models.packed import PAD_MULTIPLE, pack
from hearth.models.prefixes import Cluster, find_clusters
from hearth.wire.routing import FREE, RoutingShape


@dataclass(frozen=True, eq=False)
class Example:
    """One checked datum."""

    index: int
    """Its place in the request."""
    tokens: Tensor
    """Input token ids, int64 [T]."""
    targets: Tensor
    """Target token ids, int64 [T, K]."""
    target_shape: tuple[int, ...]
    """Shape that the targets came in: [T] or [T, K]."""
    inputs: Mapping[str, Tensor]
    """The other loss inputs, float32 [T * K]."""
    routing: Tensor | None = None
    """Experts of the tokens, int64 [T, N, E], ``FREE`` where the router decides; None where it
    decides everywhere."""

    @property
    def length(self) -> int:
        """T."""
        return self.tokens.numel()


def is_same_text(left: Sequence[Example], right: Sequence[Example]) -> bool:
    """Whether each scores the same targets after the same tokens and experts as its partner."""
    pairs = list(zip(left, right, strict=True))
    if any(first.targets.shape != second.targets.shape for first, second in pairs):
        return False
    nothing = torch.zeros(0, dtype=torch.int64)
    for name in ("tokens", "targets"):
        first, second = (
            torch.cat([nothing, *(getattr(example, name).reshape(-1) for example in side)])
            for side in (left, right)
        )
        if not torch.equal(first, second):
            return False
    return all(_is_same_routing(first.routing, second.routing) for first, second in pairs)


def _is_same_routing(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return first is second or torch.equal(first, second)


@dataclass(frozen=True, eq=False)
class PaddedBatch:
    """Examples that share one forward pass, padded on the right."""

    examples: Sequence[Example]
    input_ids: Tensor
    """int64 [B, L]; padding is token 0, which a causal model never sees from the left."""
    token_places: Tensor
    """Places of the real tokens in the flattened [B * L], int64 [R]."""
    targets: Tensor
    """int64 [R, K]; an example with fewer than K candidates repeats token 0."""
    routing: Tensor | None = None
    """Experts of the flattened tokens, int64 [B * L, N, E], ``FREE`` in the padding; None where all
    are free."""

    @property
    def num_tokens(self) -> int:
        """Tokens to compute, padding included."""
        return self.input_ids.numel()


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """Examples that share one forward pass without padding, each common prefix once."""

    examples: Sequence[Example]
    tokens: Tensor
    """int64 [S]."""
    positions: Tensor
    """int64 [S]."""
    tree: Tree
    """Which tokens see which."""
    token_places: Tensor
    """Places of the examples' tokens, int64 [R]; a shared token's place occurs once per example."""
    targets: Tensor
    """int64 [R, 1]."""
    routing: None = None

    @property
    def num_tokens(self) -> int:
        """Tokens to compute, padding included."""
        return self.tokens.numel()


MicroBatch = PaddedBatch | PackedBatch
"""Examples that share one forward pass."""


@dataclass(frozen=True)
class Limits:
    """What a model can take."""

    vocab_size: int
    max_seq_len: int
    """Most input tokens of a datum."""
    max_position: int
    """Most positions, padding included."""
    routing: RoutingShape | None = None
    """Its routers' layers and experts; None for a dense model, which replays nothing."""


def split_padded(
    examples: Sequence[Example], token_budget: int, limits: Limits
) -> list[PaddedBatch]:
    """Examples by falling length, in batches of at most ``token_budget`` padded tokens.

    An example above the budget gets a batch of its own.

    Raises:
        ConfigError: the budget is below 1.
    """
    if token_budget < 1:
        raise ConfigError(f"micro_batch_tokens must be >= 1, got {token_budget}")
    waiting = sorted(examples, key=lambda example: (-example.length, example.index))
    batches: list[PaddedBatch] = []
    while waiting:
        length = pad_length(waiting[0].length, limits)
        count = max(1, token_budget // length)
        batches.append(_collate(waiting[:count], length))
        waiting = waiting[count:]
    return batches


def split_packed(examples: Sequence[Example], token_budget: int) -> list[PackedBatch]:
    """Examples in batches of at most ``token_budget`` tokens, those with a common prefix together.

    One target per token. An example above the budget gets a batch of its own; a cluster above it
    is cut, and its prefix computed once per batch. Batches have multiples of 32 tokens.

    Raises:
        ConfigError: the budget is below 1.
    """
    if token_budget < 1:
        raise ConfigError(f"micro_batch_tokens must be >= 1, got {token_budget}")
    # Batches are padded to multiples of it.
    token_budget -= token_budget % PAD_MULTIPLE if token_budget > PAD_MULTIPLE else 0
    batches: list[PackedBatch] = []
    waiting: list[Cluster] = []
    room = token_budget
    lengths = [example.length for example in examples]
    for cluster in find_clusters([example.tokens for example in examples]):
        for part in cluster.split(lengths, token_budget):
            cost = part.tokens(lengths)
            if waiting and cost > room:
                batches.append(_pack(examples, waiting))
                waiting, room = [], token_budget
            waiting.append(part)
            room -= cost
    if waiting:
        batches.append(_pack(examples, waiting))
    return batches


def _pack(examples: Sequence[Example], packed: Sequence[Cluster]) -> PackedBatch:
    chosen = [examples[member] for cluster in packed for member in cluster.members]
    joined = pack([example.tokens for example in examples], packed)
    return PackedBatch(
        examples=chosen,
        tokens=joined.tokens,
        positions=joined.positions,
        tree=joined.tree,
        token_places=torch.cat(joined.places),
        targets=torch.cat([example.targets for example in chosen]),
    )


def pad_length(length: int, limits: Limits) -> int:
    """The next multiple of 32, as far as the model has positions."""
    return max(length, min(-(-length // PAD_MULTIPLE) * PAD_MULTIPLE, limits.max_position))


def _collate(examples: Sequence[Example], length: int) -> PaddedBatch:
    input_ids = torch.zeros(len(examples), length, dtype=torch.int64)
    width = max(example.targets.shape[1] for example in examples)
    places: list[Tensor] = []
    targets: list[Tensor] = []
    for number, example in enumerate(examples):
        input_ids[number, : example.length] = example.tokens
        places.append(torch.arange(example.length) + number * length)
        missing = width - example.targets.shape[1]
        targets.append(torch.nn.functional.pad(example.targets, (0, missing)))
    return PaddedBatch(
        examples, input_ids, torch.cat(places), torch.cat(targets), _join_routing(examples, length)
    )


def _join_routing(examples: Sequence[Example], length: int) -> Tensor | None:
    given = [example.routing for example in examples if example.routing is not None]
    if not given:
        return None
    joined = torch.full((len(examples), length, *given[0].shape[1:]), FREE)
    for number, example in enumerate(examples):
        if example.routing is not None:
            joined[number, : example.length] = example.routing
    return joined.flatten(0, 1)
