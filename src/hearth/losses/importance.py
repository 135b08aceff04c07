"""Importance-weighted policy gradient without a trust region. Legend: T target tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from hearth.errors import ConfigError
from hearth.losses.batch import RATIO_LOG_CAP, TokenBatch
from hearth.losses.clipped import token_ratio
from hearth.losses.objective import Metrics, Objective, require_at_least


@dataclass(frozen=True, kw_only=True)
class ImportanceSampling(Objective):
    """Weighting by the ratio to the old policy, with optional bounds on the ratio.

    A token whose ratio is beyond a bound has no gradient, whatever the advantage's sign.
    """

    has_trust_region: ClassVar[bool] = False

    ratio_log_cap: float = RATIO_LOG_CAP
    """Largest absolute log ratio; >= 0."""
    ratio_min: float | None = None
    """Smallest ratio, in [0, 1]; None sets no bound."""
    ratio_max: float | None = None
    """Largest ratio, >= 1; None sets no bound."""

    def validate(self) -> None:
        """Check the options; see ``Objective``."""
        require_at_least(self, 0, "ratio_log_cap", "ratio_min")
        require_at_least(self, 1, "ratio_max")
        if self.ratio_min is not None and self.ratio_min > 1:
            raise ConfigError(f"ImportanceSampling.ratio_min must be <= 1, got {self.ratio_min}")

    def policy_term(self, batch: TokenBatch) -> Tensor:
        """``-r A`` [T]."""
        ratio = token_ratio(batch, self.ratio_log_cap)
        if self.ratio_min is not None or self.ratio_max is not None:
            ratio = ratio.clamp(self.ratio_min, self.ratio_max)
        return batch.zero_masked(-ratio * batch.advantages)

    def metrics(self, batch: TokenBatch) -> Metrics:
        """``is_ratio_mean``, and ``is_clip_frac`` when a bound is set."""
        ratio = token_ratio(batch, self.ratio_log_cap).detach()
        metrics = {"is_ratio_mean": batch.active_mean(ratio)}
        if self.ratio_min is not None or self.ratio_max is not None:
            is_clipped = ratio != ratio.clamp(self.ratio_min, self.ratio_max)
            metrics["is_clip_frac"] = batch.active_mean(is_clipped.to(ratio.dtype))
        return metrics
