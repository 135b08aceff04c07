"""``extraValues`` of a request, checked value by value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from hearth.control.catalog import ShapeEntry
from hearth.errors import RequestError


class ExtraValues:
    """``extraValues`` of a request, checked one by one; a shape's fields are the defaults."""

    def __init__(self, given: Mapping[str, Any], shape: ShapeEntry | None = None) -> None:
        self._given = given
        self._shape = shape

    def read_text(self, name: str) -> str | None:
        """A text, or None where nothing is given.

        Raises:
            RequestError: it is something else.
        """
        value = self._value(name)
        if value is not None and not isinstance(value, str):
            raise RequestError(f"extraValues.{name} must be a text, got {value!r}")
        return value

    def read_choice(self, name: str, among: tuple[str, ...], default: str) -> str:
        """One of a few texts.

        Raises:
            RequestError: it is another one.
        """
        value = self.read_text(name) or default
        if value not in among:
            raise RequestError(f"extraValues.{name} must be one of {list(among)}, got {value!r}")
        return value

    def read_count(self, name: str) -> int | None:
        """A whole number from 1 on, also as a text; None where nothing is given.

        Raises:
            RequestError: it is something else.
        """
        value = self._value(name)
        if value is None:
            return None
        try:
            number = int(value) if not isinstance(value, bool) else 0
        except (TypeError, ValueError):
            number = 0
        if number < 1:
            raise RequestError(f"extraValues.{name} must be a whole number >= 1, got {value!r}")
        return number

    def read_flag(self, name: str) -> bool:
        """True or false; false where nothing is given.

        Raises:
            RequestError: it is something else.
        """
        value = self._value(name)
        if value is not None and not isinstance(value, bool):
            raise RequestError(f"extraValues.{name} must be true or false, got {value!r}")
        return bool(value)

    def read_mapping(self, name: str) -> dict[str, Any]:
        """ExtraValues by name; empty where nothing is given. A request's override the shape's.

        Raises:
            RequestError: it is something else.
        """
        given: object = self._given.get(name) or {}
        if not isinstance(given, Mapping):
            raise RequestError(f"extraValues.{name} must be an object, got {given!r}")
        default: dict[str, Any] = getattr(self._shape, name, None) or {}
        return {**default, **cast("Mapping[str, Any]", given)}

    def _value(self, name: str) -> Any:
        value = self._given.get(name)
        return getattr(self._shape, name, None) if value is None else value
