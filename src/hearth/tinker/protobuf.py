"""Tinker's binary messages: the requests of training passes, the results of passes and samples.

The schema is written from the wire format's field numbers and types. Numbers stand in bytes fields,
little-endian. The classes are made from it when they are first used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from numpy.typing import NDArray

from hearth.errors import RequestError
from hearth.wire.tensors import DType, encode_plain
from hearth.wire.tinker_requests import log_unknown

MEDIA_TYPE = "application/x-protobuf"

_PACKAGE = "hearth_tinker"
_FLOAT32, _INT64 = 1, 2
_DTYPES: Mapping[int, tuple[DType, str]] = {_FLOAT32: ("float32", "<f4"), _INT64: ("int64", "<i8")}
_EMPTY_TOKEN, _EMPTY_LOGPROB = 0, -99999.0
"""Fill the places of top-k lists that have no token."""

# Per message its fields: number, name, type. A type with [] is repeated, with {} a map from texts;
# "?" marks a field that can be told to be absent, "|name" one of those of which only one is there.
_SCHEMA: Mapping[str, Sequence[tuple[int, str, str]]] = {
    "EncodedText": [(1, "tokens", "bytes")],
    "Image": [(1, "data", "bytes"), (2, "format", "string")],
    "Dmel": [(1, "dmel", "bytes")],
    "Chunk": [
        (1, "encoded_text", "EncodedText|kind"),
        (2, "image", "Image|kind"),
        (3, "dmel", "Dmel|kind"),
    ],
    "SparseCsr": [
        (1, "values", "bytes"),
        (2, "crow_indices", "bytes"),
        (3, "col_indices", "bytes"),
    ],
    "Tensor": [
        (1, "dense", "bytes|encoding"),
        (2, "sparse_csr", "SparseCsr|encoding"),
        (3, "dtype", "int32"),
        (4, "shape", "int64[]"),
    ],
    "Datum": [(1, "model_input", "Chunk[]"), (2, "loss_fn_inputs", "Tensor{}")],
    "ConfigValue": [(1, "number", "double|value"), (2, "text", "string|value")],
    "ForwardBackwardRequest": [
        (1, "model_id", "string"),
        (2, "seq_id", "int32"),
        (3, "data", "Datum[]"),
        (4, "loss_fn", "string"),
        (5, "loss_fn_config", "double{}"),
        (6, "forward_only", "bool"),
        (7, "loss_fn_config_v2", "ConfigValue{}"),
    ],
    "BatchedTensor": [
        (1, "data", "bytes"),
        (2, "offsets", "bytes"),
        (3, "dtype", "int32"),
        (4, "trailing_shape", "int64[]"),
    ],
    "ArrayRecord": [
        (1, "type_tag", "string"),
        (2, "fields", "BatchedTensor{}"),
        (3, "num_datums", "int64"),
    ],
    "ForwardBackwardOutput": [
        (1, "loss_fn_output_type", "string"),
        (2, "loss_fn_outputs", "ArrayRecord[]"),
        (3, "metrics", "double{}"),
    ],
    "TopkLogprobs": [
        (1, "token_ids", "bytes"),
        (2, "logprobs", "bytes"),
        (3, "k", "uint32"),
        (4, "length", "uint32"),
    ],
    "SampledSequence": [
        (1, "stop_reason", "int32"),
        (2, "tokens", "bytes"),
        (3, "logprobs", "bytes?"),
        (4, "topk_sampled_logprobs", "TopkLogprobs"),
    ],
    "SampleResponse": [
        (1, "sequences", "SampledSequence[]"),
        (2, "prompt_logprobs", "bytes?"),
        (3, "topk_prompt_logprobs", "TopkLogprobs"),
        (4, "prompt_cache_hit_tokens", "int32"),
        (5, "target_prompt_logprobs", "Tensor"),
    ],
}

TopLogprobs = Sequence[tuple[int, float]]
"""The most probable tokens of one position, the likeliest first."""


@dataclass(frozen=True)
class PassRequest:
    """A training pass, as a client sent it."""

    model_id: str
    seq_id: int
    is_forward: bool
    content: dict[str, Any]
    """The trainer's ``ForwardInput``."""
    lengths: list[int] | None
    """Tokens of each datum, where the content has them as columns."""


