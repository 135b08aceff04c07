"""Rollout functions that tests of ``async_rl_loop`` script, and a run of theirs as a command."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from hearth.sdk import SampledCompletion
from training.data.rows import prompt_messages
from training.examples.rl.vanilla_sampler import build_deployment_sampler
from training.recipes import async_rl_loop
from training.run.command import run_command
from training.samples.groups import completion_sample
from training.samples.rollout import (
    RolloutFn,
    RolloutFnFactory,
    RolloutResult,
    RolloutSample,
    RolloutSetup,
)

Before = Callable[[int, int], Awaitable[object]]


def spread(text: str, row: Mapping[str, Any]) -> float:
    """A reward that is hardly ever the same twice, so that no group is uniform."""
    return sum((place + 1) * ord(letter) for place, letter in enumerate(text)) % 1009 / 1009


def make_rollouts(
    before: Before | None = None,
    *,
    reward: Callable[[str, Mapping[str, Any]], float] = spread,
    finish: Callable[[RolloutSample, SampledCompletion], RolloutResult] = lambda sample, _: sample,
    messages: Callable[[dict[str, Any]], list[Any]] = prompt_messages,
    **options: Any,
) -> RolloutFnFactory:
    """A factory of rollout functions that sample one completion and score it with ``reward``.

    ``before(row, number)`` is awaited first, with the row's place in the run and the number of the
    rollout in its group: to wait, to fail, or to drop the rollout by returning False. ``finish``
    makes of the sample what the function returns. ``options`` go to the sampler.
    """

    def make_rollout_fn(setup: RolloutSetup) -> RolloutFn:
        sampler = build_deployment_sampler(setup)
        fields = setup.sample_kwargs | options

        async def rollout_fn(
            row: dict[str, Any], *, cursor_index: int, sample_index: int
        ) -> RolloutResult:
            if before is not None and await before(cursor_index, sample_index) is False:
                return None
            (completion,) = await sampler.sample_with_tokens(messages(row), n=1, **fields)
            sample = completion_sample(completion, reward(completion.text, row))
            return finish(sample, completion)

        return rollout_fn

    return make_rollout_fn


def make_two_turns(
    reward: Callable[[str, Mapping[str, Any]], float] = spread,
    *,
    max_tokens: int = 4,
    result: Sequence[int] = (40, 41, 9),
) -> RolloutFnFactory:
    """A factory of agents that sample, hear the ``result`` of a tool, and sample again."""

    def make_rollout_fn(setup: RolloutSetup) -> RolloutFn:
        sampler = build_deployment_sampler(setup)
        fields = setup.sample_kwargs | {"max_tokens": max_tokens, "ignore_eos": True}

        async def rollout_fn(row: dict[str, Any]) -> RolloutSample:
            (first,) = await sampler.sample_with_tokens(prompt_messages(row), n=1, **fields)
            heard = [*first.full_tokens, *result]
            (second,) = await sampler.sample_with_prompt_tokens(heard, n=1, **fields)
            assert first.inference_logprobs is not None
            assert second.inference_logprobs is not None
            prompt, between = [0] * first.prompt_len, [0] * len(result)
            parts = [prompt, first.inference_logprobs, between, second.inference_logprobs]
            return RolloutSample(
                tokens=second.full_tokens,
                logprobs=[float(value) for part in parts for value in part],
                loss_mask=[*prompt, *[1] * max_tokens, *between, *[1] * max_tokens],
                reward=reward(first.text + second.text, row),
                finish_reason=second.finish_reason,
            )

        return rollout_fn

    return make_rollout_fn


def command(arguments: Sequence[str]) -> int:
    """``async_rl_loop`` with plain rollouts; every field of its config is a flag."""

    def run(config: async_rl_loop.Config) -> None:
        async_rl_loop.main(config, rollout_fn_factory=make_rollouts())

    return run_command(async_rl_loop.Config(), run, arguments, program="async")
