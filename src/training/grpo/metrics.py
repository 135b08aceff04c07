"""What a pipeline remembers of its steps."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field


@dataclass(frozen=True)
class GroupRewards:
    """How the rewards of one group lie: whether its completions differ at all."""

    step: int
    prompt: str
    rewards: tuple[float, ...]
    disagreements: tuple[float, ...] = ()
    """Of each reward how far the members of an ensemble lie apart; empty where none judged."""

    @property
    def mean(self) -> float:
        """The group's mean reward."""
        return statistics.fmean(self.rewards)

    @property
    def std(self) -> float:
        """The population deviation; 0 teaches nothing."""
        return statistics.pstdev(self.rewards)


@dataclass
class TrainingMetrics:
    """What a pipeline has seen, a value per step.

    ``kl_values`` and ``losses`` stay empty where nothing says what the completions' logprobs are.
    """

    steps: list[int] = field(default_factory=list[int])
    rewards: list[float] = field(default_factory=list[float])
    kl_values: list[float] = field(default_factory=list[float])
    losses: list[float] = field(default_factory=list[float])
    groups: list[GroupRewards] = field(default_factory=list[GroupRewards])
    """Every group of every step."""
