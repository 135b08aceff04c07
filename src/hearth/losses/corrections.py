"""Corrections to a policy term: truncated importance sampling, and the KL penalty.

Legend: T target tokens, N samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from hearth.errors import ConfigError
from hearth.losses.batch import RATIO_LOG_CAP, TokenBatch
from hearth.losses.objective import Metrics, Objective, require_at_least

TISLevel = Literal["token", "sequence"]
SequenceMean = Literal["product", "geometric"]
KLEstimator = Literal["k1", "k2", "k3"]


@dataclass(frozen=True, kw_only=True)
class TIS:
    """Truncated importance sampling from the sampler's policy to the trainer's old one.

    Token level after https://fengyao.notion.site/off-policy-rl (Yao et al. 2025). At sequence
    level each sample has one weight: the product of its active tokens' ratios, as in the
    literature, or their geometric mean. ``icepop_threshold`` drops instead of capping (IcePop,
    arXiv:2510.18855). Exponents are bounded by +-20 after the reduction.
    """

    cap: float = 2.0
    """Largest weight, >= 0; there is no smallest one."""
    level: TISLevel = "token"
    """One weight per token, or one per sample."""
    sequence_mean: SequenceMean = "product"
    """How the ratios of a sample's tokens are combined at sequence level."""
    icepop_threshold: float | None = None
    """Token level, >= 1: a ratio outside [1/threshold, threshold] gives weight 0; None caps."""

    def validate(self) -> None:
        """Check the options; ``evaluate`` does so before it uses them.

        Raises:
            ConfigError: one breaks its rule.
        """
        if not self.cap >= 0:
            raise ConfigError(f"tis.cap must be >= 0, got {self.cap}")
        for name, choices in (("level", TISLevel), ("sequence_mean", SequenceMean)):
            if getattr(self, name) not in get_args(choices):
                raise ConfigError(
                    f"tis.{name} must be one of {list(get_args(choices))}, "
                    f"got {getattr(self, name)!r}"
                )
        threshold = self.icepop_threshold
        if threshold is not None and (self.level != "token" or not threshold >= 1):
            raise ConfigError(
                "tis.icepop_threshold must be >= 1 and used at token level, "
                f"got {threshold} at {self.level} level"
            )

    def ratios(self, batch: TokenBatch) -> Tensor:
        """Old over behavior probability [T] before truncation; 1 on masked tokens.

        Raises:
            ConfigError: the batch has no behavior logprobs.
        """
        if batch.behavior_logprobs is None:
            raise ConfigError(
                "behavior_logprobs must be given for tis, got None: sample with logprobs"
            )
        log_ratio = batch.anchor - batch.behavior_logprobs
        if self.level == "sequence":
            geometric = self.sequence_mean == "geometric"
            reduce = batch.segment_mean if geometric else batch.segment_sum
            exponents = reduce(log_ratio).clamp(-RATIO_LOG_CAP, RATIO_LOG_CAP)
            return torch.where(batch.active, batch.at_tokens(exponents.exp()), 1.0)
        return log_ratio.clamp(-RATIO_LOG_CAP, RATIO_LOG_CAP).exp()

    def weights(self, batch: TokenBatch) -> Tensor:
        """``min(exp(old - behavior), cap)`` [T], constant, 1 on masked tokens."""
        ratios = self.ratios(batch)
        if self.icepop_threshold is None:
            kept = ratios.clamp(max=self.cap)
        else:
            kept = torch.where(self._is_kept(ratios, self.icepop_threshold), ratios, 0.0)
        return torch.where(batch.active, kept, 1.0)

    def metrics(self, batch: TokenBatch) -> Metrics:
        """``tis/*``: means over active tokens, ``tis/seq_ratio`` over samples that have any."""
        ratios = self.ratios(batch)
        dtype = ratios.dtype
        metrics = {"tis/weight_mean": batch.active_mean(self.weights(batch))}
        if self.icepop_threshold is None:
            metrics["tis/clip_frac"] = batch.active_mean((ratios > self.cap).to(dtype))
        else:
            dropped = ~self._is_kept(ratios, self.icepop_threshold)
            metrics["tis/icepop_clip_frac"] = batch.active_mean(dropped.to(dtype))
        if self.level == "sequence":
            has_tokens = (batch.segment_count() > 0).double()
            total = (batch.segment_mean(ratios) * has_tokens).sum()
            metrics["tis/seq_ratio"] = (total / has_tokens.sum().clamp(min=1)).to(dtype)
        return metrics

    @staticmethod
    def _is_kept(ratios: Tensor, threshold: float) -> Tensor:
        return (ratios <= threshold) & (ratios >= 1 / threshold)


def kl_penalty(
    policy_logprobs: Tensor, ref_logprobs: Tensor, estimator: KLEstimator = "k3"
) -> Tensor:
    """Estimate of KL(policy || reference) per token [T], with gradient in ``policy_logprobs``.

    With d = ref - policy (http://joschu.net/blog/kl-approx.html): k1 is -d, whose gradient is a
    constant push and pulls nowhere; k2 is d^2 / 2; k3 is exp(d) - d - 1 (the form of GRPO,
    arXiv:2402.03300). d is guarded at 20 from above, where k3 would overflow.

    Raises:
        ConfigError: the estimator is unknown.
    """
    difference = ref_logprobs - policy_logprobs
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return 0.5 * difference.square()
    if estimator == "k3":
        guarded = difference.clamp(max=RATIO_LOG_CAP)
        return guarded.exp() - guarded - 1
    raise ConfigError(
        f"kl_estimator must be one of {list(get_args(KLEstimator))}, got {estimator!r}"
    )


@dataclass(frozen=True, kw_only=True)
class WithReference(Objective):
    """An objective that may add a KL penalty toward the reference."""

    kl_beta: float = 0.0
    """Weight of the KL penalty, >= 0; above 0 the batch needs reference logprobs."""
    kl_estimator: KLEstimator = "k3"
    """k1, k2 or k3; k1's gradient does not pull toward the reference."""

    def validate(self) -> None:
        """Check the options; see ``Objective``."""
        require_at_least(self, 0, "kl_beta")
        if self.kl_estimator not in get_args(KLEstimator):
            raise ConfigError(
                f"kl_estimator must be one of {list(get_args(KLEstimator))}, "
                f"got {self.kl_estimator!r}"
            )

    def penalty(self, batch: TokenBatch) -> Tensor | None:
        """``kl_beta`` times the estimate per token [T]; None when ``kl_beta`` is 0.

        Raises:
            ConfigError: the batch has no reference logprobs.
        """
        if self.kl_beta == 0:
            return None
        if batch.ref_logprobs is None:
            raise ConfigError(
                f"ref_logprobs must be given when kl_beta > 0, got None with kl_beta="
                f"{self.kl_beta:g}: score the batch with a reference, or set kl_beta=0"
            )
        estimate = kl_penalty(batch.policy_logprobs, batch.ref_logprobs, self.kl_estimator)
        return batch.zero_masked(self.kl_beta * estimate)
