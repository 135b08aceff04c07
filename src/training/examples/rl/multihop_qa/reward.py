"""What a trajectory earned, and how its turns' credit reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from training.samples.groups import PromptGroup

ANSWER = "answer"
"""The word that a turn begins with when it answers."""
SEARCH = "search"
"""The word that a turn begins with when it asks the tool."""


def answer_is_right(turn: str, row: Mapping[str, Any]) -> bool:
    """Whether a turn answers with all names of the row's ``ground_truth``, in order."""
    return turn.split() == [ANSWER, *row["ground_truth"].split()]


def credit_text(group: PromptGroup, trajectory: int, search: Callable[[str], str]) -> str:
    """One trajectory, a line per turn: what it gained about the answer, its advantage, its text.

    After a search stands what ``search`` finds for it. The last turn has no gain: it has the
    outcome, and after it stands what would have been right.
    """
    assert group.credit is not None, "igpo_loop gives every group its credit"
    turns = group.completions[trajectory].split("\n")
    gains = [f"{gain:+8.3f}" for gain in group.credit.gains[trajectory]]
    cells = [*gains, f"{group.rewards[trajectory]:8.0f}"]
    lines = [
        f"{cell}  {advantage:+9.3f}  {describe_turn(turn, group.row.row, search)}"
        for cell, advantage, turn in zip(
            cells, group.credit.advantages[trajectory], turns, strict=True
        )
    ]
    question = group.row.row["messages"][0]["content"]
    return "\n".join([question, "    gain  advantage  turn", *lines])


def describe_turn(turn: str, row: Mapping[str, Any], search: Callable[[str], str]) -> str:
    """A turn with what came of it."""
    verb, _, words = turn.partition(" ")
    if verb == SEARCH:
        return f"{turn} -> {search(words)}"
    return turn if answer_is_right(turn, row) else f"{turn} (right: {row['ground_truth']})"
