"""A setting that is any JSON object: a flag takes its text, a file and Python the object."""

from __future__ import annotations

from typing import Annotated, Any

import orjson
from tyro.constructors import PrimitiveConstructorSpec


def _read(texts: list[str]) -> dict[str, Any]:
    try:
        value = orjson.loads(texts[0])
    except orjson.JSONDecodeError as error:
        raise ValueError(f"must be JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"must be a JSON object, got {texts[0]!r}")
    return value


JsonObject = Annotated[
    dict[str, Any],
    PrimitiveConstructorSpec(
        nargs=1,
        metavar="JSON",
        instance_from_str=_read,
        is_instance=lambda value: isinstance(value, dict),
        str_from_instance=lambda value: [orjson.dumps(value).decode()],
    ),
]
"""A mapping of plain values, as ``'{"max_terms": 2}'`` in a shell."""
