"""Weighted cross-entropy. Legend: T target tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hearth.losses.batch import TokenBatch
from hearth.losses.objective import Objective


def cross_entropy(batch: TokenBatch) -> Tensor:
    """Per-token loss [T] ``-weight * policy_logprobs``; exactly 0 where the mask is 0.

    The weights stand in ``batch.advantages`` and may be negative and fractional: with
    ``-dC/dlogprob`` as weights the gradient is that of any loss C, which is how custom losses
    reach a trainer. Never normalized.
    """
    return batch.live(-batch.advantages * batch.policy_logprobs)


@dataclass(frozen=True, kw_only=True)
class CrossEntropy(Objective):
    """Weighted cross-entropy; it has no options."""

    def policy_term(self, batch: TokenBatch) -> Tensor:
        """``cross_entropy`` [T]."""
        return cross_entropy(batch)
