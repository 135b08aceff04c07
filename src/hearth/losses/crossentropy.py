"""Weighted cross-entropy. Legend: T target tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hearth.losses.batch import TokenBatch
from hearth.losses.objective import Objective


@dataclass(frozen=True, kw_only=True)
class CrossEntropy(Objective):
    """Weighted cross-entropy, never normalized; it has no options.

    The weights are ``batch.advantages`` and may be negative and fractional: with ``-dC/dlogprob``
    as weights the gradient is that of any loss C, which is how custom losses reach a trainer.
    """

    def policy_term(self, batch: TokenBatch) -> Tensor:
        """``-weight * policy_logprobs`` [T]."""
        return batch.zero_masked(-batch.advantages * batch.policy_logprobs)
