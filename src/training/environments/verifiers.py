"""Environments of verifiers 0.4 (``pip install 'hearth-rl[verifiers]'``): their own rollouts.

``verifiers:TASKSET``, an installed package or a module of the current folder. Their completions
come from a captured endpoint of the run, so that what is trained is what was sampled, token by
token. ``environment_args`` are those of verifiers' ``env`` block (``taskset``, ``agent``,
``timeout``, ...), and ``held_out``: the taskset's settings for held-out tasks. Without it every
fifth task is held out.

An agent runs in this process (``verifiers_chat``) unless ``agent`` names another harness.
"""

# Its library may want other versions than the tests' environment has (make test-environments).
# pyright: reportMissingImports=false

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.utils.loaders import load_environment, load_taskset, resolve_env_config

from hearth.errors import ConfigError
from training.config.named import see_current_folder
from training.data.rows import Row
from training.environments import verifiers_chat
from training.environments.tasks import EnvironmentTasks
from training.rewards.guard import GuardedReward
from training.rollouts.agents import AgentSession, build_agent_server
from training.rollouts.failures import (
    RECOVERABLE_STATUSES,
    DroppedRolloutError,
    RecoverableRolloutError,
)
from training.samples.rollout import RolloutFn, RolloutRun, RolloutSetup

HARNESS = "hearth_chat"
HOLD_OUT_EVERY = 5
"""One task in so many is held out where there is no taskset for that."""


def find_tasks(name: str, task: str, args: Mapping[str, Any]) -> VerifiersTasks:
    """The environment of that taskset.

    Raises:
        ConfigError: there is none, it does not take the arguments, or it has several agents.
    """
    see_current_folder()
    sys.modules.setdefault(HARNESS, verifiers_chat)
    try:
        return VerifiersTasks(name, task, args)
    except ConfigError:
        raise
    except Exception as error:  # of the library's own kinds, or whatever a taskset raises
        raise ConfigError(
            f"environment must be a taskset of verifiers made with {dict(args)!r}, got {name!r}: "
            f"{type(error).__name__}: {error}"
        ) from error


class VerifiersTasks(EnvironmentTasks):
    """The tasks of a taskset, by their places in it."""

    is_single_turn = False

    def __init__(self, name: str, task: str, args: Mapping[str, Any]) -> None:
        self.name = name
        options = dict(args)
        held_out = options.pop("held_out", None)
        self._shared = held_out is None
        self._settings = _env_settings(task, options)
        changes = {"taskset": {**self._settings["taskset"], **(held_out or {})}}
        self._held_out_settings = {**self._settings, **changes}
        config = resolve_env_config(dict(self._settings))
        agents = agent_config_fields(config)
        if len(agents) != 1:
            raise ConfigError(
                f"environment must have one agent, got {name!r} with {', '.join(agents)}: what "
                "several sample cannot be told apart"
            )
        load_environment(config)
        self._known: dict[tuple[bool, int], vf.Task] = {}

    def rows(self, count: int | None, *, held_out: bool = False, whole: bool = False) -> list[Row]:
        """As ``EnvironmentTasks.rows``; ``seed`` is the task's place in its taskset."""
        rows: list[Row] = []
        for place, task in islice(self._iterate(count, held_out), count):
            self._known[held_out, place] = task
            rows.append(self._row(place, task, held_out=held_out, whole=whole))
        if not rows:
            raise ConfigError(f"environment must have tasks, got none in {self.name!r}")
        return rows

    def _iterate(self, count: int | None, held_out: bool) -> Iterator[tuple[int, vf.Task]]:
        settings = self._held_out_settings if held_out else self._settings
        taskset = load_taskset(resolve_env_config(dict(settings)).taskset)
        if count is None and not taskset.bounded:
            raise ConfigError(
                f"max_rows must be given with environment={self.name!r}, got None: its tasks never "
                "end"
            )
        for place, task in enumerate(taskset):
            is_held_out = place % HOLD_OUT_EVERY == HOLD_OUT_EVERY - 1
            if not self._shared or is_held_out == held_out:
                yield place, task

    def _row(self, place: int, task: vf.Task, *, held_out: bool, whole: bool) -> Row:
        row = {"environment": self.name, "seed": place, "held_out": held_out, "task": task.key}
        if whole:
            truth = getattr(task.data, "answer", None)
            row |= {"messages": [{"role": "user", "content": task.data.prompt_text}]}
            row |= {"ground_truth": truth} if truth is not None else {}
        return row

    def make_rollout_fn(self, setup: RolloutSetup) -> RolloutFn:
        """Has verifiers roll out against a captured session."""
        agents = build_agent_server(setup)

        async def rollout_fn(row: dict[str, Any]) -> RolloutRun | None:
            task = self._find_task(row["seed"], held_out=row["held_out"])
            with agents.session() as session:
                trace = await self._roll_out(task, session, held_out=row["held_out"])
            parts = {name: part.value for name, part in trace.rewards.items() if part is not None}
            run = session.run(trace.reward, parts=parts or None)
            if run is not None:
                run.metadata = {"seed": row["seed"], "stop_condition": trace.stop_condition}
            return run

        return rollout_fn

    def _find_task(self, place: int, *, held_out: bool) -> vf.Task:
        if (held_out, place) not in self._known:  # in another process
            for known_place, task in self._iterate(place + 1, held_out):
                self._known[held_out, known_place] = task
                if known_place >= place:
                    break
        return self._known[held_out, place]

    async def _roll_out(self, task: vf.Task, session: AgentSession, *, held_out: bool) -> vf.Trace:
        """The one trace of an episode.

        Raises:
            RecoverableRolloutError: the deployment did not answer.
            DroppedRolloutError: the environment failed.
        """
        settings = self._held_out_settings if held_out else self._settings
        environment = load_environment(resolve_env_config(dict(settings)))
        # The library reads keys from the environment; programs do not inherit such names.
        variable = f"HEARTH_{secrets.token_hex(8)}_API_KEY"
        os.environ[variable] = session.api_key
        try:
            client = vf.EvalClientConfig(base_url=session.base_url, api_key_var=variable)
            async with environment.serving():
                episode = await environment.run_episode(task, vf.ModelContext("policy", client))
        finally:
            del os.environ[variable]
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok or len(episode.traces) != 1:
            error = errors[-1] if errors else None
            reason = f"{error.type}: {error.message}" if error else f"{len(episode.traces)} traces"
            status = error.status_code if error else None
            if status is not None and (status in RECOVERABLE_STATUSES or status >= 500):
                raise RecoverableRolloutError(f"verifiers got no completion: {reason}")
            raise DroppedRolloutError(f"verifiers must finish an episode, got {reason}")
        return episode.traces[0]

    def reward(self) -> GuardedReward:
        """None: an episode has its own."""
        raise NotImplementedError("episodes of verifiers are scored where they are rolled out")

    def try_row(self, row: Row) -> None:
        """Nothing: an episode needs a model."""


def _env_settings(task: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """verifiers' ``env`` block, with our harness on this machine where nothing else is said."""
    settings = dict(options)
    settings["taskset"] = {**settings.get("taskset", {}), "id": task}
    agent = dict(settings.get("agent", {}))
    agent.setdefault("harness", {"id": HARNESS})
    agent.setdefault("runtime", {"type": "subprocess"})
    settings["agent"] = agent
    return settings
