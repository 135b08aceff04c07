"""The arithmetic of turn-level credit: golden numbers, invariances, and plain GRPO as its limit."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.errors import ConfigError
from training.samples.advantages import group_advantages
from training.samples.turn_advantages import (
    GAIN_FLOOR,
    belief,
    discount,
    information_gains,
    standardize,
    target_rows,
    turn_advantages,
    turn_spans,
)

GAINS = [[0.1, 0.3], [0.2, 0.0]]

NUMBERS = st.floats(-4, 4).map(lambda value: round(value, 3))
TRAJECTORIES = st.lists(
    st.tuples(st.lists(NUMBERS, min_size=1, max_size=5), NUMBERS), min_size=2, max_size=6
)


def near(expected: list[list[float]], tolerance: float = 1e-9) -> Any:
    return [pytest.approx(value, abs=tolerance) for value in expected]


# Golden numbers.


@pytest.mark.parametrize(
    ("normalization", "outcomes", "expected"),
    [
        ("separate", [1.0, 1.0], [[-1, 0], [1, 0]]),
        ("separate", [1.0, 0.0], [[-0.05, 1], [0.05, -1]]),
        ("pooled", [1.0, 1.0], [[0.777345, 2.341641], [-0.877345, -0.341641]]),
        ("pooled", [1.0, 0.0], [[1.895443, 3.073692], [-1.953178, -1.918991]]),
    ],
)
def test_t169_the_golden_advantages(normalization, outcomes, expected):
    found = turn_advantages(GAINS, outcomes, gamma=0.95, normalization=normalization)

    assert found == near(expected, 1e-6)


def test_t166_a_gain_is_the_difference_of_beliefs():
    assert information_gains([-3.0, -2.0, -2.5]) == [1.0, -0.5]


def test_the_probability_form_takes_the_geometric_mean_of_the_tokens_probabilities():
    logprobs = [math.log(0.5), math.log(0.125)]

    found = belief(sum(logprobs) / 2, "probability")

    assert found == pytest.approx(0.25)
    assert belief(-1.5, "logprob") == -1.5


# Plain GRPO.


@pytest.mark.slow
@given(TRAJECTORIES, st.floats(0, 1), st.sampled_from(["separate", "pooled"]))
def test_t167_without_weight_every_turn_has_the_advantage_of_plain_grpo(
    group, gamma, normalization
):
    gains, outcomes = [turns for turns, _ in group], [outcome for _, outcome in group]

    found = turn_advantages(
        gains, outcomes, ig_weight=0.0, gamma=gamma, normalization=normalization
    )

    plain = group_advantages(outcomes)
    assert found == [[value] * len(turns) for value, turns in zip(plain, gains, strict=True)]


def test_trajectories_of_one_turn_have_their_normalized_outcome_alone():
    found = turn_advantages([[3.0], [-7.0], [1.0]], [1.0, 0.0, 0.5])

    assert found == near(
        [[advantage] for advantage in group_advantages([1.0, 0.0, 0.5], std="population")]
    )


# Properties.


@pytest.mark.slow
@given(TRAJECTORIES, NUMBERS, NUMBERS)
def test_neither_a_shift_of_all_gains_nor_one_of_all_outcomes_changes_anything(group, gain, earned):
    gains, outcomes = [turns for turns, _ in group], [outcome for _, outcome in group]

    shifted = turn_advantages(
        [[turn + gain for turn in turns] for turns in gains],
        [outcome + earned for outcome in outcomes],
    )

    assert shifted == near(turn_advantages(gains, outcomes), 1e-6)


@pytest.mark.slow
@given(TRAJECTORIES, st.floats(0, 1))
def test_what_a_turn_is_worth_by_itself_is_its_advantage_less_the_discounted_next(group, gamma):
    gains, outcomes = [turns for turns, _ in group], [outcome for _, outcome in group]

    found = turn_advantages(gains, outcomes, gamma=gamma)

    alone = turn_advantages(gains, outcomes, gamma=0.0)
    for turns, rewards in zip(found, alone, strict=True):
        left = [turn - gamma * after for turn, after in zip(turns, [*turns[1:], 0.0], strict=True)]
        assert left == pytest.approx(rewards, abs=1e-9)


@pytest.mark.slow
@given(TRAJECTORIES)
def test_the_last_turns_gain_counts_for_nothing_where_gains_are_separate(group):
    gains, outcomes = [turns for turns, _ in group], [outcome for _, outcome in group]

    found = turn_advantages([[*turns[:-1], 99.0] for turns in gains], outcomes)

    assert found == turn_advantages(gains, outcomes)


@pytest.mark.slow
@given(TRAJECTORIES)
def test_normalized_gains_have_mean_0_and_population_variance_1_over_the_turns_there_are(group):
    gains, outcomes = [turns for turns, _ in group], [0.0 for _ in group]

    found = turn_advantages(gains, outcomes, gamma=0.0)

    inner = [turn for turns in found for turn in turns[:-1]]
    assert [turns[-1] for turns in found] == [0.0] * len(group)
    if any(inner):
        assert math.fsum(inner) / len(inner) == pytest.approx(0, abs=1e-9)
        assert math.fsum(value * value for value in inner) / len(inner) == pytest.approx(1)


def test_the_weight_scales_gains_after_their_normalization_and_leaves_the_outcome():
    light = turn_advantages(GAINS, [1.0, 0.0], gamma=0.0, ig_weight=0.25)

    assert light == near([[-0.25, 1.0], [0.25, -1.0]])


def test_equal_outcomes_leave_the_gains_to_tell_trajectories_apart():
    found = turn_advantages([[0.0, 0.0], [2.0, 0.0], [1.0, 0.0]], [0.0, 0.0, 0.0])

    assert [turns[0] for turns in found] == pytest.approx([-math.sqrt(1.5), math.sqrt(1.5), 0.0])
    assert [turns[1] for turns in found] == [0.0, 0.0, 0.0]


def test_gains_that_differ_by_rounding_alone_are_equal():
    found = turn_advantages([[GAIN_FLOOR / 9, 0.0], [0.0, 0.0]], [1.0, 1.0])

    assert found == [[0.0, 0.0], [0.0, 0.0]]


def test_one_gain_alone_in_its_group_has_nothing_to_be_compared_with():
    found = turn_advantages([[5.0, 0.0], [0.0]], [1.0, 1.0])

    assert found == [[0.0, 0.0], [0.0]]


def test_a_later_reward_is_discounted_once_per_turn():
    assert discount([1.0, 10.0, 100.0], 0.5) == [31.0, 60.0, 100.0]
    assert discount([1.0, 10.0, 100.0], 1.0) == [111.0, 110.0, 100.0]
    assert discount([], 0.5) == []


def test_a_uniform_list_has_no_spread_whatever_rounding_says():
    assert standardize([0.3] * 7, 1e-8) == [0.0] * 7


# Beliefs that could not be had.


@pytest.mark.parametrize(
    ("beliefs", "gains"),
    [
        ([-3.0, None, -1.0], [0.0, 2.0]),
        ([-3.0, -2.0, None, None], [1.0, 0.0, 0.0]),
        ([None, -2.0, -1.0], [0.0, 1.0]),
        ([None, None], [0.0]),
        ([-3.0], []),
        ([], []),
    ],
)
def test_a_turn_whose_belief_is_not_known_gains_nothing_and_the_next_from_the_last_known(
    beliefs, gains
):
    assert information_gains(beliefs) == gains


# Turns and tokens.


def test_a_turn_is_a_stretch_of_ones():
    assert turn_spans([0, 0, 1, 1, 0, 1, 0, 0, 1]) == [(2, 4), (5, 6), (8, 9)]
    assert turn_spans([0, 0]) == []


@pytest.mark.slow
@given(st.lists(st.integers(0, 1), min_size=1, max_size=20))
def test_turns_cover_what_was_sampled_and_nothing_else(mask):
    mask = [0, *mask]

    covered = [place for start, end in turn_spans(mask) for place in range(start, end)]

    assert covered == [place for place, live in enumerate(mask) if live]


def test_a_turns_value_stands_on_the_rows_of_its_tokens():
    """Row t is about token t + 1: tokens 2 and 3 are rows 1 and 2."""
    assert target_rows([0, 0, 1, 1, 0, 1], [0.5, -2.0]) == [0.0, 0.5, 0.5, 0.0, -2.0]


# What is refused.


@pytest.mark.parametrize(
    ("gains", "outcomes", "normalization", "message"),
    [
        ([[1.0]], [1.0], "separate", "outcomes must hold at least 2"),
        ([[1.0], [1.0]], [1.0, 2.0, 3.0], "separate", "gains a list for each"),
        ([[1.0], []], [1.0, 2.0], "separate", r"gains\[1\] must have a number per turn"),
        ([[1.0], [math.nan]], [1.0, 2.0], "separate", r"gains\[1\] and its outcome must be finite"),
        ([[1.0], [1.0]], [1.0, math.inf], "separate", r"gains\[1\] and its outcome must be finite"),
        ([[1.0], [1.0]], [1.0, 2.0], "joint", "normalization must be one of"),
    ],
)
def test_what_no_advantage_can_be_had_of_is_refused(gains, outcomes, normalization, message):
    with pytest.raises(ConfigError, match=message):
        turn_advantages(gains, outcomes, normalization=normalization)
