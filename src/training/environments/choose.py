"""What a recipe trains on: the rows and what scores them, or an environment for both."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hearth.errors import ConfigError
from training.config.async_recipe import AsyncConfig
from training.config.rl import RLConfig
from training.config.single_turn import SingleTurnConfig
from training.data.given_rows import choose_eval_rows, choose_rows
from training.data.rows import Row
from training.environments.find import find_environment
from training.environments.protocol import Environment
from training.environments.tasks import EnvironmentTasks
from training.rewards import AnyReward, check_reward, choose_reward
from training.rollouts.setup import choose_rollout
from training.samples.rollout import RolloutFnFactory

logger = logging.getLogger(__name__)

GivenEnvironment = Callable[..., Environment]
"""An ``Environment``'s class, or a function that makes one."""


@dataclass(frozen=True)
class Given:
    """What a program gives ``main`` in place of settings; None is not given."""

    environment: GivenEnvironment | None = None
    rows: Sequence[Row] | None = None
    eval_rows: Sequence[Row] | None = None


def choose_scored_rows(
    config: SingleTurnConfig, given: Given, reward_fn: AnyReward | None
) -> tuple[Sequence[Row], Sequence[Row], AnyReward]:
    """The rows, the held-out rows, and the reward function of their answers.

    Raises:
        ConfigError: there are none, one breaks its rule, or the environment has several turns.
    """
    tasks = choose_environment(config, given)
    if tasks is None:
        rows = choose_rows(config, given.rows, needs_messages=True)
        eval_rows = choose_eval_rows(config, given.eval_rows, needs_messages=True)
        reward_fn = choose_reward(config, reward_fn)
        check_reward(config, reward_fn, rows, eval_rows)
        return rows, eval_rows, reward_fn
    _refuse_beside(tasks, reward=config.reward, reward_fn=reward_fn)
    if not tasks.is_single_turn:
        raise ConfigError(
            f"environment must be of one turn without tools in this recipe, got {tasks.name!r}: "
            "async_rl_loop (hearth train async) trains on several turns, on-policy too"
        )
    rows, eval_rows = _make_rows(config, tasks, whole=True)
    if config.try_reward:
        tasks.try_row(rows[0])
    return rows, eval_rows, tasks.reward()


def choose_rolled_out_rows(
    config: AsyncConfig,
    given: Given,
    rollout_fn_factory: RolloutFnFactory | None,
    *,
    needs_truth: bool = False,
) -> tuple[Sequence[Row], Sequence[Row], RolloutFnFactory]:
    """The rows, the held-out rows, and the factory of their rollout function.

    With ``needs_truth`` an environment's rows have their right answers, where it knows them.

    Raises:
        ConfigError: there are none, or one breaks its rule.
    """
    tasks = choose_environment(config, given)
    if tasks is None:
        factory = choose_rollout(config, rollout_fn_factory)
        return choose_rows(config, given.rows), choose_eval_rows(config, given.eval_rows), factory
    _refuse_beside(tasks, rollout=config.rollout, rollout_fn_factory=rollout_fn_factory)
    rows, eval_rows = _make_rows(config, tasks, whole=needs_truth or tasks.is_single_turn)
    tasks.try_row(rows[0])
    return rows, eval_rows, tasks.make_rollout_fn


def choose_environment(config: RLConfig, given: Given) -> EnvironmentTasks | None:
    """The tasks of the environment that the program or the config names; None where neither does.

    Raises:
        ConfigError: both do, or there is no such environment, or there are rows beside it.
    """
    if given.environment is not None and config.environment is not None:
        raise ConfigError(
            f"environment must be None where main gets one, got {config.environment!r}: give one"
        )
    environment = config.environment if given.environment is None else given.environment
    args: Any = config.environment_args
    if environment is None:
        if args:
            raise ConfigError(f"environment must be given with environment_args, got only {args!r}")
        return None
    if not isinstance(args, Mapping):
        raise ConfigError(f"environment_args must be a JSON object, got {args!r}")
    tasks = find_environment(environment, args)
    usual = type(config)().dataset
    _refuse_beside(
        tasks,
        dataset=None if config.dataset == usual else config.dataset,
        eval_dataset=config.eval_dataset,
        columns=config.columns or None,
        rows=given.rows,
        eval_rows=given.eval_rows,
    )
    return tasks


def _refuse_beside(tasks: EnvironmentTasks, **others: object) -> None:
    named = [name for name, value in others.items() if value is not None]
    if named:
        raise ConfigError(
            f"{' and '.join(named)} must not be given with environment={tasks.name!r}: it has its "
            "own rows and rewards"
        )


def _make_rows(
    config: RLConfig, tasks: EnvironmentTasks, *, whole: bool
) -> tuple[list[Row], list[Row]]:
    rows = tasks.rows(config.max_rows, whole=whole)
    eval_rows = tasks.rows(config.eval_rows, held_out=True, whole=whole) if config.eval_rows else []
    known = {json.dumps(row["messages"]) for row in rows if "messages" in row}
    same = sum(json.dumps(row["messages"]) in known for row in eval_rows if "messages" in row)
    if same:
        logger.warning(
            "%d of %d held-out tasks are trained on too: %s has few tasks with these arguments",
            same,
            len(eval_rows),
            tasks.name,
        )
    return rows, eval_rows
