"""An operation as a message between ranks: JSON, so that nothing of a client's is unpickled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from hearth.models.lora import LoraOptions
from hearth.wire.tinker import AdamParams, DatumColumns, DatumRecord

_Tagged = tuple[str, Any]
"""The kind of an argument, and JSON of it."""


def encode(operation: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """An operation of the engine and what it is called with.

    Example: ``encode("unload", ["policy-1"], {})``

    Raises:
        TypeError: an argument is of a kind that no operation takes.
    """
    named = {name: _tagged(one) for name, one in kwargs.items()}
    return orjson.dumps([operation, [_tagged(arg) for arg in args], named])


def decode(message: bytes) -> tuple[str, list[Any], dict[str, Any]]:
    """The reverse of ``encode``."""
    operation, args, named = orjson.loads(message)
    return (
        operation,
        [_made(*arg) for arg in args],
        {name: _made(*one) for name, one in named.items()},
    )


def _tagged(value: Any) -> _Tagged:
    if isinstance(value, AdamParams):
        return "adam", value.as_dict()
    if isinstance(value, LoraOptions):
        return "lora", asdict(value)
    if isinstance(value, Path):
        return "path", str(value)
    if isinstance(value, DatumColumns):
        return "columns", value.as_dict()
    if isinstance(value, Sequence) and any(isinstance(one, DatumRecord) for one in value):
        return "data", [one.as_dict() for one in value]
    return "plain", value


def _made(kind: str, content: Any) -> Any:
    if kind == "adam":
        return AdamParams.model_validate(content)
    if kind == "lora":
        return LoraOptions(**content)
    if kind == "path":
        return Path(content)
    if kind == "columns":
        return DatumColumns.model_validate(content)
    if kind == "data":
        return [DatumRecord.model_validate(one) for one in content]
    return content
