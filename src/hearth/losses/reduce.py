"""Reductions by name, and the denominators of the optimizer's normalization modes.

Every objective returns a raw loss per token, and exactly one caller divides it.

Legend: T target tokens, N samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from hearth.errors import ConfigError
from hearth.losses.batch import TokenBatch

NormalizationMode = Literal["num_loss_tokens", "num_sequences", "none"]
NORMALIZATION_MODES: tuple[NormalizationMode, ...] = ("num_loss_tokens", "num_sequences", "none")


@dataclass(frozen=True)
class GradientCounts:
    """How many tokens and sequences contribute to a gradient; counts of batches add up."""

    tokens: int = 0
    sequences: int = 0

    def __add__(self, other: GradientCounts) -> GradientCounts:
        """Counts of two batches that share no sequence."""
        return GradientCounts(self.tokens + other.tokens, self.sequences + other.sequences)

    def denominator(self, mode: str) -> int:
        """The divisor of a summed gradient: a count, at least 1, or 1 for ``none``.

        Raises:
            ConfigError: the mode is unknown; the message lists them.
        """
        counts = {"num_loss_tokens": self.tokens, "num_sequences": self.sequences, "none": 1}
        if mode not in counts:
            raise ConfigError(
                f"normalization must be one of {', '.join(NORMALIZATION_MODES)}, got {mode!r}"
            )
        return max(1, counts[mode])


def count_gradients(token_gradients: Tensor, segment_ids: Tensor) -> GradientCounts:
    """Tokens with a gradient [T] other than 0, and sequences that have such a token.

    A token of advantage 0 or one that a clip holds has none, though its mask is 1.
    """
    contributing = token_gradients != 0
    per_sequence = torch.bincount(segment_ids[contributing])
    return GradientCounts(int(contributing.sum()), int((per_sequence > 0).sum()))


def _sum(per_token: Tensor, batch: TokenBatch) -> Tensor:
    return batch.zero_masked(per_token).sum()


def _by_gradient(mode: NormalizationMode, per_token: Tensor, batch: TokenBatch) -> Tensor:
    total = _sum(per_token, batch)
    if not batch.policy_logprobs.requires_grad:
        raise ConfigError(
            f"policy_logprobs must require a gradient to reduce by {mode!r}, got constants: "
            "this mode counts tokens whose gradient is not 0; token_mean counts the mask"
        )
    (gradients,) = torch.autograd.grad(total, batch.policy_logprobs, retain_graph=True)
    return total / count_gradients(gradients, batch.segment_ids).denominator(mode)


def _token_mean(per_token: Tensor, batch: TokenBatch) -> Tensor:
    return _sum(per_token, batch) / batch.num_active


def _sample_mean(per_token: Tensor, batch: TokenBatch) -> Tensor:
    return _sum(per_token, batch) / max(1, batch.num_samples)


def _sequence_mean(per_token: Tensor, batch: TokenBatch) -> Tensor:
    total = batch.segment_mean(per_token).sum() / max(1, batch.num_samples)
    return total.to(per_token.dtype)


REDUCTIONS: dict[str, Callable[[Tensor, TokenBatch], Tensor]] = {
    "sum": _sum,
    "none": _sum,
    "num_loss_tokens": partial(_by_gradient, "num_loss_tokens"),
    "num_sequences": partial(_by_gradient, "num_sequences"),
    "token_mean": _token_mean,
    "sample_mean": _sample_mean,
    "sequence_mean": _sequence_mean,
}
"""``sum`` = ``none``: raw. ``num_loss_tokens``, ``num_sequences``: by what has a gradient.
``token_mean``: by active tokens (DAPO, CISPO). ``sample_mean``: by N. ``sequence_mean``: mean
inside each sample, then by N (GRPO's and GSPO's papers)."""


def reduce_loss(per_token: Tensor, batch: TokenBatch, reduction: str) -> Tensor:
    """The scalar loss of a loss per token [T] under a named reduction.

    Raises:
        ConfigError: the name is unknown; it is a ValueError and lists the names.
    """
    if reduction not in REDUCTIONS:
        raise ConfigError(f"reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}")
    return REDUCTIONS[reduction](per_token, batch)
