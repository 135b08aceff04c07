import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hearth.errors import ConfigError
from training.samples.advantages import batch_advantages, group_advantages, is_uniform, usable_group

REWARDS = st.lists(st.integers(min_value=-50, max_value=50), min_size=2, max_size=12)
quickly = settings(max_examples=60, deadline=None, derandomize=True)


@pytest.mark.parametrize("count", range(2, 17))
@pytest.mark.parametrize("reward", [0.1, 0.3, 0.6, 0.7, 0.9, 1 / 3, 1e-9, -1e12])
def test_a_uniform_group_has_exactly_no_advantage(reward, count):
    assert group_advantages([reward] * count) == [0.0] * count
    assert group_advantages([reward] * count, std="population") == [0.0] * count


@pytest.mark.slow
@quickly
@given(
    rewards=REWARDS,
    scale=st.floats(min_value=0.01, max_value=100),
    shift=st.floats(min_value=-100, max_value=100),
)
def test_shifting_and_scaling_rewards_changes_nothing(rewards, scale, shift):
    moved = [scale * reward + shift for reward in rewards]
    assert group_advantages(moved) == pytest.approx(group_advantages(rewards), abs=1e-9)


@pytest.mark.slow
@quickly
@given(rewards=REWARDS)
def test_advantages_have_mean_zero_and_sample_std_one(rewards):
    advantages = group_advantages(rewards)

    assert math.fsum(advantages) == pytest.approx(0, abs=1e-9)
    squares = math.fsum(advantage**2 for advantage in advantages) / (len(rewards) - 1)
    assert squares == pytest.approx(0.0 if is_uniform(rewards) else 1.0)


def test_the_population_std_is_a_named_option():
    expected = [1.7320508, -0.5773503, -0.5773503, -0.5773503]
    assert group_advantages([1, 0, 0, 0], std="population") == pytest.approx(expected)
    expected = [-1.34164079, -0.44721360, 0.44721360, 1.34164079]
    assert group_advantages([1, 2, 3, 4], std="population") == pytest.approx(expected)


def test_a_spread_below_the_floor_is_divided_by_the_floor():
    assert group_advantages([0.0, 2e-10]) == pytest.approx([-0.01, 0.01])


def test_scopes_differ_on_groups_of_different_difficulty():
    groups = [[1, 0, 1, 0], [0, 0, 0, 1]]

    grouped = batch_advantages(groups)
    pooled = batch_advantages(groups, scope="batch")

    assert grouped == [group_advantages(group) for group in groups]
    assert pooled[0] == pytest.approx([1.2076148, -0.7245688, 1.2076148, -0.7245688])
    assert pooled[1] == pytest.approx([-0.7245688, -0.7245688, -0.7245688, 1.2076148])


def test_a_pooled_uniform_group_keeps_a_signal_that_a_group_does_not_have():
    assert batch_advantages([[1, 1], [0, 0]]) == [[0.0, 0.0], [0.0, 0.0]]
    pooled = batch_advantages([[1, 1], [0, 0]], scope="batch")
    assert pooled == [pytest.approx([0.8660254] * 2), pytest.approx([-0.8660254] * 2)]


@pytest.mark.parametrize(
    ("rewards", "reason", "message"),
    [
        ([], "too_few", "at least 2 values, got 0"),
        ([5.0], "too_few", "at least 2 values, got 1"),
        ([0.0, math.nan], "non_finite", r"rewards\[1\] must be finite, got nan"),
        ([math.inf, 0.0, 1.0], "non_finite", r"rewards\[0\] must be finite, got inf"),
    ],
)
def test_an_unusable_group_is_an_error_or_a_named_reason(rewards, reason, message):
    assert usable_group(rewards) == reason
    with pytest.raises(ConfigError, match=message):
        group_advantages(rewards)


def test_a_usable_group_has_no_reason():
    assert usable_group([1.0, 0.0]) is None
    assert usable_group([1.0, 1.0]) is None


def test_unknown_options_are_refused():
    with pytest.raises(ConfigError, match=r"std must be one of \['sample', 'population'\]"):
        group_advantages([1, 0], std="median")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"scope must be one of \['group', 'batch'\]"):
        batch_advantages([[1, 0]], scope="epoch")  # pyright: ignore[reportArgumentType]
