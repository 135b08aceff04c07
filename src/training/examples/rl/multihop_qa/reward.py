"""What a trajectory earned, and how its turns' credit reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from training.utils.rl.groups import PromptGroup

ANSWER = "answer"
"""The word that a turn begins with when it answers."""


def answer_is_right(turn: str, row: Mapping[str, Any]) -> bool:
    """Whether a turn answers with all names of the row's ``ground_truth``, in order."""
    return turn.split() == [ANSWER, *row["ground_truth"].split()]


def credit_text(group: PromptGroup, trajectory: int) -> str:
    """One trajectory, a line per turn: what it gained about the answer, its advantage, its text.

    The last turn has no gain: it has the outcome.
    """
    assert group.credit is not None, "igpo_loop gives every group its credit"
    turns = group.completions[trajectory].split("\n")
    gains = [f"{gain:+8.3f}" for gain in group.credit.gains[trajectory]]
    cells = [*gains, f"{group.rewards[trajectory]:8.0f}"]
    lines = [
        f"{cell}  {advantage:+9.3f}  {turn}"
        for cell, advantage, turn in zip(
            cells, group.credit.advantages[trajectory], turns, strict=True
        )
    ]
    question = group.row.row["messages"][0]["content"]
    return "\n".join([question, "    gain  advantage  turn", *lines])
