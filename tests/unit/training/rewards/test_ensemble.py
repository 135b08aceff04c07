import math
import statistics

import pytest

from hearth.errors import ConfigError
from training.rewards import RewardEnsemble, Score, answer_reward, tags_reward


def giving(*rewards: float) -> list:
    return [lambda completion, row, reward=reward: reward for reward in rewards]


@pytest.mark.parametrize(
    ("combine", "reward"), [("mean", 0.5), ("median", 0.25), ("minimum", -0.25)]
)
def test_members_combine_and_disagree_by_their_population_deviation(combine, reward):
    ensemble = RewardEnsemble(giving(1.5, -0.25, 0.25), combine)

    assert ensemble("", {}) == reward
    assert ensemble.score("", {}) == Score(
        reward, pytest.approx(statistics.pstdev([1.5, -0.25, 0.25]))
    )


@pytest.mark.parametrize("rewards", [(0.1,) * 7, (0, 0.0)])
def test_members_of_one_mind_do_not_disagree_at_all(rewards):
    assert RewardEnsemble(giving(*rewards)).score("", {}).disagreement == 0.0


def test_twice_the_members_do_not_disagree_more():
    once = RewardEnsemble(giving(0.0, 1.0)).score("", {})
    twice = RewardEnsemble(giving(0.0, 1.0, 0.0, 1.0)).score("", {})

    assert once == twice == Score(0.5, 0.5)


def test_every_member_sees_completion_and_row():
    lengths = [lambda text, row: len(text), lambda text, row: len(row["ground_truth"])]

    assert RewardEnsemble(lengths, "minimum")("abc", {"ground_truth": "ab"}) == 2


def test_a_member_that_is_not_finite_makes_the_reward_not_finite():
    score = RewardEnsemble(giving(0.0, math.nan)).score("", {})

    assert math.isnan(score.reward)
    assert math.isnan(score.disagreement)


def test_a_member_that_fails_fails_the_whole():
    def broken(completion, row):
        raise OSError("no judge")

    with pytest.raises(OSError, match="no judge"):
        RewardEnsemble([*giving(1.0), broken])("", {})


async def _await_result(completion, row):
    return 1.0


@pytest.mark.parametrize(
    ("members", "combine", "message"),
    [
        (giving(1.0), "mean", "at least 2 reward functions, got 1"),
        (giving(1.0, 1.0), "max", "combine must be one of .* got 'max'"),
        ([*giving(1.0), _await_result], "mean", r"members\[1\] must be a plain function"),
    ],
)
def test_what_makes_no_ensemble_is_refused(members, combine, message):
    with pytest.raises(ConfigError, match=message):
        RewardEnsemble(members, combine)


@pytest.mark.parametrize(
    ("members", "parsed"),
    [
        ([*giving(1.0), answer_reward], True),
        ([tags_reward("answer"), answer_reward], True),
        ([tags_reward("think"), answer_reward], False),
        ([lambda *_: Score(0.0, parsed=False), *giving(1.0)], False),
        (giving(1.0, 0.0), None),
    ],
)
def test_an_ensemble_is_parsed_where_all_members_that_say_so_are(members, parsed):
    score = RewardEnsemble(members).score("<answer>18</answer>", {"ground_truth": "18"})

    assert score.parsed is parsed
