"""Importance-weighted policy gradient without a trust region. Legend: T target tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from hearth.errors import ConfigError
from hearth.losses.batch import RATIO_LOG_CAP, TokenBatch
from hearth.losses.clipped import token_ratio
from hearth.losses.objective import Metrics, Objective, require_at_least


def importance_sampling(
    batch: TokenBatch,
    *,
    ratio_log_cap: float = RATIO_LOG_CAP,
    ratio_min: float | None = None,
    ratio_max: float | None = None,
) -> Tensor:
    """Per-token loss [T] ``-r A``; exactly 0 where the mask is 0.

    The ratio is to the old policy. With bounds the ratio is clamped to them, and a token beyond
    them has no gradient, whatever the advantage's sign.
    """
    ratio = token_ratio(batch, ratio_log_cap)
    if ratio_min is not None or ratio_max is not None:
        ratio = ratio.clamp(ratio_min, ratio_max)
    return batch.live(-ratio * batch.advantages)


@dataclass(frozen=True, kw_only=True)
class ImportanceSampling(Objective):
    """Off-policy ratio weighting, with optional clipping of the ratio."""

    has_trust_region: ClassVar[bool] = False

    ratio_log_cap: float = RATIO_LOG_CAP
    """Guard on the log ratio's size."""
    ratio_min: float | None = None
    """Smallest ratio, at most 1; None leaves it free."""
    ratio_max: float | None = None
    """Largest ratio, at least 1; None leaves it free."""

    def __post_init__(self) -> None:
        require_at_least(self, 0, ratio_log_cap=self.ratio_log_cap, ratio_min=self.ratio_min)
        require_at_least(self, 1, ratio_max=self.ratio_max)
        if self.ratio_min is not None and self.ratio_min > 1:
            raise ConfigError(f"ImportanceSampling.ratio_min must be <= 1, got {self.ratio_min}")

    def policy_term(self, batch: TokenBatch) -> Tensor:
        """``-r A`` [T]."""
        return importance_sampling(
            batch,
            ratio_log_cap=self.ratio_log_cap,
            ratio_min=self.ratio_min,
            ratio_max=self.ratio_max,
        )

    def metrics(self, batch: TokenBatch) -> Metrics:
        """``is_ratio_mean``, and ``is_clip_frac`` when a bound is set."""
        ratio = token_ratio(batch, self.ratio_log_cap).detach()
        metrics = {"is_ratio_mean": batch.active_mean(ratio)}
        if self.ratio_min is not None or self.ratio_max is not None:
            is_clipped = ratio != ratio.clamp(self.ratio_min, self.ratio_max)
            metrics["is_clip_frac"] = batch.active_mean(is_clipped.to(ratio.dtype))
        return metrics
