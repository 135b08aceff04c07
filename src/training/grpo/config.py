"""The settings of the small GRPO library, and what is wrong or unwise about them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

from hearth.errors import ConfigError
from hearth.losses import KLEstimator


@dataclass
class GRPOConfig:
    """Settings of ``GRPOTrainer`` and ``GRPOPipeline``; judged when a trainer gets them."""

    group_size: int = 4
    """Completions per prompt; generation costs grow with it, and advantages get less noisy."""
    kl_coeff: float = 0.1
    """Weight of the KL to the reference."""
    learning_rate: float = 1e-6
    """AdamW's learning rate; there is no weight decay."""
    clip_range: float = 0.2
    """PPO's clip of the ratio, both ways; acts from the second update on one batch on."""
    max_grad_norm: float = 1.0
    """Largest global gradient norm; 0 switches clipping off."""
    normalize_advantages: bool = True
    """Divide advantages by their group's population deviation, beside centering them."""
    kl_estimator: KLEstimator = "k3"
    """Estimator of the KL in an update of a torch model. Document 002's mean difference is k1,
    whose gradient does not pull toward the reference; ``compute_loss`` is k1 always."""
    updates_per_batch: int = 1
    """Optimizer steps on the groups of one step."""
    kl_target: float | None = None
    """KL to the reference in nats per token that the weight of the KL is to lead to, from
    ``kl_coeff`` on (``AdaptiveKL``); per completion where somebody else trains. None keeps it."""

    def validate(self) -> None:
        """Refuse what cannot be trained with, and warn of what should not be.

        Raises:
            ConfigError: one line per problem.
        """
        problems = list(self._problems())
        if problems:
            raise ConfigError("\n".join(problems))
        if self.kl_coeff == 0:
            warnings.warn(
                "kl_coeff is 0: nothing keeps the policy near the reference", stacklevel=3
            )
        if not self.normalize_advantages:
            warnings.warn(
                "normalize_advantages is False: gradients grow with the spread of rewards",
                stacklevel=3,
            )

    def _problems(self) -> Iterator[str]:
        for name, count in (
            ("group_size", self.group_size),
            ("updates_per_batch", self.updates_per_batch),
        ):
            if count < 1:
                yield f"{name} must be >= 1, got {count}"
        for name, value in (
            ("kl_coeff", self.kl_coeff),
            ("learning_rate", self.learning_rate),
            ("clip_range", self.clip_range),
            ("max_grad_norm", self.max_grad_norm),
        ):
            if not (math.isfinite(value) and value >= 0):
                yield f"{name} must be finite and >= 0, got {value}"
        if self.kl_target is not None:
            if not (math.isfinite(self.kl_target) and self.kl_target > 0):
                yield f"kl_target must be finite and > 0 or None, got {self.kl_target}"
            if self.kl_coeff == 0:
                yield "kl_coeff must be > 0 with a kl_target, got 0: nothing multiplies it up"
