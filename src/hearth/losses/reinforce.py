"""REINFORCE, plain or with the ratio to the sampler's policy. Legend: T target tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from hearth.losses.batch import RATIO_LOG_CAP, TokenBatch
from hearth.losses.corrections import WithReference
from hearth.losses.objective import Metrics, require_at_least


def reinforce(batch: TokenBatch, *, ratio_log_cap: float = RATIO_LOG_CAP) -> Tensor:
    """Per-token loss [T]; exactly 0 where the mask is 0.

    With behavior logprobs ``-A exp(policy - behavior)``, whose on-policy gradient is REINFORCE's;
    without them ``-A policy_logprobs`` (Williams 1992).
    """
    ratio = _behavior_ratio(batch, ratio_log_cap)
    score = batch.policy_logprobs if ratio is None else ratio
    return batch.live(-score * batch.advantages)


@dataclass(frozen=True, kw_only=True)
class Reinforce(WithReference):
    """REINFORCE with an optional KL penalty.

    The ratio to the behavior policy already corrects for the sampler, so TIS on top of it weighs
    the same mismatch twice; it composes nevertheless, as with every objective.
    """

    has_trust_region: ClassVar[bool] = False

    ratio_log_cap: float = RATIO_LOG_CAP
    """Guard on the log ratio's size."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, 0, ratio_log_cap=self.ratio_log_cap)

    def policy_term(self, batch: TokenBatch) -> Tensor:
        """``reinforce`` [T]."""
        return reinforce(batch, ratio_log_cap=self.ratio_log_cap)

    def metrics(self, batch: TokenBatch) -> Metrics:
        """``is_ratio_mean``, the ratio to the behavior policy when that is known."""
        ratio = _behavior_ratio(batch, self.ratio_log_cap)
        return {} if ratio is None else {"is_ratio_mean": batch.active_mean(ratio)}


def _behavior_ratio(batch: TokenBatch, log_cap: float) -> Tensor | None:
    if batch.behavior_logprobs is None:
        return None
    return (batch.policy_logprobs - batch.behavior_logprobs).clamp(-log_cap, log_cap).exp()
