"""How a recipe calls a reward function, of whichever kind."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from training.rewards.guard import GuardedReward
from training.rewards.score import RewardFunction, Score, ScoringReward, Unscored, as_score
from training.together import all_of

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
        results = await all_of([outcomes[place] for place in waiting])
        for place, result in zip(waiting, results, strict=True):
            outcomes[place] = result
    return [outcome if isinstance(outcome, Unscored) else as_score(outcome) for outcome in outcomes]


def disagreements(outcomes: Sequence[Score | Unscored]) -> list[float]:
    """What an ensemble's members disagreed by, of each reward; empty where none judged."""
    scores = [outcome for outcome in outcomes if isinstance(outcome, Score)]
    return [score.disagreement for score in scores if score.disagreement is not None]


def _call_reward(reward_fn: AnyReward, completion: str, row: Mapping[str, Any]) -> Any:
    if isinstance(reward_fn, GuardedReward | ScoringReward):
        return reward_fn.score(completion, row)
    return reward_fn(completion, row)
