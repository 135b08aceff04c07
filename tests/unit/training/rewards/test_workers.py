"""Where a recipe's reward function runs, by its setting's new name and by its older one."""

import logging
from typing import Any

import pytest

from hearth.errors import ConfigError
from training.recipes.rl_loop import Config
from training.rewards import GuardedReward, guard_reward
from training.utils import DeployConfig


def config_of(**changes: Any) -> Config:
    return Config(deployment=DeployConfig(tokenizer_model="x"), kl_beta=0.0, **changes)


def length(text: str, row: Any) -> float:
    return float(len(text))


def test_without_a_limit_and_a_rule_for_failures_a_reward_function_stays_as_it_is():
    assert guard_reward(config_of(), length) is length


@pytest.mark.parametrize("name", ["reward_workers", "rollout_workers"])
def test_the_older_name_is_read_and_one_line_says_the_new_one(name, caplog):
    config = config_of(**{name: "process", "reward_timeout_s": 9.0})
    config.validate()

    with caplog.at_level(logging.WARNING):
        reward_fn = guard_reward(config, length)

    assert isinstance(reward_fn, GuardedReward)
    assert reward_fn._elsewhere is not None
    lines = [record.getMessage() for record in caplog.records]
    older = "rollout_workers is now called reward_workers, got 'process'"
    assert lines == [older] * (name == "rollout_workers")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"reward_workers": "process"}, "reward_timeout_s must be given with reward_workers='process'"),
    ({"rollout_workers": "ray"}, "reward_timeout_s must be given with reward_workers='ray'"),
    ({"reward_workers": "x"}, "reward_workers must be one of .*, got 'x'"),
    (
        {"reward_workers": "ray", "rollout_workers": "process", "reward_timeout_s": 1.0},
        "reward_workers and rollout_workers must agree, got 'ray' and 'process'",
    ),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[str(c) for c, _ in REFUSED])
def test_settings_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        config_of(**changes).validate()
