"""The settings of turn-level credit from information gain (``igpo_loop``)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from training.config.async_recipe import AsyncConfig

MOST_SCORED = 1024
"""Sequences that a deployment takes in one request."""

ScorerName = Literal["deployment", "trainer"]
Normalization = Literal["separate", "pooled"]
"""Which turns a group's gains and outcomes are compared over; see ``turn_advantages``."""
Form = Literal["logprob", "probability"]
"""What an information gain is a difference of."""


@dataclass(kw_only=True)
class TurnCreditConfig(AsyncConfig):
    """Settings of ``igpo_loop`` beside those of ``async_rl_loop``."""

    ig_weight: float = 1.0
    """Weight of normalized information gain against the normalized outcome; 0 is plain GRPO."""
    ig_gamma: float = 0.99
    """Discount per turn of what comes after a turn."""
    ig_normalization: Normalization = "separate"
    """separate compares gains over turns and outcomes over trajectories; pooled is the cookbook's,
    both over all turns."""
    ig_form: Form = "logprob"
    """What a gain is a difference of: mean logprob of the answer's tokens, or its exponential."""
    ig_scorer: ScorerName = "deployment"
    """Who scores the answer: the deployment, with the weights that sample, or the trainer."""
    ig_answer_prefix: str = ""
    """Text that leads to an answer, such as <answer>; stands before it, and is not scored."""
    scoring_batch: int = 256
    """Prefixes per scoring call, 1024 at most; a group has one call where they fit."""


def turn_credit_problems(config: TurnCreditConfig) -> Iterator[str]:
    """A line for each setting of turn-level credit that breaks its rule."""
    if not (math.isfinite(config.ig_weight) and config.ig_weight >= 0):
        yield f"ig_weight must be >= 0, got {config.ig_weight}: 0 is plain GRPO"
    if not 0 <= config.ig_gamma <= 1:
        yield f"ig_gamma must lie in [0, 1], got {config.ig_gamma}"
    if not 1 <= config.scoring_batch <= MOST_SCORED:
        yield f"scoring_batch must lie in [1, {MOST_SCORED}], got {config.scoring_batch}"
