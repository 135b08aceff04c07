"""A prompt with what was sampled for it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class GroupSample:
    """The completions of one prompt. Lists are parallel."""

    prompt: str
    completions: list[str] = field(default_factory=list[str])
    rewards: list[float] = field(default_factory=list[float])
    advantages: list[float] = field(default_factory=list[float])
    disagreements: list[float] = field(default_factory=list[float])
    """Of each reward how far the members of an ensemble lie apart; empty where none judged."""
