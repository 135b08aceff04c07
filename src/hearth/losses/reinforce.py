"""REINFORCE, plain or with the ratio to the sampler's policy. Legend: T target tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from hearth.losses.batch import RATIO_LOG_CAP, TokenBatch
from hearth.losses.corrections import WithReference
from hearth.losses.objective import Metrics, require_at_least


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

    def metrics(self, batch: TokenBatch) -> Metrics:
        """``is_ratio_mean``, the ratio to the behavior policy when that is known."""
        ratio = self._behavior_ratio(batch)
        return {} if ratio is None else {"is_ratio_mean": batch.active_mean(ratio)}

    def _behavior_ratio(self, batch: TokenBatch) -> Tensor | None:
        if batch.behavior_logprobs is None:
            return None
        log_ratio = batch.policy_logprobs - batch.behavior_logprobs
        return log_ratio.clamp(-self.ratio_log_cap, self.ratio_log_cap).exp()
