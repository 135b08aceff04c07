"""An environment as a recipe uses it: rows to train on, and what is sampled and scored for one."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from hearth.errors import ConfigError
from training.data.rows import Row
from training.environments.calls import EnvironmentCalls
from training.environments.episodes import (
    MakeEnvironment,
    episode_rollouts,
    is_single_turn,
    take_step,
)
from training.environments.protocol import HELD_OUT, Environment
from training.environments.tools import tool_schemas
from training.rewards.check import MADE_UP
from training.rewards.guard import GuardedReward, guarded
from training.rewards.score import Score
from training.rollouts.failures import DroppedRolloutError
from training.samples.rollout import RolloutFn, RolloutSetup

logger = logging.getLogger(__name__)


class EnvironmentTasks(ABC):
    """The tasks of an environment. ``name`` is what a setting calls it."""

    name: str
    is_single_turn: bool
    """Whether each task is its messages and one answer, which ``reward`` scores."""

    @abstractmethod
    def rows(self, count: int | None, *, held_out: bool = False, whole: bool = False) -> list[Row]:
        """``count`` rows, or all; held-out ones share none with the others.

        With ``whole`` each row has its ``messages`` and, where it is known, its ``ground_truth``.

        Raises:
            ConfigError: there are none, or the first cannot be made.
        """

    @abstractmethod
    def make_rollout_fn(self, setup: RolloutSetup) -> RolloutFn:
        """The rollout function of its rows."""

    @abstractmethod
    def reward(self) -> GuardedReward:
        """What scores an answer to a whole row, where the tasks are of one turn."""

    @abstractmethod
    def try_row(self, row: Row) -> None:
        """Take one step with a made-up answer, to find mistakes before anything is started.

        Raises:
            ConfigError: that fails.
        """


class EpisodeTasks(EnvironmentTasks):
    """The tasks of an ``Environment``, one for each seed.

    Raises:
        ConfigError: ``make`` makes none, or one of its attributes breaks its rule.
    """

    def __init__(self, name: str, make: MakeEnvironment) -> None:
        self.name = name
        self.make = make
        """Makes one episode's environment."""
        sample = make()
        if not isinstance(sample, Environment):
            raise ConfigError(
                f"environment must make a training.environments.Environment, got {name!r}, which "
                f"makes a {type(sample).__name__}"
            )
        if not (isinstance(sample.max_turns, int) and sample.max_turns >= 1):
            raise ConfigError(f"max_turns of {name!r} must be >= 1, got {sample.max_turns!r}")
        if not sample.timeout_s > 0:
            raise ConfigError(f"timeout_s of {name!r} must be > 0, got {sample.timeout_s!r}")
        tool_schemas(sample.tools)
        self._timeout_s = sample.timeout_s
        self.is_single_turn = is_single_turn(sample)

    def rows(self, count: int | None, *, held_out: bool = False, whole: bool = False) -> list[Row]:
        """As ``EnvironmentTasks.rows``; a task that cannot be reset is left out of whole rows."""
        if count is None:
            raise ConfigError(
                f"max_rows must be given with environment={self.name!r}, got None: it has a task "
                "for every number; say how many to train on"
            )
        first = HELD_OUT if held_out else 0
        seeds = range(first, first + count)
        if not whole:
            return [{"environment": self.name, "seed": seed} for seed in seeds]
        return asyncio.run(self._make_rows(seeds))

    async def _make_rows(self, seeds: range) -> list[Row]:
        rows: list[Row] = []
        calls = EnvironmentCalls(self._timeout_s)
        for seed in seeds:
            try:
                environment, messages = await calls.begin(self.make, seed)
            except DroppedRolloutError as error:
                if not rows:
                    raise self._failure(seed, error) from error
                logger.warning("task %d of %s is left out: %s", seed, self.name, error)
                continue
            row = {"environment": self.name, "seed": seed, "messages": messages}
            if environment.ground_truth is not None:
                row["ground_truth"] = environment.ground_truth
            await calls.close(environment)
            rows.append(row)
        return rows

    def make_rollout_fn(self, setup: RolloutSetup) -> RolloutFn:
        """Plays episodes."""
        return episode_rollouts(self.make, self._timeout_s, setup)

    def reward(self) -> GuardedReward:
        """The first step after an answer; what fails is dropped."""
        return guarded(EpisodeReward(self.make, self._timeout_s), on_error="drop")

    def try_row(self, row: Row) -> None:
        """Play the row's episode up to its first step."""
        try:
            asyncio.run(self._try_seed(row["seed"]))
        except DroppedRolloutError as error:
            raise self._failure(row["seed"], error) from error.__cause__

    async def _try_seed(self, seed: int) -> None:
        calls = EnvironmentCalls(self._timeout_s)
        environment, _ = await calls.begin(self.make, seed)
        try:
            await take_step(calls, environment, MADE_UP)
        finally:
            await calls.close(environment)

    def _failure(self, seed: int, error: Exception) -> ConfigError:
        return ConfigError(
            f"environment must work on its first task, got {self.name!r} with seed {seed}: {error}"
        )


class EpisodeReward:
    """A reward function: what an answer earns in a new episode of its row."""

    def __init__(self, make: MakeEnvironment, timeout_s: float) -> None:
        self._make = make
        self._calls = EnvironmentCalls(timeout_s)

    async def __call__(self, completion: str, row: Mapping[str, Any]) -> Score:
        """The score of the first step.

        Raises:
            DroppedRolloutError: the environment fails, or gives another task than before.
        """
        environment, told = await self._calls.begin(self._make, row["seed"])
        try:
            if told != row["messages"]:
                raise DroppedRolloutError(
                    "reset must give the same task for the same seed, got another for "
                    f"{row['seed']}"
                )
            step = await take_step(self._calls, environment, completion)
        finally:
            await self._calls.close(environment)
        return Score(float(step.reward), parsed=step.parsed, parts=step.parts)
