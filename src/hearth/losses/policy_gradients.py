"""Objectives without a clip: weighted cross-entropy, importance weighting, REINFORCE and DRO.

Legend: T target tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hearth.errors import ConfigError
from hearth.losses.batch import RATIO_LOG_CAP, TokenBatch
from hearth.losses.clipped import token_ratio
from hearth.losses.corrections import WithReference
from hearth.losses.objective import Clipping, Metrics, Objective, require_at_least


@dataclass(frozen=True, kw_only=True)
class CrossEntropy(Objective):
    """Weighted cross-entropy, never normalized; it has no options.

    The weights are ``batch.advantages`` and may be negative and fractional: with ``-dC/dlogprob``
    as weights the gradient is that of any loss C, which is how custom losses reach a trainer.
    """

    def policy_term(self, batch: TokenBatch) -> Tensor:
        """``-weight * policy_logprobs`` [T]."""
        return batch.zero_masked(-batch.advantages * batch.policy_logprobs)


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

    def clipping(self, batch: TokenBatch) -> Clipping:
        """The ratio before its bounds, and where one of them holds it."""
        ratio = token_ratio(batch, self.ratio_log_cap).detach()
        if self.ratio_min is None and self.ratio_max is None:
            return Clipping(ratio, torch.zeros_like(ratio, dtype=torch.bool))
        return Clipping(ratio, ratio != ratio.clamp(self.ratio_min, self.ratio_max))

    def metrics(self, batch: TokenBatch) -> Metrics:
        """``is_ratio_mean``, and ``is_clip_frac`` when a bound is set."""
        clipping = self.clipping(batch)
        metrics = {"is_ratio_mean": batch.active_mean(clipping.ratio)}
        if self.ratio_min is not None or self.ratio_max is not None:
            is_clipped = clipping.is_clipped.to(clipping.ratio.dtype)
            metrics["is_clip_frac"] = batch.active_mean(is_clipped)
        return metrics


@dataclass(frozen=True, kw_only=True)
class Reinforce(WithReference):
    """REINFORCE (Williams 1992) with an optional KL penalty.

    With behavior logprobs the score is the ratio to the behavior policy, whose on-policy gradient
    is REINFORCE's; without them it is the logprob. The ratio already corrects for the sampler, so
    TIS on top of it weighs the same mismatch twice; both may be combined nevertheless.
    """

    has_trust_region: ClassVar[bool] = False

    ratio_log_cap: float = RATIO_LOG_CAP
    """Largest absolute log ratio; >= 0."""

    def validate(self) -> None:
        """Check the options; see ``Objective``."""
        super().validate()
        require_at_least(self, 0, "ratio_log_cap")

    def policy_term(self, batch: TokenBatch) -> Tensor:
        """``-A exp(policy - behavior)`` [T]; ``-A policy_logprobs`` without behavior logprobs."""
        ratio = self._behavior_ratio(batch)
        score = batch.policy_logprobs if ratio is None else ratio
        return batch.zero_masked(-score * batch.advantages)

    def clipping(self, batch: TokenBatch) -> Clipping | None:
        """The ratio to the behavior policy when that is known; nothing clips it."""
        ratio = self._behavior_ratio(batch)
        if ratio is None:
            return None
        return Clipping(ratio.detach(), torch.zeros_like(ratio, dtype=torch.bool))

    def metrics(self, batch: TokenBatch) -> Metrics:
        """``is_ratio_mean``, the ratio to the behavior policy when that is known."""
        ratio = self._behavior_ratio(batch)
        return {} if ratio is None else {"is_ratio_mean": batch.active_mean(ratio)}

    def _behavior_ratio(self, batch: TokenBatch) -> Tensor | None:
        if batch.behavior_logprobs is None:
            return None
        log_ratio = batch.policy_logprobs - batch.behavior_logprobs
        return log_ratio.clamp(-self.ratio_log_cap, self.ratio_log_cap).exp()


@dataclass(frozen=True, kw_only=True)
class DRO(Objective):
    """Direct reward optimization: a quadratic pull toward the old policy (arXiv:2405.19107).

    Per token instead of per answer, and without the paper's value function.
    """

    beta: float = 0.05
    """Weight of the quadratic term; >= 0."""
    gated: bool = False
    """Drop the quadratic term where the advantage is 0."""

    def validate(self) -> None:
        """Check the options; see ``Objective``."""
        require_at_least(self, 0, "beta")

    def policy_term(self, batch: TokenBatch) -> Tensor:
        """``-(A policy - beta/2 (policy - old)^2)`` [T]."""
        linear = batch.advantages * batch.policy_logprobs
        return batch.zero_masked(self.beta * self._pull(batch) - linear)

    def weighted_term(self, batch: TokenBatch, weights: Tensor) -> Tensor:
        """``policy_term`` [T] with weights on its linear part only."""
        linear = batch.advantages * batch.policy_logprobs * weights
        return batch.zero_masked(self.beta * self._pull(batch) - linear)

    def metrics(self, batch: TokenBatch) -> Metrics:
        """``dro_quad_penalty`` per active token."""
        return {"dro_quad_penalty": batch.active_mean(self.beta * self._pull(batch))}

    def _pull(self, batch: TokenBatch) -> Tensor:
        pull = 0.5 * (batch.policy_logprobs - batch.anchor).square()
        return torch.where(batch.advantages != 0, pull, 0.0) if self.gated else pull
