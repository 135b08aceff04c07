"""Batches on the wire: datums as bodies, long batches in chunks, and the chunks' results as one.

Datums of one form go as columns, a few tensors for all of them; others one by one.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tinker
from numpy.typing import NDArray

from hearth.errors import RequestError, TransportError
from hearth.wire.tensors import Encoding, encode_plain
from hearth.wire.tinker import ForwardOutput

MAX_CHUNK_DATUMS = 1024
MAX_CHUNK_TOKENS = 500_000
_ROUTING_PER_TOKEN = 32
"""Characters of routing that count as a token: about what an id and its loss inputs take."""
TENSOR_ENCODING: Encoding = "base64"


class RoutedModelInput(tinker.ModelInput):
    """Token ids, and for each the experts that a mixture-of-experts model is to send it to.

    ``routing_matrices`` are one text per input token, as ``SampledCompletion`` has them; an empty
    one leaves the choice to the trainer's own router. A trainer of a dense model pays no heed.
    """

    routing_matrices: list[str]

    def without_routing(self) -> tinker.ModelInput:
        """The same tokens alone."""
        return tinker.ModelInput(chunks=self.chunks)


def split_datums(
    data: Sequence[tinker.Datum], max_datums: int = MAX_CHUNK_DATUMS
) -> list[list[tinker.Datum]]:
    """``data`` cut where a request would hold more datums, or more than half a million tokens.

    What goes with the tokens of a ``RoutedModelInput`` counts by its size.

    Raises:
        RequestError: ``data`` is empty.
    """
    if not data:
        raise RequestError("data must hold at least one datum, got none")
    chunks: list[list[tinker.Datum]] = [[]]
    tokens = 0
    for datum in data:
        length = _count_tokens(datum.model_input)
        full = len(chunks[-1]) == max_datums or tokens + length > MAX_CHUNK_TOKENS
        if chunks[-1] and full:
            chunks.append([])
            tokens = 0
        chunks[-1].append(datum)
        tokens += length
    return chunks


@dataclass(frozen=True)
class DatumBatch:
    """The datums of one request."""

    body: Mapping[str, Any]
    """``data`` or ``columns`` of a request's input."""
    lengths: Sequence[int] | None
    """Input tokens of each datum, of ``columns``; None for datums one by one."""

    @property
    def count(self) -> int:
        """Number of datums."""
        return len(self.body["data"] if self.lengths is None else self.lengths)

    def with_weights(self, weights: Sequence[NDArray[np.float32]]) -> DatumBatch:
        """The same datums with these ``weights`` of their targets, one array each."""
        if self.lengths is None:
            pairs = zip(self.body["data"], weights, strict=True)
            return DatumBatch({"data": [_add_weights(*pair) for pair in pairs]}, None)
        columns = _add_weights(self.body["columns"], np.concatenate(weights))
        return DatumBatch({"columns": columns}, self.lengths)


def build_batch(
    data: Sequence[tinker.Datum], only: Collection[str] | None = None, *, as_columns: bool
) -> DatumBatch:
    """Datums with all their loss inputs or ``only`` some, as columns where they can be.

    Raises:
        RequestError: an input is not made of token ids.
    """
    batch = _build_columns(data, only) if as_columns else None
    if batch is not None:
        return batch
    return DatumBatch({"data": [_build_datum(datum, only) for datum in data]}, None)


def _build_columns(data: Sequence[tinker.Datum], only: Collection[str] | None) -> DatumBatch | None:
    """None where a datum has several chunks, experts, or other loss inputs than the first."""
    first = data[0].loss_fn_inputs
    names = [name for name in first if only is None or name in only]
    lengths: list[int] = []
    tokens: list[bytes] = []
    values: dict[str, list[NDArray[Any]]] = {name: [] for name in names}
    for datum in data:
        chunks, inputs = datum.model_input.chunks, datum.loss_fn_inputs
        own = getattr(chunks[0], "tokens", None) if len(chunks) == 1 else None
        if not own or isinstance(datum.model_input, RoutedModelInput):
            return None
        if only is None and len(inputs) != len(names):
            return None
        shape = (len(own),)
        for name in names:
            record = inputs.get(name)
            if record is None or record.dtype != first[name].dtype:
                return None
            array = record.to_numpy()
            if array.shape != shape:
                return None
            if record.dtype == "int64":
                # Half the bytes; tokens that have no room are sent datum by datum.
                narrow = array.astype(np.int32)
                if not np.array_equal(narrow, array):
                    return None
                array = narrow
            values[name].append(array)
        lengths.append(len(own))
        try:
            tokens.append(struct.pack(f"={len(own)}i", *own))  # numpy takes four times as long
        except struct.error:
            return None
    ids = np.frombuffer(b"".join(tokens), np.int32)
    columns = {
        "lengths": encode_plain(lengths, "int64", TENSOR_ENCODING),
        "tokens": encode_plain(ids, "int32", TENSOR_ENCODING),
        "loss_fn_inputs": {
            name: encode_plain(
                np.concatenate(arrays),
                "int32" if first[name].dtype == "int64" else "float32",
                TENSOR_ENCODING,
            )
            for name, arrays in values.items()
        },
    }
    return DatumBatch({"columns": columns}, lengths)


