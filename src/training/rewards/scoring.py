"""How a recipe calls a reward function, of whichever kind."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, TypeVar

from training.rewards.guard import GuardedReward
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
    outcomes = [_call_reward(reward_fn, completion, row) for completion in completions]
    waiting = [place for place, outcome in enumerate(outcomes) if inspect.isawaitable(outcome)]
    if waiting:
        results = await gather_or_cancel([outcomes[place] for place in waiting])
        for place, result in zip(waiting, results, strict=True):
            outcomes[place] = result
    return [outcome if isinstance(outcome, Unscored) else as_score(outcome) for outcome in outcomes]


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


def _call_reward(reward_fn: AnyReward, completion: str, row: Mapping[str, Any]) -> Any:
    if isinstance(reward_fn, GuardedReward | ScoringReward):
        return reward_fn.score(completion, row)
    return reward_fn(completion, row)
