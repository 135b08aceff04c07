"""Rewards for the form of a completion, whatever it says."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hearth.errors import ConfigError
from training.rewards.score import Score, ScoringReward


@dataclass(frozen=True)
class _Pattern(ScoringReward):
    """1.0 when all of the completion matches. A class, so that it can go to another process."""

    pattern: re.Pattern[str]

    def score(self, completion: str, row: Mapping[str, Any]) -> Score:
        is_match = self.pattern.fullmatch(completion.strip()) is not None
        return Score(float(is_match), parsed=is_match)


@dataclass(frozen=True)
class _Tags(ScoringReward):
    """Share of ``names`` whose tags stand once each, in this order, one behind the other."""

    names: tuple[str, ...]

    def score(self, completion: str, row: Mapping[str, Any]) -> Score:
        found, behind = 0, 0
        for name in self.names:
            opening, closing = f"<{name}>", f"</{name}>"
            start, end = completion.find(opening), completion.find(closing)
            is_once = completion.count(opening) == completion.count(closing) == 1
            if is_once and behind <= start < end:
                found += 1
                behind = end + len(closing)
        return Score(found / len(self.names), parsed=found == len(self.names))


def pattern_reward(pattern: str | re.Pattern[str]) -> _Pattern:
    """A reward of 1.0 for completions that match from end to end, else 0.0.

    White space around the completion is left out. In a pattern given as text a dot matches line
    breaks too.

    Raises:
        ConfigError: the pattern is no regular expression.
    """
    try:
        return _Pattern(re.compile(pattern, 0 if isinstance(pattern, re.Pattern) else re.DOTALL))
    except re.error as error:
        raise ConfigError(
            f"pattern must be a regular expression, got {pattern!r}: {error}"
        ) from None


def tags_reward(*names: str) -> _Tags:
    """A reward for tags: the share of ``names`` whose pair stands in its place.

    A pair counts when ``<name>`` and ``</name>`` stand once each, and behind the pairs that count
    before it: ``tags_reward("think", "answer")`` gives 1.0 to ``<think>...</think><answer>...
    </answer>``, with any text around, and 0.5 where one of the two is missing, doubled or nested.

    Raises:
        ConfigError: there are no names, or one is no plain word.
    """
    wrong = [name for name in names if not re.fullmatch(r"\w[\w-]*", name)]
    if not names or wrong:
        raise ConfigError(f"names must be tags' plain names, at least one, got {list(names)!r}")
    return _Tags(names)
