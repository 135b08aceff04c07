"""Rewards for the length of a completion."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hearth.errors import ConfigError


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
