"""Rewards of ``async_rl_loop`` are its rollouts' (T146)."""

from __future__ import annotations

import inspect
from statistics import fmean
from typing import Any

import pytest

from training.data.rows import prompt_messages
from training.examples.rl.vanilla_sampler import build_deployment_sampler
from training.recipes import async_rl_loop
from training.samples.rollout import RolloutFn, RolloutSample, RolloutSetup

GROUP = 4


def compute_reward(row: int, number: int) -> float:
    """Nothing that could be read from a text."""
    return (row + 1) * 0.125 + number * 0.5


def make_rollout_fn(setup: RolloutSetup) -> RolloutFn:
    sampler = build_deployment_sampler(setup)

    async def rollout_fn(
        row: dict[str, Any], *, cursor_index: int, sample_index: int
    ) -> RolloutSample:
        (completion,) = await sampler.sample_with_tokens(
            prompt_messages(row), n=1, **setup.sample_kwargs
        )
        assert completion.inference_logprobs is not None
        return RolloutSample(
            tokens=completion.full_tokens,
            logprobs=[0.0] * completion.prompt_len + completion.inference_logprobs,
            loss_mask=[0] * completion.prompt_len + [1] * completion.completion_len,
            reward=compute_reward(cursor_index, sample_index),
        )

    return rollout_fn


def test_t146_what_a_rollout_says_it_earned_is_what_is_trained(async_trial):
    earned: dict[int, list[float]] = {}

    def note(group: Any) -> bool:
        earned[group.row.index] = group.rewards
        return True

    run = async_trial(make=make_rollout_fn, accepts=note, max_rows=4)

    expected = {row: [compute_reward(row, number) for number in range(GROUP)] for row in range(4)}
    assert earned == expected
    means = [fmean(expected[row] + expected[row + 1]) for row in (0, 2)]
    assert [record["rollout/reward"] for record in run.records()] == pytest.approx(means)
    assert all(record["train/grad_norm"] > 0 for record in run.records())
    assert not [name for name in inspect.signature(async_rl_loop.main).parameters if "rew" in name]
