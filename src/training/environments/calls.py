"""Calls of an environment, each with its time limit and off the event loop unless it is async."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable
from typing import Any

from training.environments.protocol import Environment, read_observation
from training.rewards.errors import RewardTimeoutError, StuckRewardsError
from training.rewards.timed_calls import TimedCalls
from training.rollouts.failures import DroppedRolloutError

MOST_AT_ONCE = 32
"""Calls of plain functions at once, a thread each."""
MOST_STUCK = 256
"""Calls that may go on after their time; their threads cannot be stopped."""


class EnvironmentCalls:
    """Makes the calls of many episodes, within ``timeout_s`` each.

    Their errors are those of a dropped rollout.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._threads = TimedCalls(MOST_AT_ONCE, MOST_STUCK)

    async def begin(
        self, make: Callable[[], Environment], seed: int
    ) -> tuple[Environment, list[dict[str, Any]]]:
        """A new environment, and what the policy is told first; one that fails is closed.

        Raises:
            DroppedRolloutError: either failed or took too long, or what is told is no message.
        """
        made: list[Environment] = []

        def reset() -> Any:
            made.append(make())
            is_async = inspect.iscoroutinefunction(made[0].reset)
            return None if is_async else made[0].reset(seed)

        try:
            told = await self.call(reset)
            if inspect.iscoroutinefunction(made[0].reset):
                told = await self.call(made[0].reset, seed)
            return made[0], read_observation(told, "reset")
        except BaseException:
            if made:
                await self.close(made[0])
            raise

    async def call(self, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """What a function of the environment returns.

        Raises:
            DroppedRolloutError: it raised, and that is the cause; or it took too long.
        """
        name = getattr(function, "__name__", type(function).__name__)
        late = DroppedRolloutError(f"{name} must return within {self._timeout_s:g} s, got nothing")
        if inspect.iscoroutinefunction(function):
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await _contain(name, function(*args, **named))
            except TimeoutError:  # its own are contained
                raise late from None
        try:
            return await self._threads.call(
                lambda: _contain_plain(name, function, *args, **named), self._timeout_s
            )
        except RewardTimeoutError:
            raise late from None
        except StuckRewardsError:
            raise DroppedRolloutError(
                f"{name} must return in the end, got {self._threads.stuck} calls that go on after "
                "their time: give what it waits for a time limit, or make it async"
            ) from None

    async def close(self, environment: Environment) -> None:
        """Close the environment; one that does not close is left to itself."""
        if type(environment).close is not Environment.close:
            with contextlib.suppress(DroppedRolloutError):
                await self.call(environment.close)


async def _contain(name: str, work: Any) -> Any:
    try:
        return await work
    except (asyncio.CancelledError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise failure(name, error) from error


def _contain_plain(name: str, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
    try:
        return function(*args, **named)
    except BaseException as error:  # on a thread of its own a cancellation is none of ours
        raise failure(name, error) from error


def failure(name: str, error: BaseException) -> DroppedRolloutError:
    """The error of a rollout whose environment has raised one."""
    return DroppedRolloutError(f"{name} raised {type(error).__name__}: {error}")
