import math
import random
import statistics

import pytest
from tests.unit.training.trial_rollouts import row_of

from training.rewards import Score, Unscored, disagreements
from training.samples.groups import RolloutStats, RowOutcome, rollout_metrics
from training.samples.reward_metrics import disagreement_metrics, group_reward_metrics


def test_t198_a_step_says_how_rewards_lie_within_its_groups_and_between_them():
    metrics = group_reward_metrics([(1.0, 0.0, 1.0, 0.0), (1.0, 1.0), (0.0, 0.0), (1.0, 0.75)])

    assert metrics == {
        "rollout/group_reward_std_mean": pytest.approx((0.5 + 0.125) / 4),
        "rollout/group_reward_std_min": 0.0,
        "rollout/group_reward_std_max": 0.5,
        "rollout/group_reward_mean_std": pytest.approx(statistics.pstdev([0.5, 1.0, 0.0, 0.875])),
        "rollout/group_uniform_ratio": 0.5,
        "rollout/group_solved_ratio": 0.5,
        "rollout/group_unsolved_ratio": 0.25,
    }


def test_groups_that_compare_nothing_are_left_out():
    kept = [(1.0, 0.0)]

    assert group_reward_metrics([*kept, (1.0,), (), (math.nan, 1.0)]) == group_reward_metrics(kept)
    assert group_reward_metrics([(1.0,)]) == {}


def test_the_order_in_which_groups_end_changes_no_bit():
    rng = random.Random(0)
    groups = [[rng.uniform(-1e6, 1e6) for _ in range(3)] for _ in range(40)]

    assert group_reward_metrics(groups) == group_reward_metrics(rng.sample(groups, 40))


def test_t172_a_rollouts_rewards_failures_and_disagreements_reach_the_record():
    stats = RolloutStats()
    stats.add(RowOutcome(row_of(0), rewards=(1.0, 0.0), disagreements=(0.0, 0.5), failed_rewards=1))
    stats.add(RowOutcome(row_of(1), rewards=(1.0, 1.0), disagreements=(0.25, 0.25)))
    stats.add(RowOutcome(row_of(2), dropped="failed", failed_rewards=4))

    metrics = rollout_metrics(stats, [])

    assert metrics["rollout/reward_fail_count"] == 5.0
    assert metrics["rollout/reward_disagreement/mean"] == 0.25
    assert metrics["rollout/reward_disagreement/max"] == 0.5
    assert metrics["rollout/group_reward_std_mean"] == 0.25
    assert metrics["rollout/group_uniform_ratio"] == 0.5


def test_without_an_ensemble_nothing_is_said_of_disagreement():
    outcomes = [Score(1.0), Unscored(ValueError()), Score(0.5, 0.1)]

    assert disagreements(outcomes) == [0.1]
    assert disagreement_metrics([]) == {}
