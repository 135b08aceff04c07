"""Advantages from rewards: how much better a completion is than its group. Float64 throughout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

from hearth.errors import ConfigError

Std = Literal["sample", "population"]
Scope = Literal["group", "batch"]

STD_FLOOR = 1e-8


def group_advantages(
    rewards: Sequence[float], *, std: Std = "sample", floor: float = STD_FLOOR
) -> list[float]:
    """``(reward - mean) / max(std, floor)`` for each completion of one group.

    Exactly 0 for a uniform group (``max == min``), whose computed spread would be rounding noise.
    ``sample`` divides the squares by K - 1, ``population`` by K. Adding a number to all rewards or
    multiplying them by a positive one changes nothing, as long as the spread stays above ``floor``.
    GRPO (arXiv:2402.03300).

    Raises:
        ConfigError: fewer than two rewards, one that is NaN or infinite, or an unknown ``std``.
    """
    if std not in get_args(Std):
        raise ConfigError(f"std must be one of {list(get_args(Std))}, got {std!r}")
    values = _check_rewards(rewards)
    if is_uniform(values):
        return [0.0] * len(values)
    mean = math.fsum(values) / len(values)
    squares = math.fsum((value - mean) ** 2 for value in values)
    spread = math.sqrt(squares / (len(values) - (std == "sample")))
    return [(value - mean) / max(spread, floor) for value in values]


def batch_advantages(
    groups: Sequence[Sequence[float]], *, std: Std = "sample", scope: Scope = "group"
) -> list[list[float]]:
    """Advantages of several groups, in their shape.

    ``group`` compares completions of one prompt. ``batch`` pools all rewards, as document 003
    does when it concatenates prompts; easy prompts are then positive and hard ones negative.

    Raises:
        ConfigError: as ``group_advantages``, or an unknown ``scope``.
    """
    if scope not in get_args(Scope):
        raise ConfigError(f"scope must be one of {list(get_args(Scope))}, got {scope!r}")
    if scope == "group":
        return [group_advantages(group, std=std) for group in groups]
    pooled = iter(group_advantages([reward for group in groups for reward in group], std=std))
    return [[next(pooled) for _ in group] for group in groups]


def usable_group(rewards: Sequence[float], least: int = 2) -> str | None:
    """Why a group is refused: ``too_few``, below ``least``, or ``non_finite``; None where not."""
    if len(rewards) < least:
        return "too_few"
    if not all(math.isfinite(reward) for reward in rewards):
        return "non_finite"
    return None


def is_uniform(rewards: Sequence[float]) -> bool:
    """Whether all rewards are equal, so that the group teaches nothing."""
    return max(rewards) == min(rewards)


def _check_rewards(rewards: Sequence[float]) -> list[float]:
    if len(rewards) < 2:
        raise ConfigError(
            f"rewards must hold at least 2 values, got {len(rewards)}: advantages compare the "
            "completions of one prompt, and one has no spread"
        )
    values = [float(reward) for reward in rewards]
    for index, value in enumerate(values):
        if not math.isfinite(value):
            raise ConfigError(
                f"rewards[{index}] must be finite, got {value}: drop the completion or its group"
            )
    return values
