"""Rollout functions that tests of ``async_rl_loop`` script, and a run of theirs as a command."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from training.data.rows import prompt_messages
from training.examples.rl.vanilla_sampler import build_deployment_sampler
from training.recipes import async_rl_loop
from training.run.command import run_command
from training.samples.groups import completion_sample
from training.samples.rollout import RolloutFn, RolloutFnFactory, RolloutSample, RolloutSetup

Before = Callable[[int, int], Awaitable[object]]


def spread(text: str, row: Mapping[str, Any]) -> float:
    """A reward that is hardly ever the same twice, so that no group is uniform."""
    return sum((place + 1) * ord(letter) for place, letter in enumerate(text)) % 1009 / 1009


def drawing(before: Before | None = None, **options: Any) -> RolloutFnFactory:
    """A factory of rollout functions that draw one completion and score it with ``spread``.

    ``before(row, number)`` is awaited first, with the row's place in the run and the number of the
    rollout in its group: to wait, to fail, or to drop the rollout by returning False. ``options``
    go to the sampler.
    """

    def make_rollout_fn(setup: RolloutSetup) -> RolloutFn:
        sampler = build_deployment_sampler(setup)
        asked = setup.sample_kwargs | options

        async def rollout_fn(
            row: dict[str, Any], *, cursor_index: int, sample_index: int
        ) -> RolloutSample | None:
            if before is not None and await before(cursor_index, sample_index) is False:
                return None
            (drawn,) = await sampler.sample_with_tokens(prompt_messages(row), n=1, **asked)
            return completion_sample(drawn, spread(drawn.text, row))

        return rollout_fn

    return make_rollout_fn


def command(arguments: Sequence[str]) -> int:
    """``async_rl_loop`` with plain rollouts; every field of its config is a flag."""

    def run(config: async_rl_loop.Config) -> None:
        async_rl_loop.main(config, rollout_fn_factory=drawing())

    return run_command(async_rl_loop.Config, run, arguments, program="async")
