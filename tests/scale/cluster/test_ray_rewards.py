"""Reward functions as tasks of a cluster: their scores, their failures, their time limits."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from tests.integration.conftest import config
from tests.scale.cluster.clusters import Nodes
from tests.scale.cluster.scores import length

from hearth.errors import ConfigError
from hearth.launch.ray.cluster import connect
from training.rewards import (
    RewardDiedError,
    RewardTimeoutError,
    Score,
    Unscored,
    guard_reward,
    guarded,
    scored,
)


@pytest.fixture(scope="module")
def connected(nodes: Nodes) -> Iterator[None]:
    """One job of the cluster, whose processes score for all tests."""
    nodes.become(1, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", nodes.address)
        assert connect("test")
        yield
        ray.shutdown()


def outcomes(reward: Any, *completions: str) -> list[Score | Unscored]:
    return asyncio.run(scored(reward, completions, {"most": 10}))


def test_rewards_are_called_on_the_cluster(connected):
    here = os.getpid()
    reward = guarded(lambda text, row: float(os.getpid() != here), timeout_s=60, isolation="ray")
    assert outcomes(reward, "a", "b", "c") == [Score(1.0)] * 3
    assert outcomes(guarded(length, timeout_s=60, isolation="ray"), "four") == [
        Score(0.4, None, True)
    ]


@pytest.mark.parametrize(
    ("completion", "timeout_s", "kind", "message"),
    [
        ("raise", 60.0, ValueError, "no such answer"),
        ("hang", 0.5, RewardTimeoutError, "within 0.5 s"),
        ("die", 60.0, RewardDiedError, "reward_fn's process must live"),
    ],
)
def test_a_call_that_fails_is_dropped_or_raised(connected, completion, timeout_s, kind, message):
    dropping = guarded(length, timeout_s=timeout_s, isolation="ray", on_error="drop")
    (failed,) = outcomes(dropping, completion)
    assert isinstance(failed, Unscored)
    assert isinstance(failed.error, kind)
    with pytest.raises(kind, match=message):
        outcomes(guarded(length, timeout_s=timeout_s, isolation="ray"), completion)


def test_a_recipe_says_where_its_rewards_run(tmp_path):
    fields = config(tmp_path, reward_workers="ray")
    with pytest.raises(ConfigError, match="reward_timeout_s must be given with reward_workers"):
        fields.validate()
    fields = config(tmp_path, reward_workers="somewhere")
    with pytest.raises(ConfigError, match="reward_workers must be one of"):
        fields.validate()


def test_a_recipes_rewards_run_there(connected, tmp_path):
    here = os.getpid()
    fields = config(tmp_path, reward_workers="ray", reward_timeout_s=60.0)
    reward = guard_reward(fields, lambda text, row: float(os.getpid() != here))
    assert outcomes(reward, "a") == [Score(1.0)]
