"""DRO: policy gradient with a quadratic pull toward the old policy. Legend: T target tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hearth.losses.batch import TokenBatch
from hearth.losses.objective import Metrics, Objective, require_at_least


def dro(
    batch: TokenBatch, *, beta: float = 0.05, gated: bool = False, weights: Tensor | None = None
) -> Tensor:
    """Per-token loss [T] ``-(A policy - beta/2 (policy - old)^2)``; 0 where the mask is 0.

    Direct reward optimization (arXiv:2405.19107), per token instead of per answer and without its
    value function. The pull acts on tokens of advantage 0 too; ``gated`` leaves those alone.
    ``weights`` [T] multiply the linear part only.
    """
    linear = batch.advantages * batch.policy_logprobs
    if weights is not None:
        linear = linear * weights
    return batch.live(beta * _pull(batch, gated) - linear)


@dataclass(frozen=True, kw_only=True)
class DRO(Objective):
    """Quadratic pull toward the old policy."""

    beta: float = 0.05
    """Weight of the quadratic term."""
    gated: bool = False
    """Drop the quadratic term where the advantage is 0."""

    def __post_init__(self) -> None:
        require_at_least(self, 0, beta=self.beta)

    def policy_term(self, batch: TokenBatch) -> Tensor:
        """``dro`` [T]."""
        return dro(batch, beta=self.beta, gated=self.gated)

    def weighted_term(self, batch: TokenBatch, weights: Tensor) -> Tensor:
        """``dro`` [T] with weights on its linear part."""
        return dro(batch, beta=self.beta, gated=self.gated, weights=weights)

    def metrics(self, batch: TokenBatch) -> Metrics:
        """``dro_quad_penalty`` per active token."""
        return {"dro_quad_penalty": batch.active_mean(self.beta * _pull(batch, self.gated))}


def _pull(batch: TokenBatch, gated: bool) -> Tensor:
    pull = 0.5 * (batch.policy_logprobs - batch.anchor).square()
    return torch.where(batch.advantages != 0, pull, 0.0) if gated else pull