@dataclass(frozen=True, kw_only=True)
class WireSequence:
    """One sampled sequence."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    is_stopped: bool
    """False where it ended at its limit of tokens."""
    tops: Sequence[TopLogprobs] | None = None


@dataclass(frozen=True)
class TargetLogprobs:
    """Logprobs of tokens that a client has named, dense or as CSR."""

    values: NDArray[np.float32]
    shape: tuple[int, int]
    sparse: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None
    """CSR's row offsets and columns."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The result of one sampling request."""

    sequences: Sequence[WireSequence]
    prompt_logprobs: Sequence[float | None] | None = None
    prompt_tops: Sequence[TopLogprobs | None] | None = None
    target_logprobs: TargetLogprobs | None = None
    cached_prompt_tokens: int = 0
    prompt_k: int = 0
    """How many tokens the prompt's top lists have."""
    sample_k: int = 0
    """How many tokens the sampled sequences' top lists have."""


def read_pass(body: bytes) -> PassRequest:
    """Read the body of a ``forward_backward`` request.

    Raises:
        RequestError: it is no such message.
    """
    message: Any = _classes()["ForwardBackwardRequest"]()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise RequestError(f"body must be a ForwardBackwardRequest, got {error}") from None
    _log_unknown(message)
    content: dict[str, Any] = {"loss_fn": message.loss_fn, "loss_fn_config": _read_config(message)}
    columns = _read_columns(message)
    if columns is not None:
        content["columns"] = columns[0]
    else:
        content["data"] = [_read_datum(datum, message.loss_fn) for datum in message.data]
    return PassRequest(
        message.model_id,
        message.seq_id,
        bool(message.forward_only),
        content,
        None if columns is None else columns[1],
    )


def _log_unknown(message: Any) -> None:
    """Log the numbers of fields that a newer client sends, of the request and its first datum."""
    parts = [message]
    for datum in message.data[:1]:
        parts += [datum, *datum.model_input, *datum.loss_fn_inputs.values()]
    for part in parts:
        log_unknown(part.DESCRIPTOR.name, (each.field_number for each in UnknownFieldSet(part)))


def write_pass(
    outputs: Sequence[Mapping[str, NDArray[np.float32]]], metrics: Mapping[str, float]
) -> bytes:
    """The result of a pass; ``outputs`` are arrays by name, per datum.

    Datums whose arrays differ in more than their first size go into records of their own.
    """
    message: Any = _classes()["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord")
    message.metrics.update(metrics)
    begin = 0
    while begin < len(outputs):
        shapes = _trailing_shapes(outputs[begin])
        end = begin
        while end < len(outputs) and _trailing_shapes(outputs[end]) == shapes:
            end += 1
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=end - begin)
        for name, trailing in shapes.items():
            arrays = [np.asarray(output[name], dtype="<f4") for output in outputs[begin:end]]
            tensor = record.fields[name]
            tensor.data = b"".join(array.tobytes() for array in arrays)
            sizes = np.array([0, *(array.nbytes for array in arrays)], dtype="<i8")
            tensor.offsets = sizes.cumsum().astype("<i8").tobytes()
            tensor.dtype = _FLOAT32
            tensor.trailing_shape.extend(trailing)
        begin = end
    return message.SerializeToString()


def write_sample(sample: Sample) -> bytes:
    """The result of a sampling request; a prompt token without a logprob has NaN."""
    message: Any = _classes()["SampleResponse"](prompt_cache_hit_tokens=sample.cached_prompt_tokens)
    for sequence in sample.sequences:
        written = message.sequences.add(
            stop_reason=0 if sequence.is_stopped else 1,
            tokens=np.asarray(sequence.tokens, dtype="<i4").tobytes(),
            logprobs=np.asarray(sequence.logprobs, dtype="<f4").tobytes(),
        )
        if sequence.tops is not None:
            _write_tops(written.topk_sampled_logprobs, sequence.tops, sample.sample_k)
    if sample.prompt_logprobs is not None:
        values = [float("nan") if value is None else value for value in sample.prompt_logprobs]
        message.prompt_logprobs = np.asarray(values, dtype="<f4").tobytes()
    if sample.prompt_tops is not None:
        _write_tops(message.topk_prompt_logprobs, sample.prompt_tops, sample.prompt_k)
    if sample.target_logprobs is not None:
        _write_targets(message.target_prompt_logprobs, sample.target_logprobs)
    return message.SerializeToString()


