"""Answers that are the same number or the same text: no parsing of expressions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

from hearth.errors import ConfigError
from training.rewards.score import Score, ScoringReward

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
_HASHES = re.compile(r"####\s*(.+)")


class _AnswerReward(ScoringReward):
    """1.0 when the last marked answer equals the row's ``ground_truth``, else 0.0.

    An answer is marked by ``<answer>...</answer>``, ``\\boxed{...}`` or ``#### ...``; an unmarked
    completion is wrong. Numbers compare as numbers (``1,200`` equals ``1200.0``), the rest as text.
    """

    def score(self, completion: str, row: Mapping[str, Any]) -> Score:
        """The reward, and whether an answer is marked."""
        answer = marked_answer(completion)
        if answer is None:
            return Score(0.0, parsed=False)
        truth = str(row["ground_truth"])
        is_right = same_answer(answer, marked_answer(truth) or truth)
        return Score(float(is_right), parsed=True)


answer_reward = _AnswerReward()
"""``answer_reward(completion, row)`` is 1.0 when the last marked answer equals the row's
``ground_truth``, else 0.0; its ``score`` says whether an answer is marked as well."""


def check_truths(reward_fn: object, rows: Sequence[Mapping[str, Any]]) -> None:
    """Look for the ``ground_truth`` that ``answer_reward`` compares with.

    Raises:
        ConfigError: a row has none.
    """
    if reward_fn is not answer_reward:
        return
    for place, row in enumerate(rows):
        if row.get("ground_truth") is None:
            raise ConfigError(
                f"rows[{place}].ground_truth must be given for the default reward, got a row of "
                f"{sorted(row)}: add it, or give main your own reward_fn"
            )


def exact_match(completion: str, row: Mapping[str, Any]) -> float:
    """1.0 when the whole completion is the row's ``ground_truth``, white space around it aside."""
    return float(completion.strip() == str(row["ground_truth"]).strip())


def marked_answer(text: str) -> str | None:
    """The last marked answer of a text without its white space; None where nothing is marked."""
    for pattern in (_ANSWER, _BOXED, _HASHES):
        found = pattern.findall(text)
        if found:
            return found[-1].strip()
    return None


def same_answer(answer: str, truth: str) -> bool:
    """Whether two answers are the same number, or where one is no number the same text."""
    left, right = _number(answer), _number(truth)
    if left is not None and right is not None:
        return left == right
    return answer.strip() == truth.strip()


def _number(text: str) -> Decimal | None:
    cleaned = text.strip().replace(",", "").replace("$", "").rstrip(".%")
    try:
        number = Decimal(cleaned)
    except InvalidOperation:
        return None
    return number if number.is_finite() else None
