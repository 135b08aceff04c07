"""How a recipe calls a reward function, of whichever kind."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from hearth.errors import ConfigError
from training.rewards.guard import GuardedReward, guarded
from training.rewards.score import RewardFunction, Score, ScoringReward, Unscored, as_score

T = TypeVar("T")

AnyReward = RewardFunction | GuardedReward
"""A reward function, plain, async or guarded."""


async def scored(
    reward_fn: AnyReward, completions: Sequence[str], row: Mapping[str, Any]
) -> list[Score | Unscored]:
    """What each completion of a row earned, or why it earned nothing.

    A plain function is called for one after the other, here and now; calls that must be awaited
    are under way together.

    Raises:
        Exception: what an unguarded function raised.
    """
    calls = [_begin_call(reward_fn, completion, row) for completion in completions]
    waiting = [place for place, (outcome, _) in enumerate(calls) if inspect.isawaitable(outcome)]
    if waiting:
        results = await gather_or_cancel([_time_call(*calls[place]) for place in waiting])
        for place, result in zip(waiting, results, strict=True):
            calls[place] = result
    return [_as_timed_score(outcome, seconds) for outcome, seconds in calls]


def _begin_call(reward_fn: AnyReward, completion: str, row: Mapping[str, Any]) -> tuple[Any, float]:
    """What a call returned, and its seconds."""
    began = time.perf_counter()
    return call_reward(reward_fn, completion, row), time.perf_counter() - began


async def _time_call(outcome: Awaitable[T], seconds: float) -> tuple[T, float]:
    began = time.perf_counter()
    return await outcome, seconds + time.perf_counter() - began


def _as_timed_score(outcome: Any, seconds: float) -> Score | Unscored:
    known = outcome if isinstance(outcome, Unscored) else as_score(outcome)
    return replace(known, seconds=seconds)


async def gather_or_cancel(work: Sequence[Awaitable[T]]) -> list[T]:
    """All results in order; the first failure cancels the others and waits for them to end."""
    tasks = [asyncio.ensure_future(item) for item in work]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def disagreements(outcomes: Sequence[Score | Unscored]) -> list[float]:
    """What an ensemble's members disagreed by, of each reward; empty where none judged."""
    scores = [outcome for outcome in outcomes if isinstance(outcome, Score)]
    return [score.disagreement for score in scores if score.disagreement is not None]


def call_reward(reward_fn: AnyReward, completion: str, row: Mapping[str, Any]) -> Any:
    """What the function returns: a number, a score, or what must be awaited for one."""
    if isinstance(reward_fn, GuardedReward | ScoringReward):
        return reward_fn.score(completion, row)
    return reward_fn(completion, row)


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
