"""The base of every record: unknown fields may come in, ``None`` never goes out."""

from __future__ import annotations

from typing import Any, Self

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError

from hearth.errors import RequestError


class Record(BaseModel):
    """A message or a part of one. A newer client may send fields unknown here."""

    model_config = ConfigDict(extra="ignore", populate_by_name=True, protected_namespaces=())

    @classmethod
    def parse(cls, body: bytes | bytearray | memoryview) -> Self:
        """Read a JSON body.

        Raises:
            RequestError: the body is no JSON, or a field breaks its type (the first is named).
        """
        return cls.from_dict(parse_json(body))

    @classmethod
    def from_dict(cls, content: Any) -> Self:
        """The record of a parsed body.

        Raises:
            RequestError: a field breaks its type (the first is named).
        """
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            raise RequestError(describe(error)) from None

    def dump(self) -> bytes:
        """JSON bytes without the fields that are ``None``."""
        return orjson.dumps(self.as_dict())

    def as_dict(self) -> dict[str, Any]:
        """Plain containers without the fields that are ``None``."""
        return self.model_dump(exclude_none=True, by_alias=True)


class Settings(Record):
    """A record of numbers that a computation is set by: NaN and infinities are refused."""

    model_config = ConfigDict(allow_inf_nan=False)


def parse_json(body: bytes | bytearray | memoryview) -> Any:
    """The content of a JSON body.

    Raises:
        RequestError: it is no JSON.
    """
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"body must be JSON, got {bytes(body[:40])!r}: {error}") from None


def describe(error: ValidationError) -> str:
    """One line for a failed validation: the field's path, its rule and the value that broke it."""
    first = error.errors()[0]
    path = ".".join(str(part) for part in first["loc"]) or "body"
    more = error.error_count() - 1
    rest = f" (and {more} more)" if more else ""
    if first["type"] == "finite_number":
        return (
            f"{path} must be a finite number, got {str(first.get('input'))[:80]!r}: send one that "
            f"a float can hold{rest}"
        )
    return f"{path} must be valid, got {str(first.get('input'))[:80]!r}: {first['msg']}{rest}"
