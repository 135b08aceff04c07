"""What a conversation with a tool is worth."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from training.rewards import answer_reward

FAILED_CALL_COST = 0.1
"""What a right answer loses for each call that came back as an error; never more than half."""


def tool_use_reward(answer: str, failed_calls: int, row: Mapping[str, Any]) -> float:
    """1.0 for a right answer, less what failed calls cost; 0.0 for a wrong one.

    Whether a tool was called does not count: an answer is right or wrong.
    """
    return answer_reward(answer, row) * max(0.5, 1.0 - FAILED_CALL_COST * failed_calls)
