"""Datums into checked examples, and examples into padded micro-batches.

Legend: T tokens of a datum, K candidate targets per token, B rows of a micro-batch, L its padded
length, R its real tokens, datum after datum; N layers with experts, E experts that a token goes to.

A datum is shifted already: its ``target_tokens[t]`` follow its input token t.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hearth.errors import ConfigError, RequestError
from hearth.kernels.tree import Tree
from hearth.losses import BuiltinObjective
from hearth.models.packed import PAD_MULTIPLE, pack
from hearth.models.prefixes import Cluster, clusters
from hearth.wire.routing import FREE, RoutingShape, decode_routing
from hearth.wire.tinker import DatumRecord, ModelInputRecord

_MULTI_TARGET_LOSS = "cross_entropy"


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
    """Experts that the tokens are to go to, int64 [T, N, E], ``FREE`` where the router decides;
    None where it decides everywhere."""

    @property
    def length(self) -> int:
        """T."""
        return self.tokens.numel()

    def is_same_text(self, other: Example) -> bool:
        """Whether both score the same targets after the same tokens and experts."""
        if (self.routing is None) != (other.routing is None):
            return False
        same = torch.equal(self.tokens, other.tokens) and torch.equal(self.targets, other.targets)
        if self.routing is None or other.routing is None:
            return same
        return same and torch.equal(self.routing, other.routing)


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Examples that share one forward pass, padded on the right."""

    examples: Sequence[Example]
    input_ids: Tensor
    """int64 [B, L]; padding is token 0, which a causal model never sees from the left."""
    rows: Tensor
    """Where the real tokens stand in the flattened [B * L], int64 [R]."""
    targets: Tensor
    """int64 [R, K]; an example with fewer than K candidates repeats token 0."""
    routing: Tensor | None = None
    """Experts of the flattened tokens, int64 [B * L, N, E], ``FREE`` in the padding; None where all
    are free."""

    @property
    def num_rows(self) -> int:
        """Tokens to compute, padding included."""
        return self.input_ids.numel()


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """Examples that share one forward pass without padding, each common prefix once."""

    examples: Sequence[Example]
    tokens: Tensor
    """int64 [S], row after row."""
    positions: Tensor
    """int64 [S]."""
    tree: Tree
    """Which rows see which."""
    rows: Tensor
    """Where the examples' tokens stand, int64 [R]; a shared row stands there for each."""
    targets: Tensor
    """int64 [R, 1]."""
    routing: None = None

    @property
    def num_rows(self) -> int:
        """Tokens to compute, padding included."""
        return self.tokens.numel()


@dataclass(frozen=True)
class Limits:
    """What a model can take."""

    vocab_size: int
    max_seq_len: int
    """Most input tokens of a datum."""
    max_position: int
    """Most positions, padding included."""
    routing: RoutingShape | None = None
    """What its routers choose from; None for a dense model, which replays nothing."""


def read_datums(
    data: Sequence[DatumRecord], objective: BuiltinObjective, limits: Limits
) -> list[Example]:
    """Check every datum before anything is computed.

    Raises:
        RequestError: there is no datum, or one breaks a rule; the message names its index.
    """
    if not data:
        raise RequestError("data must hold at least one datum, got none")
    return [_read_datum(index, datum, objective, limits) for index, datum in enumerate(data)]


