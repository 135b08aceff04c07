"""What the optimizer is given for each step: AdamW's settings, and the rate by its schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass

import tinker

from training.config.recipe import RecipeConfig


@dataclass(frozen=True)
class StepPlace:
    """Where in a run a step is: what it trains and nothing else, so that no timing changes it."""

    step: int
    """Optimizer steps before it."""
    first: int
    """Place of its first row in the training order over all epochs, from 0."""
    end: int
    """One behind the place of its last row."""
    total: int
    """Rows of all epochs."""


def scheduled_rate(config: RecipeConfig, place: StepPlace) -> float:
    """The learning rate of a step: ``learning_rate`` times the schedule times the warm-up.

    The schedule falls with the rows before the step, from 1 at the first row to 0 behind the last.
    The warm-up rises with optimizer steps, or with the share of the rows that are done after the
    step; so no step has a rate of 0.
    """
    share = place.first / place.total
    match config.lr_schedule:
        case "linear":
            factor = 1.0 - share
        case "cosine":
            factor = 0.5 * (1.0 + math.cos(math.pi * share))
        case _:
            factor = 1.0
    if config.warmup_steps >= 1:
        factor *= min(1.0, (place.step + 1) / config.warmup_steps)
    elif config.warmup_steps > 0:
        factor *= min(1.0, place.end / (config.warmup_steps * place.total))
    return config.learning_rate * factor


def adam_params(config: RecipeConfig, rate: float) -> tinker.AdamParams:
    """AdamW's settings with a step's learning rate."""
    return tinker.AdamParams(
        learning_rate=rate,
        beta1=config.beta1,
        beta2=config.beta2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        grad_clip_norm=config.grad_clip_norm,
    )