def _write_targets(message: Any, targets: TargetLogprobs) -> None:
    message.dtype = _FLOAT32
    message.shape.extend(targets.shape)
    values = targets.values.astype("<f4").tobytes()
    if targets.sparse is None:
        message.dense = values
        return
    offsets, columns = (each.astype("<i8").tobytes() for each in targets.sparse)
    sparse = message.sparse_csr
    sparse.values, sparse.crow_indices, sparse.col_indices = values, offsets, columns


def _write_tops(message: Any, tops: Sequence[TopLogprobs | None], k: int) -> None:
    ids = np.full((len(tops), k), _EMPTY_TOKEN, dtype="<i4")
    logprobs = np.full((len(tops), k), _EMPTY_LOGPROB, dtype="<f4")
    for place, top in enumerate(tops):
        for rank, (token, logprob) in enumerate((top or ())[:k]):
            ids[place, rank], logprobs[place, rank] = token, logprob
    message.token_ids, message.logprobs = ids.tobytes(), logprobs.tobytes()
    message.k, message.length = k, len(tops)


def _trailing_shapes(output: Mapping[str, NDArray[np.float32]]) -> dict[str, list[int]]:
    return {name: list(array.shape[1:]) for name, array in output.items()}


def _read_config(message: Any) -> dict[str, float | str]:
    config: dict[str, float | str] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        config[name] = value.text if value.WhichOneof("value") == "text" else value.number
    return config


def _read_columns(message: Any) -> tuple[dict[str, Any], list[int]] | None:
    """The datums as columns and their lengths; None where a datum has another form."""
    names = set(message.data[0].loss_fn_inputs) if message.data else set[str]()
    if "target_tokens" not in names:
        return None
    tokens: list[NDArray[np.int32]] = []
    inputs: dict[str, list[bytes]] = {name: [] for name in names}
    dtypes: dict[str, int] = {}
    for datum in message.data:
        if set(datum.loss_fn_inputs) != names:
            return None
        own = _read_tokens(datum)
        if own is None or not own.size:
            return None
        tokens.append(own)
        for name, tensor in datum.loss_fn_inputs.items():
            if tensor.WhichOneof("encoding") != "dense" or tensor.dtype not in _DTYPES:
                return None
            width = 8 if tensor.dtype == _INT64 else 4
            if dtypes.setdefault(name, tensor.dtype) != tensor.dtype:
                return None
            if len(tensor.dense) != own.size * width or list(tensor.shape) not in ([], [own.size]):
                return None
            inputs[name].append(tensor.dense)
    lengths = [own.size for own in tokens]
    total = sum(lengths)
    columns: dict[str, Any] = {
        name: encode_plain(
            np.frombuffer(b"".join(parts), _DTYPES[dtypes[name]][1]),
            _DTYPES[dtypes[name]][0],
            "base64",
        )
        for name, parts in inputs.items()
    }
    if message.loss_fn == "cross_entropy" and "weights" not in columns:
        columns["weights"] = encode_plain(np.ones(total, dtype="<f4"), "float32", "base64")
    content = {
        "lengths": encode_plain(np.asarray(lengths), "int64", "base64"),
        "tokens": encode_plain(np.concatenate(tokens), "int64", "base64"),
        "loss_fn_inputs": _rename(columns, message.loss_fn),
    }
    return content, lengths


def _read_tokens(datum: Any) -> NDArray[np.int32] | None:
    """The tokens of a datum's text chunks; None where it has others, or bytes that are none."""
    parts: list[NDArray[np.int32]] = []
    for chunk in datum.model_input:
        if chunk.WhichOneof("kind") != "encoded_text" or len(chunk.encoded_text.tokens) % 4:
            return None
        parts.append(np.frombuffer(chunk.encoded_text.tokens, "<i4"))
    return np.concatenate(parts) if parts else None


