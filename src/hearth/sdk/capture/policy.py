"""What the recipe decides about a client's requests: the sampling."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from typing import Any

from hearth.errors import ConfigError

_NEUTRAL: Mapping[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
_LIMIT = "max_completion_tokens"
_LIMITS = (_LIMIT, "max_tokens")


class SamplingPolicy:
    """``temperature``, ``top_p``, ``top_k`` and ``max_completion_tokens`` of a recipe.

    The first three hold for every request, and are 1, 1 and 0 where the recipe does not name
    them: the trainer scores under the distribution that the recipe knows of. The last is a limit
    that a client may only lower. With ``include_routing_matrix`` turns come with their experts.

    Raises:
        ConfigError: there is another name in ``sampling``, or a value breaks its rule.
    """

    def __init__(self, sampling: Mapping[str, Any] | None) -> None:
        given = dict(sampling or {})
        _check(given)
        self._limit: int | None = given.pop(_LIMIT, None)
        self._fixed = {**_NEUTRAL, **given}

    def apply(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The request's ``fields`` with the recipe's sampling in place of the client's."""
        return {**fields, **self._fixed, **self._limits(fields)}

    def describe_overrides(self, fields: Mapping[str, Any]) -> str:
        """Which of the client's ``fields`` the recipe overrides; empty where none."""
        return ", ".join(
            f"{name}={fields[name]!r} instead of {value!r}"
            for name, value in self._fixed.items()
            if name in fields and fields[name] != value
        )

    def _limits(self, fields: Mapping[str, Any]) -> dict[str, int]:
        """The limits, lowered where they are too high; the deployment refuses what is no number."""
        limit = self._limit
        if limit is None:
            return {}
        given = {name: fields[name] for name in _LIMITS if name in fields}
        if not given:
            return {_LIMIT: limit}
        numbers = {name: value for name, value in given.items() if isinstance(value, int)}
        return {name: min(value, limit) for name, value in numbers.items()}


def request_seed(seed: int, number: int) -> int:
    """The seed of request ``number`` (from 0) of a session with ``seed``; below 2**63."""
    digest = hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_RULES: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "temperature": ("a number >= 0", lambda value: _is_number(value) and value >= 0),
    "top_p": ("a number in (0, 1]", lambda value: _is_number(value) and 0 < value <= 1),
    "top_k": ("a whole number >= 0", lambda value: _is_whole(value) and value >= 0),
    _LIMIT: ("a whole number >= 1", lambda value: _is_whole(value) and value >= 1),
    "include_routing_matrix": ("true or false", lambda value: isinstance(value, bool)),
}


def _check(sampling: Mapping[str, Any]) -> None:
    if unknown := sorted(set(sampling) - set(_RULES)):
        raise ConfigError(f"sampling must have names of {sorted(_RULES)}, got {unknown}")
    for name, value in sampling.items():
        rule, holds = _RULES[name]
        if not holds(value):
            raise ConfigError(f"sampling.{name} must be {rule}, got {value!r}")
