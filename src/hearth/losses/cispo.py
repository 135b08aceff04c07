"""CISPO: clipped importance weights, and the older masking form. Legend: T target tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hearth.losses.batch import RATIO_LOG_CAP, TokenBatch
from hearth.losses.clipped import binding_fraction, token_ratio
from hearth.losses.objective import Metrics, Objective, require_at_least


def cispo(
    batch: TokenBatch,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    ratio_log_cap: float = RATIO_LOG_CAP,
) -> Tensor:
    """Per-token loss [T] ``-stop(clip(r)) A policy_logprobs``; exactly 0 where the mask is 0.

    The clipped ratio is a constant weight (arXiv:2506.13585), so every token keeps a gradient.
    The paper in practice sets no lower bound: ``clip_low=1``.
    """
    ratio = token_ratio(batch, ratio_log_cap).detach().clamp(1 - clip_low, 1 + clip_high)
    return batch.live(-ratio * batch.advantages * batch.policy_logprobs)


def cispo_mask(
    batch: TokenBatch,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    ratio_log_cap: float = RATIO_LOG_CAP,
) -> Tensor:
    """Per-token loss [T] ``-r A``, dropped where PPO's clip would bind; 0 where the mask is 0.

    "Importance-sampling masking", as an older document describes CISPO; the paper's unified
    formulation has this mask too, with PPO's choice of it.
    """
    ratio = token_ratio(batch, ratio_log_cap)
    above = (ratio.detach() > 1 + clip_high) & (batch.advantages > 0)
    below = (ratio.detach() < 1 - clip_low) & (batch.advantages < 0)
    return batch.live(torch.where(above | below, 0.0, -ratio * batch.advantages))


@dataclass(frozen=True, kw_only=True)
class CISPO(Objective):
    """Clipped importance weights (arXiv:2506.13585)."""

    eps_low: float = 0.2
    """Weights are at least 1 - eps_low."""
    eps_high: float = 0.28
    """Weights are at most 1 + eps_high."""
    ratio_log_cap: float = RATIO_LOG_CAP
    """Guard on the log ratio's size."""

    def __post_init__(self) -> None:
        require_at_least(
            self, 0, eps_low=self.eps_low, eps_high=self.eps_high, ratio_log_cap=self.ratio_log_cap
        )

    def policy_term(self, batch: TokenBatch) -> Tensor:
        """``cispo`` [T]."""
        return cispo(
            batch, clip_low=self.eps_low, clip_high=self.eps_high, ratio_log_cap=self.ratio_log_cap
        )

    def metrics(self, batch: TokenBatch) -> Metrics:
        """``cispo_clip_frac``, the share of weights outside the bounds, and the mean ratio."""
        ratio = token_ratio(batch, self.ratio_log_cap).detach()
        is_clipped = (ratio < 1 - self.eps_low) | (ratio > 1 + self.eps_high)
        return {
            "cispo_clip_frac": batch.active_mean(is_clipped.to(ratio.dtype)),
            "ppo_ratio_mean": batch.active_mean(ratio),
        }


@dataclass(frozen=True, kw_only=True)
class CISPOMask(CISPO):
    """The masking form: a token beyond the bounds loses its gradient."""

    def policy_term(self, batch: TokenBatch) -> Tensor:
        """``cispo_mask`` [T]."""
        return cispo_mask(
            batch, clip_low=self.eps_low, clip_high=self.eps_high, ratio_log_cap=self.ratio_log_cap
        )

    def metrics(self, batch: TokenBatch) -> Metrics:
        """``cispo_mask_frac``, the share of masked tokens, and the mean ratio."""
        ratio = token_ratio(batch, self.ratio_log_cap).detach()
        low, high = 1 - self.eps_low, 1 + self.eps_high
        return {
            "cispo_mask_frac": binding_fraction(batch, ratio, low, high),
            "ppo_ratio_mean": batch.active_mean(ratio),
        }
