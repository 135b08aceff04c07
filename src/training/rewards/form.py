"""Rewards for the form of a completion, whatever it says."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
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


@dataclass(frozen=True)
class _SoftOverlong:
    """A class, so that it can go to another process."""

    max_length: int
    buffer: int
    length_of: Callable[[str], int]

    def __call__(self, completion: str, row: Mapping[str, Any]) -> float:
        over = self.length_of(completion) - (self.max_length - self.buffer)
        return -min(1.0, max(0.0, over / self.buffer))


def soft_overlong_reward(
    max_length: int, *, buffer: int, length_of: Callable[[str], int] = len
) -> _SoftOverlong:
    """A penalty for long completions, from 0.0 down to -1.0: add it to another reward.

    0 up to ``max_length - buffer``, then falling evenly to -1 at ``max_length``, and -1 beyond
    (DAPO, arXiv:2503.14476, section 3.4: 20480 and 4096 tokens there). ``length_of`` says what is
    counted: characters, or with ``lambda text: len(tokenizer.encode(text))`` tokens. Completions
    that ``max_completion_tokens`` cuts reach it only with ``truncated_completions="score"``.

    Raises:
        ConfigError: the buffer is not within 1 and ``max_length``.
    """
    if not 1 <= buffer <= max_length:
        raise ConfigError(f"buffer must lie between 1 and max_length ({max_length}), got {buffer}")
    return _SoftOverlong(max_length, buffer, length_of)
