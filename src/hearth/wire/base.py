"""The base of every record: unknown fields may come in, ``None`` never goes out."""

from __future__ import annotations

import reprlib
from typing import Any, Self, cast

import orjson
from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema, PydanticCustomError
from pydantic_core.core_schema import no_info_before_validator_function

from hearth.errors import RequestError

_LONGEST_SHOWN = 80
_BOOLEAN = "boolean_as_number"


def _fail_fast(schema: object) -> None:
    if isinstance(schema, list):
        for inner in cast("list[object]", schema):
            _fail_fast(inner)
    elif isinstance(schema, dict):
        fields = cast("dict[str, object]", schema)
        if fields.get("type") in ("list", "dict"):
            fields["fail_fast"] = True
        for inner in fields.values():
            _fail_fast(inner)


def _check_number(value: object) -> object:
    if isinstance(value, bool):
        raise PydanticCustomError(_BOOLEAN, "a boolean is no number")
    return value


def _refuse_booleans(schema: Any, *, in_list: bool = False) -> Any:
    """``schema`` with numbers that are no booleans: pydantic reads true as 1.

    Texts are read as numbers, as JSON of protocol buffers has them, but not in lists, where a
    function that is called for each item costs more than the parsing.
    """
    if isinstance(schema, list):
        return [_refuse_booleans(inner) for inner in cast("list[Any]", schema)]
    if not isinstance(schema, dict):
        return schema
    fields = cast("dict[str, Any]", schema)
    kind = fields.get("type")
    if kind in ("int", "float"):
        if in_list or fields.get("strict"):
            return {**fields, "strict": True}
        return no_info_before_validator_function(_check_number, cast("CoreSchema", schema))
    is_checked = kind == "function-before" and fields["function"]["function"] is _check_number
    has_boolean = kind == "union" and {"type": "bool"} in fields["choices"]
    if is_checked or has_boolean:
        return fields
    in_list = kind == "list" or (in_list and kind == "nullable")
    return {name: _refuse_booleans(inner, in_list=in_list) for name, inner in fields.items()}


class Record(BaseModel):
    """A message or a part of one. A newer client may send fields unknown here."""

    model_config = ConfigDict(extra="ignore", populate_by_name=True, protected_namespaces=())

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: type[BaseModel], handler: GetCoreSchemaHandler, /
    ) -> CoreSchema:
        """Have booleans refused as numbers, and each list and mapping at its first odd item: errors
        of all items of a body of some megabytes would take gigabytes and a minute."""
        schema = handler(source)
        _fail_fast(schema)
        return _refuse_booleans(schema)

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


class FiniteRecord(Record):
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
    shown = show(first.get("input"))
    if first["type"] == "finite_number":
        return (
            f"{path} must be a finite number, got {shown!r}: send one that a float can hold{rest}"
        )
    if first["type"] == _BOOLEAN:
        return f"{path} must be a number, got {shown!r}: {first['msg']}{rest}"
    return f"{path} must be valid, got {shown!r}: {first['msg']}{rest}"


def show(value: object) -> str:
    """The beginning of a value of a request as text, however long or deep it is."""
    text = value if isinstance(value, str) else _SHORT.repr(value)
    return text[:_LONGEST_SHOWN]


def quote(value: object) -> str:
    """``show``, with a text in quotes."""
    return repr(show(value)) if isinstance(value, str) else show(value)


_SHORT = reprlib.Repr()
_SHORT.maxlevel = 6
_SHORT.maxlist = _SHORT.maxdict = _SHORT.maxtuple = _SHORT.maxstring = _SHORT.maxlong = (
    _LONGEST_SHOWN
)
_SHORT.maxother = _LONGEST_SHOWN
