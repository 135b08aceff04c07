"""Clipped surrogates per token: GRPO's and DAPO's. Legend: T target tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hearth.errors import ConfigError
from hearth.losses.batch import RATIO_LOG_CAP, TokenBatch
from hearth.losses.corrections import WithReference
from hearth.losses.objective import Clipping, Metrics, Objective, require_at_least


def token_ratio(batch: TokenBatch, log_cap: float) -> Tensor:
    """Policy over old probability [T], with gradient; the log ratio is guarded at +-log_cap."""
    return (batch.policy_logprobs - batch.anchor).clamp(-log_cap, log_cap).exp()


def clipped_surrogate(
    batch: TokenBatch,
    *,
    clip_low: float,
    clip_high: float,
    ratio_log_cap: float,
    dual_clip: float | None = None,
) -> Tensor:
    """Per-token loss [T] ``max(-r A, -clip(r, 1 - low, 1 + high) A)``; 0 where the mask is 0.

    Equal bounds give PPO's clip (arXiv:1707.06347), which GRPO (arXiv:2402.03300) keeps;
    ``clip_high > clip_low`` is DAPO's clip-higher (arXiv:2503.14476). ``dual_clip`` bounds the
    loss of a negative advantage by ``-dual_clip * A`` (arXiv:1912.09729; not part of DAPO).
    """
    ratio = token_ratio(batch, ratio_log_cap)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(-ratio * batch.advantages, -clipped * batch.advantages)
    if dual_clip is not None:
        bounded = torch.minimum(loss, -dual_clip * batch.advantages)
        loss = torch.where(batch.advantages < 0, bounded, loss)
    return batch.zero_masked(loss)


def binding_clip(batch: TokenBatch, ratio: Tensor, low: float, high: float) -> Clipping:
    """Which tokens lose their gradient by the clip to [low, high]."""
    above = (ratio > high) & (batch.advantages > 0)
    below = (ratio < low) & (batch.advantages < 0)
    return Clipping(ratio, above | below)


def clip_metrics(batch: TokenBatch, clipping: Clipping, name: str) -> Metrics:
    """The share of clipped tokens as ``name``, and ``ppo_ratio_mean``."""
    ratio = clipping.ratio
    return {
        name: batch.active_mean(clipping.is_clipped.to(ratio.dtype)),
        "ppo_ratio_mean": batch.active_mean(ratio),
    }


@dataclass(frozen=True, kw_only=True)
class GRPO(WithReference):
    """REINFORCE with PPO's clip and a KL penalty (arXiv:2402.03300).

    While the ratio is 1 the clip does nothing and the gradient is that of REINFORCE. We sum over
    tokens where the paper divides by each answer's length: see ``hearth.losses.reduce``.
    """

    kl_beta: float = 0.001
    """Weight of the KL penalty, >= 0; above 0 the batch needs reference logprobs."""
    eps_clip: float = 0.2
    """Lower clip, >= 0: ratios below 1 - eps_clip have no gradient."""
    eps_clip_high: float | None = None
    """Upper clip, >= 0; None means eps_clip."""
    ratio_log_cap: float = RATIO_LOG_CAP
    """Largest absolute log ratio; >= 0."""

    def validate(self) -> None:
        """Check the options; see ``Objective``."""
        super().validate()
        require_at_least(self, 0, "eps_clip", "eps_clip_high", "ratio_log_cap")

    @property
    def high(self) -> float:
        """The upper clip in force."""
        return self.eps_clip if self.eps_clip_high is None else self.eps_clip_high

    def policy_term(self, batch: TokenBatch) -> Tensor:
        """The clipped surrogate [T]."""
        return clipped_surrogate(
            batch, clip_low=self.eps_clip, clip_high=self.high, ratio_log_cap=self.ratio_log_cap
        )

    def clipping(self, batch: TokenBatch) -> Clipping:
        """Tokens whose gradient the clip removes."""
        ratio = token_ratio(batch, self.ratio_log_cap).detach()
        return binding_clip(batch, ratio, 1 - self.eps_clip, 1 + self.high)

    def metrics(self, batch: TokenBatch) -> Metrics:
        """``ppo_clip_frac`` and ``ppo_ratio_mean``."""
        return clip_metrics(batch, self.clipping(batch), "ppo_clip_frac")


@dataclass(frozen=True, kw_only=True)
class DAPO(Objective):
    """Decoupled clip (arXiv:2503.14476), with an optional dual clip.

    The paper's dynamic sampling is the recipe's group filter, its token mean a reduction, and its
    overlong shaping a reward; none is part of this loss.
    """

    eps_clip: float = 0.2
    """Lower clip, >= 0: ratios below 1 - eps_clip have no gradient."""
    eps_clip_high: float = 0.28
    """Upper clip, >= 0: ratios above 1 + eps_clip_high have no gradient."""
    eps_clip_c: float | None = None
    """Dual clip for negative advantages, > 1; None switches it off."""
    ratio_log_cap: float = RATIO_LOG_CAP
    """Largest absolute log ratio; >= 0."""

    def validate(self) -> None:
        """Check the options; see ``Objective``."""
        require_at_least(self, 0, "eps_clip", "eps_clip_high", "ratio_log_cap")
        if self.eps_clip_c is not None and not self.eps_clip_c > 1:
            raise ConfigError(f"DAPO.eps_clip_c must be > 1, got {self.eps_clip_c}")

    def policy_term(self, batch: TokenBatch) -> Tensor:
        """The clipped surrogate [T] with asymmetric bounds."""
        return clipped_surrogate(
            batch,
            clip_low=self.eps_clip,
            clip_high=self.eps_clip_high,
            dual_clip=self.eps_clip_c,
            ratio_log_cap=self.ratio_log_cap,
        )

    def clipping(self, batch: TokenBatch) -> Clipping:
        """Tokens whose gradient the clip removes; the dual clip is not counted."""
        ratio = token_ratio(batch, self.ratio_log_cap).detach()
        return binding_clip(batch, ratio, 1 - self.eps_clip, 1 + self.eps_clip_high)

    def metrics(self, batch: TokenBatch) -> Metrics:
        """``dapo_clip_frac`` and ``ppo_ratio_mean``."""
        return clip_metrics(batch, self.clipping(batch), "dapo_clip_frac")
