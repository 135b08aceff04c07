"""Products of numbers of two digits: too hard for a tiny model's head, easy with a calculator."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from hearth.errors import ConfigError

SMALLEST, LARGEST = 11, 99
WORDINGS = ("What is {a} * {b}?", "{a} * {b} = ?", "Compute {a} * {b}.", "What is {a} times {b}?")
ROWS = 1024
"""Problems kept for training; the policy's warm-up sees none of them."""


@dataclass(frozen=True)
class Problem:
    """The product of ``a`` and ``b``."""

    a: int
    b: int

    @property
    def answer(self) -> int:
        """The product."""
        return self.a * self.b

    def question(self, rng: random.Random) -> str:
        """One of the wordings."""
        return rng.choice(WORDINGS).format(a=self.a, b=self.b)


def split_problems() -> tuple[list[Problem], list[Problem]]:
    """All problems in an order that is always the same: (to train on, to warm up on)."""
    numbers = range(SMALLEST, LARGEST + 1)
    problems = [Problem(a, b) for a in numbers for b in numbers]
    random.Random(0).shuffle(problems)
    return problems[:ROWS], problems[ROWS:]


def problem_rows(count: int) -> list[dict[str, Any]]:
    """The first ``count`` rows: ``{"messages": [...], "ground_truth": "..."}``.

    Raises:
        ConfigError: there are not so many.
    """
    if not 1 <= count <= ROWS:
        raise ConfigError(
            f"max_rows must be in 1..{ROWS}, got {count}: the other problems are the warm-up's; "
            "raise epochs for a longer run"
        )
    rng = random.Random(1)
    return [
        {
            "messages": [{"role": "user", "content": problem.question(rng)}],
            "ground_truth": str(problem.answer),
        }
        for problem in split_problems()[0][:count]
    ]
