"""What an objective is: options that turn a token batch into a loss per token."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from hearth.errors import ConfigError
from hearth.losses.batch import TokenBatch

Metrics = dict[str, Tensor]
"""Metric name to a float scalar without gradient."""


@dataclass(frozen=True)
class Clipping:
    """What a clip does to each token; without gradient, meaningful where the mask is not 0."""

    ratio: Tensor
    """The ratio that the objective uses [T]."""
    is_clipped: Tensor
    """Where the clip is active [T]; bool."""


@dataclass(frozen=True)
class Objective(ABC):
    """A frozen set of options with the loss they describe. Subclasses are frozen dataclasses."""

    has_trust_region: ClassVar[bool] = True
    """Whether a clip, a bounded weight or a pull keeps the policy near the old one."""

    @abstractmethod
    def policy_term(self, batch: TokenBatch) -> Tensor:
        """Loss per token [T] without KL penalty; exactly 0 where the mask is 0."""

    def validate(self) -> None:
        """Check the options.

        Raises:
            ConfigError: one breaks its rule.
        """
        return

    def weighted_term(self, batch: TokenBatch, weights: Tensor) -> Tensor:
        """``policy_term`` under constant importance weights [T]."""
        return weights * self.policy_term(batch)

    def penalty(self, batch: TokenBatch) -> Tensor | None:
        """KL penalty per token [T], or None when the objective has none."""
        return None

    def clipping(self, batch: TokenBatch) -> Clipping | None:
        """The ratio and where the objective's clip is active; None for one without a ratio."""
        return None

    def metrics(self, batch: TokenBatch) -> Metrics:
        """The objective's own metrics: means over the batch's active tokens."""
        return {}


@dataclass(frozen=True)
class ObjectiveOutput:
    """A raw loss per token [T]; the caller reduces it (``hearth.losses.reduce``)."""

    per_token: Tensor
    metrics: Metrics


def require_at_least(objective: Objective, minimum: float, *names: str) -> None:
    """Raise ConfigError naming the first of some options that is below ``minimum`` or not finite.

    An option that is None is fine.
    """
    for name in names:
        value: float | None = getattr(objective, name)
        if value is not None and not (math.isfinite(value) and value >= minimum):
            raise ConfigError(
                f"{type(objective).__name__}.{name} must be finite and >= {minimum:g}, got {value}"
            )
