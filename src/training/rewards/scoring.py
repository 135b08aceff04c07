"""How a recipe calls a reward function, of whichever kind."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import time
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

from hearth.errors import ConfigError
from training.config.named import find_named
from training.rewards.answers import answer_reward
from training.rewards.guard import GuardedReward, guarded
from training.rewards.score import RewardFunction, Score, ScoringReward, Unscored, as_score

T = TypeVar("T")

NOTE = "in reward_fn"
"""How the note begins that an error of a reward function has."""
MOST_NOTED = 300
"""Characters of a completion, and of a row, in such a note."""

AnyReward = RewardFunction | GuardedReward
"""A reward function, plain, async or guarded."""


async def scored(
    reward_fn: AnyReward, completions: Sequence[str], row: Mapping[str, Any], where: str = "a row"
) -> list[Score | Unscored]:
    """What each completion of a row earned, or why it earned nothing.

    A plain function is called for one after the other, here and now; calls that must be awaited
    are under way together. ``where`` is the row's name in the note of an error.

    Raises:
        WrongRewardError: an unguarded function returned no number.
        Exception: what an unguarded function raised. Either has a note of function, row and text.
    """
    calls = [_Call(reward_fn, completion, row, where) for completion in completions]
    begun = [(call, call.begin()) for call in calls]
    waiting = [_finish(call, outcome) for call, outcome in begun if inspect.isawaitable(outcome)]
    finished = iter(await gather_or_cancel(waiting) if waiting else ())
    return [
        next(finished) if inspect.isawaitable(outcome) else call.as_score(outcome)
        for call, outcome in begun
    ]


async def _finish(call: _Call, outcome: Awaitable[Any]) -> Score | Unscored:
    with call.timed():
        result = await outcome
    return call.as_score(result)


@dataclass
class _Call:
    """One call of a reward function, and the seconds that it has taken."""

    reward_fn: AnyReward
    completion: str
    row: Mapping[str, Any]
    where: str
    seconds: float = 0.0

    def begin(self) -> Any:
        """What the function returns: a number, a score, or what must be awaited for one."""
        with self.timed():
            return call_reward(self.reward_fn, self.completion, self.row)

    def as_score(self, outcome: Any) -> Score | Unscored:
        """What the call returned, as a score with its seconds."""
        with self.timed():
            known = outcome if isinstance(outcome, Unscored) else as_score(outcome)
        return replace(known, seconds=self.seconds)

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Count the body's time; an error of it gets a note of what was called for what."""
        began = time.perf_counter()
        try:
            yield
        except Exception as error:
            note_call(error, self.reward_fn, self.completion, self.row, self.where)
            raise
        finally:
            self.seconds += time.perf_counter() - began


def name_reward(reward_fn: object) -> str:
    """What a reward function is called: a function's own name, an object's type."""
    function = reward_fn.function if isinstance(reward_fn, GuardedReward) else reward_fn
    return getattr(function, "__name__", type(function).__name__)


def note_call(
    error: Exception, reward_fn: object, completion: str, row: Mapping[str, Any], where: str
) -> None:
    """Note on an error which reward function it came from, and what that was called for."""
    error.add_note(
        f"{NOTE} {name_reward(reward_fn)}, called for the completion {_shorten(completion)} and "
        f"{where}, {_shorten(dict(row))}"
    )


def is_of_reward(error: BaseException) -> bool:
    """Whether an error came out of a reward function."""
    return any(note.startswith(NOTE) for note in getattr(error, "__notes__", ()))


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MOST_NOTED else f"{text[:MOST_NOTED]} ..."


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


def find_reward(reward: str) -> AnyReward:
    """The reward function that ``MODULE:FUNCTION`` names.

    Raises:
        ConfigError: there is none.
    """
    found = find_named("reward", reward)
    if isinstance(found, type) and issubclass(found, ScoringReward):
        raise ConfigError(f"reward must be an object of the class, got {reward!r}: name one")
    return cast("AnyReward", found)


def choose_reward(config: SingleTurnConfig, reward_fn: AnyReward | None) -> AnyReward:
    """The reward function of a run, from the program or from ``config.reward``, guarded.

    Raises:
        ConfigError: both are given, or ``config.reward`` names none; or see ``guard_reward``.
    """
    if config.reward is None:
        return guard_reward(config, answer_reward if reward_fn is None else reward_fn)
    if reward_fn is not None:
        raise ConfigError(
            f"reward must be None where main gets a reward_fn, got {config.reward!r}: give one"
        )
    return guard_reward(config, find_reward(config.reward))


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