def _read_datum(datum: Any, loss_fn: str) -> dict[str, Any]:
    """One datum, in the trainer's form; what it cannot be is left for the trainer to refuse."""
    chunks: list[dict[str, Any]] = []
    for chunk in datum.model_input:
        kind = chunk.WhichOneof("kind") or "unknown"
        tokens = None
        if kind == "encoded_text" and len(chunk.encoded_text.tokens) % 4 == 0:
            tokens = np.frombuffer(chunk.encoded_text.tokens, "<i4").tolist()
        chunks.append({"type": kind, "tokens": tokens})
    inputs = {name: _read_tensor(tensor) for name, tensor in datum.loss_fn_inputs.items()}
    if loss_fn == "cross_entropy" and "weights" not in inputs and "target_tokens" in inputs:
        shape = inputs["target_tokens"]["shape"] or [0]
        if max(shape, default=0) <= 2**24:
            inputs["weights"] = encode_plain(np.ones(shape, dtype="<f4"), "float32", "base64")
    return {"model_input": {"chunks": chunks}, "loss_fn_inputs": _rename(inputs, loss_fn)}


def _read_tensor(tensor: Any) -> dict[str, Any]:
    dtype, form = _DTYPES.get(tensor.dtype, ("float32", "<f4"))
    shape = list(tensor.shape)
    sparse = tensor.sparse_csr if tensor.WhichOneof("encoding") == "sparse_csr" else None
    raw = tensor.dense if sparse is None else sparse.values
    values = np.frombuffer(
        raw[: len(raw) // np.dtype(form).itemsize * np.dtype(form).itemsize], form
    )
    record = encode_plain(values, dtype, "base64")
    record["shape"] = shape or [values.size]
    if sparse is not None:
        for name in ("crow_indices", "col_indices"):
            indices = getattr(sparse, name)
            record[f"sparse_{name}"] = np.frombuffer(
                indices[: len(indices) // 8 * 8], "<i8"
            ).tolist()
    return record


def _rename(inputs: dict[str, Any], loss_fn: str) -> dict[str, Any]:
    """Loss inputs by the trainer's names."""
    if loss_fn == "gspo" and "sequence_ratio_mask" in inputs:
        inputs["loss_mask"] = inputs.pop("sequence_ratio_mask")
    return inputs


@cache
def _classes() -> dict[str, Any]:
    """The messages' classes by name, from a pool of their own: other schemas may use its names."""
    file = descriptor_pb2.FileDescriptorProto(
        name=f"{_PACKAGE}.proto", package=_PACKAGE, syntax="proto3"
    )
    for name, fields in _SCHEMA.items():
        message = file.message_type.add(name=name)
        choices: dict[str, int] = {}
        for number, label, kind in fields:
            _add_field(message, number, label, kind, choices)
        # Ones of a single optional field come behind the others.
        for label in [each.name for each in message.field if each.proto3_optional]:
            position = len(message.oneof_decl)
            message.oneof_decl.add(name=f"_{label}")
            next(each for each in message.field if each.name == label).oneof_index = position
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
        for name in _SCHEMA
    }


def _add_field(message: Any, number: int, label: str, kind: str, choices: dict[str, int]) -> None:
    kind, _, choice = kind.partition("|")
    bare = kind.rstrip("[]{}?")
    proto = descriptor_pb2.FieldDescriptorProto
    added = message.field.add(name=label, number=number, label=proto.LABEL_OPTIONAL)
    if kind.endswith("{}"):
        entry_name = "".join(part.capitalize() for part in label.split("_")) + "Entry"
        entry = message.nested_type.add(name=entry_name)
        entry.options.map_entry = True
        _add_field(entry, 1, "key", "string", {})
        _add_field(entry, 2, "value", bare, {})
        added.label, added.type = proto.LABEL_REPEATED, proto.TYPE_MESSAGE
        added.type_name = f".{_PACKAGE}.{message.name}.{entry_name}"
        return
    if bare in _SCHEMA:
        added.type, added.type_name = proto.TYPE_MESSAGE, f".{_PACKAGE}.{bare}"
    else:
        added.type = proto.Type.Value(f"TYPE_{bare.upper()}")
    if kind.endswith("[]"):
        added.label = proto.LABEL_REPEATED
    if kind.endswith("?"):
        added.proto3_optional = True
    if choice:
        if choice not in choices:
            choices[choice] = len(message.oneof_decl)
            message.oneof_decl.add(name=choice)
        added.oneof_index = choices[choice]
