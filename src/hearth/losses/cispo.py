"""CISPO: clipped importance weights, and the older masking form. Legend: T target tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hearth.losses.batch import RATIO_LOG_CAP, TokenBatch
from hearth.losses.clipped import binding_clip, clip_metrics, token_ratio
from hearth.losses.objective import Clipping, Metrics, Objective, require_at_least


@dataclass(frozen=True, kw_only=True)
class CISPO(Objective):
    """Clipped importance weights (arXiv:2506.13585).

    The clipped ratio is a constant weight, so every token keeps a gradient. In practice the paper
    sets no lower bound: ``eps_low=1``.
    """

    eps_low: float = 0.2
    """Weights are at least 1 - eps_low; >= 0."""
    eps_high: float = 0.28
    """Weights are at most 1 + eps_high; >= 0."""
    ratio_log_cap: float = RATIO_LOG_CAP
    """Largest absolute log ratio; >= 0."""

    def validate(self) -> None:
        """Check the options; see ``Objective``."""
        require_at_least(self, 0, "eps_low", "eps_high", "ratio_log_cap")

    def policy_term(self, batch: TokenBatch) -> Tensor:
        """``-stop(clip(r)) A policy_logprobs`` [T]."""
        ratio = token_ratio(batch, self.ratio_log_cap).detach()
        clipped = ratio.clamp(1 - self.eps_low, 1 + self.eps_high)
        return batch.zero_masked(-clipped * batch.advantages * batch.policy_logprobs)

    def clipping(self, batch: TokenBatch) -> Clipping:
        """Tokens whose weight is outside the bounds."""
        ratio = token_ratio(batch, self.ratio_log_cap).detach()
        return Clipping(ratio, (ratio < 1 - self.eps_low) | (ratio > 1 + self.eps_high))

    def metrics(self, batch: TokenBatch) -> Metrics:
        """``cispo_clip_frac``, the share of weights outside the bounds, and the mean ratio."""
        return clip_metrics(batch, self.clipping(batch), "cispo_clip_frac")


@dataclass(frozen=True, kw_only=True)
class CISPOMask(CISPO):
    """Importance-sampling masking: a token that PPO's clip would stop loses its gradient.

    An older document describes CISPO this way; the paper's unified formulation has this mask too.
    """

    def policy_term(self, batch: TokenBatch) -> Tensor:
        """``-r A`` [T], 0 where PPO's clip would bind."""
        ratio = token_ratio(batch, self.ratio_log_cap)
        above = (ratio.detach() > 1 + self.eps_high) & (batch.advantages > 0)
        below = (ratio.detach() < 1 - self.eps_low) & (batch.advantages < 0)
        return batch.zero_masked(torch.where(above | below, 0.0, -ratio * batch.advantages))

    def clipping(self, batch: TokenBatch) -> Clipping:
        """Tokens that are masked."""
        ratio = token_ratio(batch, self.ratio_log_cap).detach()
        return binding_clip(batch, ratio, 1 - self.eps_low, 1 + self.eps_high)

    def metrics(self, batch: TokenBatch) -> Metrics:
        """``cispo_mask_frac``, the share of masked tokens, and the mean ratio."""
        return clip_metrics(batch, self.clipping(batch), "cispo_mask_frac")
