"""Where a recipe's reward function runs, and what its config makes of failures."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from hearth.errors import ConfigError
from training.rewards.guard import GuardedReward, guarded
from training.rewards.scoring import AnyReward

if TYPE_CHECKING:  # configs import torch, which a reward's own process does without
    from training.config.single_turn import SingleTurnConfig

logger = logging.getLogger(__name__)

MAX_REWARDS = 8
"""Reward functions with a time limit that run on this machine at once."""


def guard_reward(config: SingleTurnConfig, reward_fn: AnyReward) -> AnyReward:
    """The reward function, guarded where the config sets a time limit or drops failures.

    Raises:
        ConfigError: it does, and the function is guarded already.
    """
    workers = config.reward_workers
    if config.rollout_workers is not None:
        workers = config.rollout_workers
        logger.warning("rollout_workers is now called reward_workers, got %r", workers)
    if config.reward_timeout_s is None and config.reward_errors == "raise":
        return reward_fn
    if isinstance(reward_fn, GuardedReward):
        raise ConfigError(
            "reward_timeout_s and reward_errors must not be given with a guarded reward_fn, got "
            f"{config.reward_timeout_s} and {config.reward_errors!r}: it has its own"
        )
    return guarded(
        reward_fn,
        timeout_s=config.reward_timeout_s,
        on_error=config.reward_errors,
        isolation="thread" if workers == "loop" else workers,
        max_concurrent=config.max_concurrent if workers == "ray" else MAX_REWARDS,
    )
