"""GSPO: clipping by one ratio per sequence. Legend: T target tokens, N samples."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hearth.losses.batch import TokenBatch
from hearth.losses.clipped import binding_clip, clip_metrics
from hearth.losses.objective import Clipping, Metrics, Objective, require_at_least


@dataclass(frozen=True, kw_only=True)
class GSPO(Objective):
    """Sequence-level clipping (GSPO-token of arXiv:2507.18071).

    Each active token's gradient is ``-s A``; the paper divides by the sample's length, which is
    the reduction ``sequence_mean``. ``GSPO_PRESETS`` has the cookbook's and the paper's bounds.
    """

    clip_ratio_low: float = 0.2
    """Lower clip of the sequence ratio, >= 0; the paper's is 3e-4."""
    clip_ratio_high: float = 0.2
    """Upper clip of the sequence ratio, >= 0; the paper's is 4e-4."""
    seq_ratio_log_cap: float = 10.0
    """Largest log ratio of a sequence; >= 0."""

    def validate(self) -> None:
        """Check the options; see ``Objective``."""
        require_at_least(self, 0, "clip_ratio_low", "clip_ratio_high", "seq_ratio_log_cap")

    def policy_term(self, batch: TokenBatch) -> Tensor:
        """``max(-s A, -clip(s) A)`` [T]."""
        ratio = self._sequence_ratio(batch)
        clipped = ratio.clamp(1 - self.clip_ratio_low, 1 + self.clip_ratio_high)
        loss = torch.maximum(-ratio * batch.advantages, -clipped * batch.advantages)
        return batch.zero_masked(loss)

    def clipping(self, batch: TokenBatch) -> Clipping:
        """The sequence ratio at each token, and where the clip removes the gradient."""
        ratio = self._sequence_ratio(batch).detach()
        return binding_clip(batch, ratio, 1 - self.clip_ratio_low, 1 + self.clip_ratio_high)

    def metrics(self, batch: TokenBatch) -> Metrics:
        """``gspo_clip_frac`` and ``ppo_ratio_mean``, of the sequence ratio."""
        return clip_metrics(batch, self.clipping(batch), "gspo_clip_frac")

    def _sequence_ratio(self, batch: TokenBatch) -> Tensor:
        """The sample's ratio s = ``exp(mean(policy - old))`` at each of its tokens [T].

        The mean is over active tokens only: a tool's or a prompt's token never moves the ratio.
        The value is the sample's; the gradient in each token's logprob is the ratio itself
        (straight-through), and zero beyond the cap, which guards from above only.
        """
        policy = batch.policy_logprobs
        log_ratio = batch.at_tokens(batch.segment_mean((policy - batch.anchor).detach()))
        return (log_ratio + policy - policy.detach()).clamp(max=self.seq_ratio_log_cap).exp()


GSPO_PRESETS = {
    "cookbook": GSPO(clip_ratio_low=0.2, clip_ratio_high=0.2),
    "paper": GSPO(clip_ratio_low=3e-4, clip_ratio_high=4e-4),
}
"""Bounds by origin; 0.2 practically never clips a sequence ratio."""
