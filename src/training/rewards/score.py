"""What a completion earned, or why nothing is known of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

RewardFunction = Callable[[str, Mapping[str, Any]], float | Awaitable[float]]
"""``(completion, row)`` to what the completion is worth; plain or async."""


@dataclass(frozen=True)
class Score:
    """What a completion earned."""

    reward: float
    disagreement: float | None = None
    """How far the members of an ensemble lie apart; None where one function alone judged."""


@dataclass(frozen=True)
class Unscored:
    """A completion whose reward failed: it has none, and is not trained on."""

    error: Exception


def as_score(outcome: Any) -> Score:
    """What a reward function returned, as a score.

    Raises:
        TypeError, ValueError: it is no number.
    """
    return outcome if isinstance(outcome, Score) else Score(float(outcome))
