"""Batches on the wire: datums as bodies, long batches in chunks, and the chunks' results as one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import tinker
from numpy.typing import NDArray

from hearth.errors import RequestError
from hearth.sdk.routed_input import RoutedModelInput
from hearth.wire.tensors import Encoding, TensorRecord, encoded
from hearth.wire.tinker import ForwardOutput

MAX_CHUNK_DATUMS = 1024
MAX_CHUNK_TOKENS = 500_000
_ROUTING_PER_TOKEN = 32
"""Characters of routing that count as a token: about what an id and its loss inputs take."""
TENSOR_ENCODING: Encoding = "base64"


def chunks_of(
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
        length = _weight(datum.model_input)
        full = len(chunks[-1]) == max_datums or tokens + length > MAX_CHUNK_TOKENS
        if chunks[-1] and full:
            chunks.append([])
            tokens = 0
        chunks[-1].append(datum)
        tokens += length
    return chunks


def datum_body(datum: tinker.Datum, only: Collection[str] | None = None) -> dict[str, Any]:
    """A datum as the wire has it, with all its loss inputs or ``only`` some.

    Raises:
        RequestError: the input is not made of token ids.
    """
    chunks: list[dict[str, Any]] = []
    for chunk in datum.model_input.chunks:
        tokens = getattr(chunk, "tokens", None)  # the union also holds image chunks
        if tokens is None:
            raise RequestError(f"model_input must hold token ids, got a {chunk.type!r} chunk")
        chunks.append({"tokens": list(tokens), "type": "encoded_text"})
    inputs = {
        name: encoded(value.to_numpy(), value.dtype, TENSOR_ENCODING)
        for name, value in datum.loss_fn_inputs.items()
        if only is None or name in only
    }
    model_input: dict[str, Any] = {"chunks": chunks}
    if isinstance(datum.model_input, RoutedModelInput):
        model_input["routing_matrices"] = datum.model_input.routing_matrices
    return {"model_input": model_input, "loss_fn_inputs": inputs}


def weighted_body(body: Mapping[str, Any], weights: NDArray[np.float32]) -> dict[str, Any]:
    """The same datum with these ``weights`` of its targets."""
    added = {"weights": encoded(weights, "float32", TENSOR_ENCODING)}
    return {**body, "loss_fn_inputs": body["loss_fn_inputs"] | added}


def merge_outputs(parts: Sequence[ForwardOutput]) -> tinker.ForwardBackwardOutput:
    """One output of several chunks: datums in order, metrics by their ``name:reduction``."""
    outputs = [
        {name: _tinker_tensor(value) for name, value in one.items()}
        for part in parts
        for one in part.loss_fn_outputs
    ]
    counts = [len(part.loss_fn_outputs) for part in parts]
    shared = set(parts[0].metrics).intersection(*(part.metrics for part in parts))
    metrics = {
        name: _reduce(name, [part.metrics[name] for part in parts], counts)
        for name in sorted(shared)
    }
    return tinker.ForwardBackwardOutput(
        loss_fn_output_type=parts[0].loss_fn_output_type, loss_fn_outputs=outputs, metrics=metrics
    )


def _weight(model_input: tinker.ModelInput) -> int:
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


def _tinker_tensor(record: TensorRecord) -> tinker.TensorData:
    return tinker.TensorData.from_numpy(np.array(record.to_numpy()))