def _build_datum(datum: tinker.Datum, only: Collection[str] | None) -> dict[str, Any]:
    chunks: list[dict[str, Any]] = []
    for chunk in datum.model_input.chunks:
        tokens = getattr(chunk, "tokens", None)  # the union also holds image chunks
        if tokens is None:
            raise RequestError(f"model_input must hold token ids, got a {chunk.type!r} chunk")
        chunks.append({"tokens": list(tokens), "type": "encoded_text"})
    inputs = {
        name: encode_plain(value.to_numpy(), value.dtype, TENSOR_ENCODING)
        for name, value in datum.loss_fn_inputs.items()
        if only is None or name in only
    }
    model_input: dict[str, Any] = {"chunks": chunks}
    if isinstance(datum.model_input, RoutedModelInput):
        model_input["routing_matrices"] = datum.model_input.routing_matrices
    return {"model_input": model_input, "loss_fn_inputs": inputs}


def _add_weights(body: Mapping[str, Any], weights: NDArray[np.float32]) -> dict[str, Any]:
    added = {"weights": encode_plain(weights, "float32", TENSOR_ENCODING)}
    return {**body, "loss_fn_inputs": body["loss_fn_inputs"] | added}


def merge_outputs(
    parts: Sequence[ForwardOutput], batches: Sequence[DatumBatch]
) -> tinker.ForwardBackwardOutput:
    """One output of several chunks: datums in order, metrics by their ``name:reduction``."""
    by_part = [_split_outputs(*pair) for pair in zip(parts, batches, strict=True)]
    counts = [len(outputs) for outputs in by_part]
    shared = set(parts[0].metrics).intersection(*(part.metrics for part in parts))
    metrics = {
        name: _reduce(name, [part.metrics[name] for part in parts], counts)
        for name in sorted(shared)
    }
    return tinker.ForwardBackwardOutput(
        loss_fn_output_type=parts[0].loss_fn_output_type,
        loss_fn_outputs=[output for outputs in by_part for output in outputs],
        metrics=metrics,
    )


def _split_outputs(part: ForwardOutput, batch: DatumBatch) -> list[dict[str, tinker.TensorData]]:
    """A chunk's outputs, one mapping per datum."""
    if part.columns is None or batch.lengths is None:
        return [
            {name: _to_tinker(value.to_numpy()) for name, value in output.items()}
            for output in part.loss_fn_outputs
        ]
    ends = list(itertools.accumulate(batch.lengths))
    outputs: list[dict[str, tinker.TensorData]] = [{} for _ in ends]
    for name, column in part.columns.items():
        # A copy may be written to, as tinker's tensors may.
        values = np.array(column.to_numpy())
        if values.size != ends[-1]:
            raise TransportError(
                f"a trainer must answer with {ends[-1]} values of {name}, got {values.size}"
            )
        for output, start, end in zip(outputs, [0, *ends], ends, strict=False):
            output[name] = _to_tinker(values[start:end])
    return outputs


def _count_tokens(model_input: tinker.ModelInput) -> int:
    """How much of a request an input takes, in tokens."""
    if not isinstance(model_input, RoutedModelInput):
        return model_input.length
    return model_input.length + sum(map(len, model_input.routing_matrices)) // _ROUTING_PER_TOKEN


def _reduce(name: str, values: list[float], counts: list[int]) -> float:
    reduction = name.rpartition(":")[2]
    if reduction == "mean":
        total = sum(counts) or 1
        return sum(value * count for value, count in zip(values, counts, strict=True)) / total
    return {"min": min, "max": max}.get(reduction, sum)(values)


def _to_tinker(values: NDArray[Any]) -> tinker.TensorData:
    writable = values if values.flags.writeable else np.array(values)
    return tinker.TensorData.from_numpy(writable)
