"""The learning rate of a step: by its place among the rows, whatever else happened."""

import math

import pytest

from hearth.errors import ConfigError
from training.recipes import rl_loop, sft_loop
from training.update.optimizer import StepPlace, scheduled_rate


def rate(step, first, end, total=100, **settings):
    config = sft_loop.Config(learning_rate=2.0, **settings)
    return scheduled_rate(config, StepPlace(step, first, end, total))


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", [2.0, 2.0, 2.0, 2.0]),
        ("linear", [2.0, 1.5, 1.0, 0.5]),
        ("cosine", [2.0, 1 + math.cos(math.pi / 4), 1.0, 1 + math.cos(3 * math.pi / 4)]),
    ],
)
def test_a_schedule_falls_with_the_share_of_the_rows_before_a_step(schedule, rates):
    found = [rate(9, first, first + 25, lr_schedule=schedule) for first in (0, 25, 50, 75)]

    assert found == pytest.approx(rates)


def test_a_warm_up_of_steps_counts_steps_and_one_below_1_the_rows():
    assert [rate(step, 0, 1, warmup_steps=4) for step in range(5)] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert [rate(0, end - 10, end, warmup_steps=0.4) for end in (10, 20, 30, 40, 50)] == (
        pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])
    )
    assert rate(0, 0, 10, warmup_steps=1) == 2.0


def test_a_warm_up_multiplies_the_schedule():
    assert rate(1, 50, 60, lr_schedule="linear", warmup_steps=4) == pytest.approx(2.0 * 0.5 * 0.5)


@pytest.mark.parametrize("config", [rl_loop.Config, sft_loop.Config])
def test_settings_of_the_rate_are_judged(config):
    with pytest.raises(ConfigError, match="lr_schedule must be one of"):
        config(base_model="m", lr_schedule="steps").validate()
    with pytest.raises(ConfigError, match=r"warmup_steps must be >= 0, got -1"):
        config(base_model="m", warmup_steps=-1).validate()