def micro_batches(
    examples: Sequence[Example], token_budget: int, limits: Limits
) -> list[MicroBatch]:
    """Examples by falling length, in batches of at most ``token_budget`` padded tokens.

    An example above the budget gets a batch of its own.

    Raises:
        ConfigError: the budget is below 1.
    """
    if token_budget < 1:
        raise ConfigError(f"micro_batch_tokens must be >= 1, got {token_budget}")
    waiting = sorted(examples, key=lambda one: (-one.length, one.index))
    batches: list[MicroBatch] = []
    while waiting:
        length = padded_length(waiting[0].length, limits)
        count = max(1, token_budget // length)
        batches.append(_collate(waiting[:count], length))
        waiting = waiting[count:]
    return batches


def packed_batches(examples: Sequence[Example], token_budget: int) -> list[PackedBatch]:
    """Examples in batches of at most ``token_budget`` rows, those with a common prefix together.

    One target per token. An example above the budget gets a batch of its own; a cluster above it
    is cut, and its prefix computed once per batch. Batches have whole multiples of 32 rows.

    Raises:
        ConfigError: the budget is below 1.
    """
    if token_budget < 1:
        raise ConfigError(f"micro_batch_tokens must be >= 1, got {token_budget}")
    # A batch is padded to that multiple.
    token_budget -= token_budget % PAD_MULTIPLE if token_budget > PAD_MULTIPLE else 0
    batches: list[PackedBatch] = []
    waiting: list[Cluster] = []
    room = token_budget
    lengths = [one.length for one in examples]
    for cluster in clusters([one.tokens for one in examples]):
        for part in _fitting(cluster, lengths, token_budget):
            cost = part.tokens(lengths)
            if waiting and cost > room:
                batches.append(_pack(examples, waiting))
                waiting, room = [], token_budget
            waiting.append(part)
            room -= cost
    if waiting:
        batches.append(_pack(examples, waiting))
    return batches


def _fitting(cluster: Cluster, lengths: Sequence[int], token_budget: int) -> list[Cluster]:
    """The cluster in parts of at most the budget, its prefix in each."""
    parts: list[Cluster] = []
    members: list[int] = []
    room = token_budget - cluster.prefix
    for one in cluster.members:
        own = lengths[one] - cluster.prefix
        if members and own > room:
            parts.append(Cluster(tuple(members), cluster.prefix))
            members, room = [], token_budget - cluster.prefix
        members.append(one)
        room -= own
    return [*parts, Cluster(tuple(members), cluster.prefix)]


def _pack(examples: Sequence[Example], packed: Sequence[Cluster]) -> PackedBatch:
    chosen = [examples[one] for cluster in packed for one in cluster.members]
    rows = pack([one.tokens for one in examples], packed)
    return PackedBatch(
        examples=chosen,
        tokens=rows.tokens,
        positions=rows.positions,
        tree=rows.tree,
        rows=torch.cat(rows.places),
        targets=torch.cat([one.targets for one in chosen]),
    )


def padded_length(length: int, limits: Limits) -> int:
    """The next multiple of 32, as far as the model has positions."""
    return max(length, min(-(-length // PAD_MULTIPLE) * PAD_MULTIPLE, limits.max_position))


def _read_datum(
    index: int, datum: DatumRecord, objective: BuiltinObjective, limits: Limits
) -> Example:
    where = f"datum {index}"
    tokens = _token_ids(where, datum.model_input)
    if not 0 < tokens.size <= limits.max_seq_len:
        raise RequestError(
            f"{where}: model_input must have 1 to {limits.max_seq_len} tokens, got {tokens.size}: "
            "cut or drop longer sequences, or create the trainer with a larger max_seq_len"
        )
    targets = _targets(where, datum, tokens.size, objective)
    for name, values in (("model_input", tokens), ("target_tokens", targets)):
        _check_vocabulary(where, name, values, limits.vocab_size)
    known = {"target_tokens", *objective.required_inputs, *objective.optional_inputs}
    if unknown := sorted(datum.loss_fn_inputs.keys() - known):
        raise RequestError(
            f"{where}: loss_fn_inputs of {objective.name} must be among {sorted(known)}, "
            f"got {unknown}"
        )
    return Example(
        index=index,
        tokens=torch.from_numpy(tokens),
        targets=torch.from_numpy(targets.reshape(tokens.size, -1)),
        target_shape=targets.shape,
        inputs=_loss_inputs(where, datum, targets.shape),
        routing=_routing(where, datum.model_input, tokens.size, limits.routing),
    )


def _token_ids(where: str, model_input: ModelInputRecord) -> NDArray[np.int64]:
    ids: list[int] = []
    for chunk in model_input.chunks:
        if chunk.type != "encoded_text" or chunk.tokens is None:
            raise RequestError(
                f"{where}: model_input must be made of encoded_text chunks, got a {chunk.type!r} "
                "chunk: this trainer takes token ids only"
            )
        ids += chunk.tokens
    try:
        return np.array(ids, dtype=np.int64)
    except OverflowError:
        raise RequestError(f"{where}: model_input must hold 64-bit token ids") from None


def _routing(
    where: str, model_input: ModelInputRecord, length: int, shape: RoutingShape | None
) -> Tensor | None:
    rows = model_input.routing_matrices
    if not rows or shape is None:
        return None
    if len(rows) != length:
        raise RequestError(
            f"{where}: routing_matrices must be one per input token, {length}, got {len(rows)}: N "
            "tokens have N - 1 inputs; empty texts stand where the router is free"
        )
    if not any(rows):
        return None
    try:
        return torch.from_numpy(decode_routing(rows, shape))
    except RequestError as error:
        raise RequestError(f"{where}: {error}") from None


def _targets(
    where: str, datum: DatumRecord, length: int, objective: BuiltinObjective
) -> NDArray[np.int64]:
    if "target_tokens" not in datum.loss_fn_inputs:
        raise RequestError(f"{where}: loss_fn_inputs must hold target_tokens, got none")
    record = datum.loss_fn_inputs["target_tokens"]
    if record.dtype != "int64":
        raise RequestError(f"{where}: target_tokens must be int64, got {record.dtype}")
    targets = np.array(record.to_numpy(), dtype=np.int64)
    dimensions = (1, 2) if objective.name == _MULTI_TARGET_LOSS else (1,)
    is_shaped = targets.ndim in dimensions and targets.size > 0
    if not is_shaped or targets.shape[0] != length:
        shape = f"[{length}] or [{length}, K]" if 2 in dimensions else f"[{length}]"
        raise RequestError(
            f"{where}: target_tokens of {objective.name} must have shape {shape} as model_input, "
            f"got {list(targets.shape)}"
        )
    return targets


def _check_vocabulary(where: str, name: str, ids: NDArray[np.int64], vocab_size: int) -> None:
    bad = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if bad.size:
        raise RequestError(
            f"{where}: {name} must be token ids in [0, {vocab_size}), got {ids.flat[bad[0]]} at "
            f"position {bad[0]}: was the text encoded with this model's tokenizer?"
        )


def _loss_inputs(where: str, datum: DatumRecord, shape: tuple[int, ...]) -> dict[str, Tensor]:
    inputs: dict[str, Tensor] = {}
    for name, record in datum.loss_fn_inputs.items():
        if name == "target_tokens":
            continue
        # Clients send masks as int64 too; the name says what it is, not the dtype.
        values = np.array(record.to_numpy(), dtype=np.float32)
        if values.shape != shape:
            raise RequestError(
                f"{where}: {name} must have the shape of target_tokens, {list(shape)}, got "
                f"{list(values.shape)}"
            )
        inputs[name] = torch.from_numpy(values.reshape(-1))
    return inputs


def _collate(examples: Sequence[Example], length: int) -> MicroBatch:
    input_ids = torch.zeros(len(examples), length, dtype=torch.int64)
    width = max(example.targets.shape[1] for example in examples)
    rows: list[Tensor] = []
    targets: list[Tensor] = []
    for row, example in enumerate(examples):
        input_ids[row, : example.length] = example.tokens
        rows.append(torch.arange(example.length) + row * length)
        missing = width - example.targets.shape[1]
        targets.append(torch.nn.functional.pad(example.targets, (0, missing)))
    return MicroBatch(
        examples, input_ids, torch.cat(rows), torch.cat(targets), _joined_routing(examples, length)
    )


def _joined_routing(examples: Sequence[Example], length: int) -> Tensor | None:
    given = [example.routing for example in examples if example.routing is not None]
    if not given:
        return None
    joined = torch.full((len(examples), length, *given[0].shape[1:]), FREE)
    for row, example in enumerate(examples):
        if example.routing is not None:
            joined[row, : example.length] = example.routing
    return joined.flatten(0, 1)
