"""Checks datums of a request and turns them into examples.

Clients shift datums: ``target_tokens[t]`` follow input token t.
"""

from __future__ import annotations

import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hearth.errors import RequestError
from hearth.losses import BuiltinObjective
from hearth.trainer.packing import Example, Limits
from hearth.wire.routing import RoutingShape, decode_routing
from hearth.wire.tensors import ITEM_BYTES, NUMPY_DTYPES, TensorRecord
from hearth.wire.tinker import DatumColumns, DatumRecord, ModelInputRecord

Datums = Sequence[DatumRecord] | DatumColumns
"""The data of a request: one record per datum, or a column per field."""

_MULTI_TARGET_LOSS = "cross_entropy"


def read_datums(data: Datums, objective: BuiltinObjective, limits: Limits) -> list[Example]:
    """Check every datum before anything is computed.

    Raises:
        RequestError: there is no datum, or one breaks a rule; the message names its index.
    """
    if isinstance(data, DatumColumns):
        columns = _Columns(*data.arrays())
    else:
        columns = _Columns.from_datums(data)
    examples = columns and columns.make_examples(objective, limits)
    if examples:
        return examples
    if isinstance(data, DatumColumns):
        data = data.datums()
    if not data:
        raise RequestError("data must hold at least one datum, got none")
    return [_read_datum(index, datum, objective, limits) for index, datum in enumerate(data)]


@dataclass(frozen=True)
class _Columns:
    """Datums with one value per token, end to end; only their sizes are checked."""

    lengths: list[int]
    tokens: NDArray[np.int64]
    inputs: Mapping[str, NDArray[np.int64] | NDArray[np.float32]]

    @classmethod
    def from_datums(cls, data: Sequence[DatumRecord]) -> _Columns | None:
        """The columns of datums; None where one has another form than our SDK sends."""
        if not data:
            return None
        names = data[0].loss_fn_inputs.keys()
        lengths: list[int] = []
        ids: list[int] = []
        for datum in data:
            (chunk, *more), own = datum.model_input.chunks or (None,), datum.loss_fn_inputs
            if chunk is None or more or chunk.type != "encoded_text" or not chunk.tokens:
                return None
            if datum.model_input.routing_matrices or own.keys() != names:
                return None
            shape = [len(chunk.tokens)]
            if any(record.shape != shape for record in own.values()):
                return None
            lengths += shape
            ids += chunk.tokens
        sent = [datum.loss_fn_inputs for datum in data]
        columns = {name: _join_values([own[name] for own in sent], lengths) for name in names}
        if any(values is None for values in columns.values()):
            return None
        try:
            tokens = np.array(ids, dtype=np.int64)
        except OverflowError:
            return None
        return cls(lengths, tokens, {k: v for k, v in columns.items() if v is not None})

    def make_examples(self, objective: BuiltinObjective, limits: Limits) -> list[Example] | None:
        """All examples; None where a datum breaks a rule, which ``_read_datum`` then reports."""
        known = {"target_tokens", *objective.required_inputs, *objective.optional_inputs}
        if "target_tokens" not in self.inputs or not self.inputs.keys() <= known:
            return None
        targets = self.inputs["target_tokens"]
        if targets.dtype != np.int64 or not self.lengths:
            return None
        if min(self.lengths) < 1 or max(self.lengths) > limits.max_seq_len:
            return None
        least = min(self.tokens.min(), targets.min())
        most = max(self.tokens.max(), targets.max())
        if least < 0 or most >= limits.vocab_size:
            return None
        inputs = {
            name: torch.from_numpy(values.astype(np.float32)).split(self.lengths)
            for name, values in self.inputs.items()
            if name != "target_tokens"
        }
        pairs = zip(
            torch.from_numpy(self.tokens.copy()).split(self.lengths),
            torch.from_numpy(targets.astype(np.int64)).unsqueeze(1).split(self.lengths),
            strict=True,
        )
        return [
            Example(
                index=index,
                tokens=tokens,
                targets=targets,
                target_shape=(self.lengths[index],),
                inputs={name: parts[index] for name, parts in inputs.items()},
            )
            for index, (tokens, targets) in enumerate(pairs)
        ]


def _join_values(
    records: Sequence[TensorRecord], lengths: Sequence[int]
) -> NDArray[np.int64] | NDArray[np.float32] | None:
    """The values of dense records end to end; None where a record has another dtype or form."""
    dtype = records[0].dtype
    parts: list[bytes] = []
    for record, length in zip(records, lengths, strict=True):
        if record.dtype != dtype or not isinstance(record.data, str):
            return None
        if record.sparse_crow_indices is not None:
            return None
        try:
            parts.append(binascii.a2b_base64(record.data, strict_mode=True))
        except ValueError:
            return None
        if len(parts[-1]) != length * ITEM_BYTES[dtype]:
            return None
    return np.frombuffer(b"".join(parts), dtype=NUMPY_DTYPES[dtype])


def _read_datum(
    index: int, datum: DatumRecord, objective: BuiltinObjective, limits: Limits
) -> Example:
    where = f"datum {index}"
    tokens = _read_token_ids(where, datum.model_input)
    if not 0 < tokens.size <= limits.max_seq_len:
        raise RequestError(
            f"{where}: model_input must have 1 to {limits.max_seq_len} tokens, got {tokens.size}: "
            "cut or drop longer sequences, or create the trainer with a larger max_seq_len"
        )
    targets = _read_targets(where, datum, tokens.size, objective)
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
        inputs=_read_loss_inputs(where, datum, targets.shape),
        routing=_read_routing(where, datum.model_input, tokens.size, limits.routing),
    )


def _read_token_ids(where: str, model_input: ModelInputRecord) -> NDArray[np.int64]:
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


def _read_routing(
    where: str, model_input: ModelInputRecord, length: int, shape: RoutingShape | None
) -> Tensor | None:
    matrices = model_input.routing_matrices
    if not matrices or shape is None:
        return None
    if len(matrices) != length:
        raise RequestError(
            f"{where}: routing_matrices must be one per input token, {length}, got "
            f"{len(matrices)}: N tokens have N - 1 inputs; an empty text leaves the choice to the "
            "router"
        )
    if not any(matrices):
        return None
    try:
        return torch.from_numpy(decode_routing(matrices, shape))
    except RequestError as error:
        raise RequestError(f"{where}: {error}") from None


def _read_targets(
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


def _read_loss_inputs(where: str, datum: DatumRecord, shape: tuple[int, ...]) -> dict[str, Tensor]:
    inputs: dict[str, Tensor] = {}
    for name, record in datum.loss_fn_inputs.items():
        if name == "target_tokens":
            continue
        # Some clients send masks as int64: the name decides, not the dtype.
        values = np.array(record.to_numpy(), dtype=np.float32)
        if values.shape != shape:
            raise RequestError(
                f"{where}: {name} must have the shape of target_tokens, {list(shape)}, got "
                f"{list(values.shape)}"
            )
        inputs[name] = torch.from_numpy(values.reshape(-1))
    return inputs
