"""What a completion earned, or why nothing is known of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from training.rewards.errors import WrongRewardError


@dataclass(frozen=True)
class Score:
    """What a completion earned.

    Example: ``Score(0.0, parsed=False)`` for a completion without an answer.
    """

    reward: float
    disagreement: float | None = None
    """How far the members of an ensemble lie apart; None where one function alone judged."""
    parsed: bool | None = None
    """Whether the reward found what it looks for, such as a marked answer; None where it does not
    say."""
    parts: Mapping[str, float] | None = field(default=None, compare=False)
    """What the reward is made of, by name, for who reads the samples; None where it is of one
    piece. Names and numbers are the function's own."""
    seconds: float | None = field(default=None, compare=False)
    """How long the call took; filled in by the recipe."""


RewardFunction = Callable[[str, Mapping[str, Any]], float | Score | Awaitable[float | Score]]
"""``(completion, row)`` to what the completion is worth; plain or async."""


class ScoringReward(ABC):
    """A reward function that knows more than the reward: called it gives that alone."""

    def __call__(self, completion: str, row: Mapping[str, Any]) -> float:
        """The reward."""
        return self.score(completion, row).reward

    @abstractmethod
    def score(self, completion: str, row: Mapping[str, Any]) -> Score:
        """The reward with what else is known."""


@dataclass(frozen=True)
class Unscored:
    """A completion whose reward failed: it has none, and is not trained on."""

    error: Exception
    seconds: float | None = field(default=None, compare=False)
    """How long the call took; filled in by the recipe."""


def as_score(outcome: Any) -> Score:
    """What a reward function returned, as a score.

    Raises:
        WrongRewardError: it is no number; a text is none either, whatever it says.
    """
    if isinstance(outcome, Score):
        return outcome
    try:
        if isinstance(outcome, str | bytes):
            raise TypeError
        return Score(float(outcome))
    except (TypeError, ValueError, RuntimeError):  # torch raises RuntimeError for many elements
        raise WrongRewardError(
            f"reward_fn must return a number or a Score, got {outcome!r}"
        ) from None
