"""What an answer and a whole conversation are worth."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from training.rewards import answer_reward

TURN_DISCOUNT = 0.9
"""What a right answer loses with each turn that it comes late, as in AReaL's multi-turn example."""


def is_right(answer: str, row: Mapping[str, Any]) -> bool:
    """Whether the last marked answer of a turn equals the row's ``ground_truth``."""
    return answer_reward(answer, row) > 0


def conversation_reward(last_is_right: bool, turns: int) -> float:
    """The reward of a conversation, which is that of its last turn; 0.0 where that is wrong."""
    return TURN_DISCOUNT ** (turns - 1) if last_is_right else 0.0
