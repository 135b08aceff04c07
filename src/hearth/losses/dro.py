"""DRO: policy gradient with a quadratic pull toward the old policy. Legend: T target tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hearth.losses.batch import TokenBatch
from hearth.losses.objective import Metrics, Objective, require_at_least


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
