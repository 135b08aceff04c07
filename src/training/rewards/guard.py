"""A reward function that may fail or hang, and what becomes of the completion then."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal, get_args

from hearth.errors import ConfigError
from training.rewards.cluster import RewardTasks
from training.rewards.errors import RewardTimeoutError, StuckRewardsError
from training.rewards.processes import RewardProcesses
from training.rewards.score import RewardFunction, Score, ScoringReward, Unscored, as_score
from training.rewards.timed_calls import TimedCalls

logger = logging.getLogger(__name__)

OnError = Literal["raise", "drop"]
Isolation = Literal["thread", "process", "ray"]


class GuardedReward:
    """A reward function with a time limit and a rule for its failures; made by ``guarded``."""

    def __init__(
        self,
        reward_fn: RewardFunction,
        *,
        timeout_s: float | None,
        on_error: OnError,
        isolation: Isolation,
        max_concurrent: int,
        max_stuck: int,
    ) -> None:
        self.function = reward_fn
        """The function that is guarded."""
        self.drops_failures = on_error == "drop"
        """Whether a completion whose reward fails is left out."""
        self.runs_on_cluster = isolation == "ray"
        """Whether calls are tasks of a Ray cluster."""
        self._call = reward_fn.score if isinstance(reward_fn, ScoringReward) else reward_fn
        self._timeout_s = timeout_s
        self._is_async = _is_async(reward_fn)
        self._threads = TimedCalls(max_concurrent, max_stuck)
        self._elsewhere: RewardProcesses | RewardTasks | None = None
        if isolation == "process":
            self._elsewhere = RewardProcesses(self._call)
        elif isolation == "ray":
            self._elsewhere = RewardTasks(self._call)
        self.failures: Counter[str] = Counter()
        """Calls that failed, by the type of their error."""

    async def __call__(self, completion: str, row: Mapping[str, Any]) -> float | None:
        """The reward; None where it failed and is to be dropped."""
        outcome = await self.score(completion, row)
        return outcome.reward if isinstance(outcome, Score) else None

    async def score(self, completion: str, row: Mapping[str, Any]) -> Score | Unscored:
        """The reward with what else is known, or the failure that is to be dropped.

        Raises:
            RewardTimeoutError: with ``on_error="raise"``, the function took too long.
            StuckRewardsError: in any case, when too many calls hang.
            Exception: with ``on_error="raise"``, what the function raised.
        """
        try:
            return as_score(await self._outcome(completion, row))
        except StuckRewardsError:
            raise
        except Exception as error:
            self.failures[type(error).__name__] += 1
            if not self.drops_failures:
                raise
            logger.warning("a completion is dropped: %s: %s", type(error).__name__, error)
            return Unscored(error)

    @property
    def stuck(self) -> int:
        """Calls that go on although nobody waits for them any more."""
        return self._threads.stuck

    def close(self) -> None:
        """End the processes; the next call starts new ones."""
        if self._elsewhere is not None:
            self._elsewhere.close()

    async def begin(self, completion: str, row: Mapping[str, Any]) -> Any:
        """What the function returns, within its time limit; of an async one the awaitable.

        Raises:
            Exception: what the function raised, whatever is done about it in ``score``.
        """
        timeout_s, elsewhere = self._timeout_s, self._elsewhere
        if elsewhere is not None and timeout_s is not None:
            # The thread only waits, and for no longer than its process may take.
            return await self._threads.call(
                lambda: elsewhere.call(completion, row, timeout_s), timeout_s=None
            )
        if self._is_async or timeout_s is None:
            return self._call(completion, row)
        return await self._threads.call(lambda: self._call(completion, row), timeout_s)

    async def _outcome(self, completion: str, row: Mapping[str, Any]) -> Any:
        outcome, timeout_s = await self.begin(completion, row), self._timeout_s
        if not inspect.isawaitable(outcome):
            return outcome
        limit = asyncio.timeout(timeout_s)
        try:
            async with limit:
                return await outcome
        except TimeoutError:
            if limit.expired() and timeout_s is not None:
                raise RewardTimeoutError(timeout_s) from None
            raise


def guarded(
    reward_fn: RewardFunction | GuardedReward,
    *,
    timeout_s: float | None = None,
    on_error: OnError = "raise",
    isolation: Isolation = "thread",
    max_concurrent: int = 8,
    max_stuck: int = 8,
) -> GuardedReward:
    """``reward_fn`` with at most ``timeout_s`` a call, awaited off the event loop.

    ``on_error="drop"``: a completion whose reward fails or is late is left out and counted; it
    never counts as 0. ``"raise"`` ends the run instead.

    A plain function runs on one of ``max_concurrent`` daemon threads; what holds the interpreter's
    lock (a C function without end) holds up everything, time limit or not. A thread cannot be
    stopped, so a call that hangs goes on: with ``max_stuck`` of them the next call is refused.
    ``isolation="process"`` runs a picklable function in processes that are killed instead; rows
    are pickled, a call costs about 0.1 ms more than on a thread, and what the function itself
    imports counts in a process's first call. ``isolation="ray"`` runs it in tasks of a Ray cluster,
    for functions that need many cores; the time limit counts from a task's begin. An async function
    runs on the event loop and is canceled, which works where it awaits. Without a time limit a
    plain function runs where it is called.

    Raises:
        ConfigError: an option breaks its rule, or the function cannot go to another process.
    """
    if isinstance(reward_fn, GuardedReward):
        raise ConfigError("reward_fn must not be guarded twice, got a guarded one")
    if on_error not in get_args(OnError):
        raise ConfigError(f"on_error must be one of {list(get_args(OnError))}, got {on_error!r}")
    if isolation not in get_args(Isolation):
        raise ConfigError(
            f"isolation must be one of {list(get_args(Isolation))}, got {isolation!r}"
        )
    if timeout_s is not None and not timeout_s > 0:
        raise ConfigError(f"timeout_s must be > 0 seconds or None, got {timeout_s}")
    if isolation != "thread" and timeout_s is None:
        raise ConfigError(f"timeout_s must be given with isolation={isolation!r}, got None")
    for name, count in (("max_concurrent", max_concurrent), ("max_stuck", max_stuck)):
        if count < 1:
            raise ConfigError(f"{name} must be >= 1, got {count}")
    return GuardedReward(
        reward_fn,
        timeout_s=timeout_s,
        on_error=on_error,
        isolation=isolation,
        max_concurrent=max_concurrent,
        max_stuck=max_stuck,
    )


def _is_async(reward_fn: RewardFunction) -> bool:
    # An object's type has its __call__, a function's a wrapper that is never async.
    return inspect.iscoroutinefunction(reward_fn) or inspect.iscoroutinefunction(
        type(reward_fn).__call__
    )
