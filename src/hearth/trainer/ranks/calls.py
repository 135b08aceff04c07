"""Operations as messages between ranks. They are JSON: data of clients is never unpickled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from hearth.models.lora import LoraOptions
from hearth.wire.tinker import AdamParams, DatumColumns, DatumRecord

_Tagged = tuple[str, Any]
"""The kind of an argument, and its JSON."""


def encode(operation: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """A message of an operation of the engine and its arguments.

    Example: ``encode("unload", ["policy-1"], {})``

    Raises:
        TypeError: an argument has a type that no operation takes.
    """
    named = {name: _encode_value(value) for name, value in kwargs.items()}
    return orjson.dumps([operation, [_encode_value(arg) for arg in args], named])


def decode(message: bytes) -> tuple[str, list[Any], dict[str, Any]]:
    """The reverse of ``encode``."""
    operation, args, named = orjson.loads(message)
    return (
        operation,
        [_decode_value(*arg) for arg in args],
        {name: _decode_value(*value) for name, value in named.items()},
    )


def _encode_value(value: Any) -> _Tagged:
    if isinstance(value, AdamParams):
        return "adam", value.as_dict()
    if isinstance(value, LoraOptions):
        return "lora", asdict(value)
    if isinstance(value, Path):
        return "path", str(value)
    if isinstance(value, DatumColumns):
        return "columns", value.as_dict()
    if isinstance(value, Sequence) and any(isinstance(datum, DatumRecord) for datum in value):
        return "data", [datum.as_dict() for datum in value]
    return "plain", value


def _decode_value(kind: str, content: Any) -> Any:
    if kind == "adam":
        return AdamParams.model_validate(content)
    if kind == "lora":
        return LoraOptions(**content)
    if kind == "path":
        return Path(content)
    if kind == "columns":
        return DatumColumns.model_validate(content)
    if kind == "data":
        return [DatumRecord.model_validate(datum) for datum in content]
    return content
