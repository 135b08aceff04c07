import random
from collections.abc import Sequence

import pytest
from tests.unit.training.trial_rollouts import group_from, group_of, row_of, sample_of

from hearth.errors import ConfigError
from hearth.sdk import SampledCompletion
from training.samples.groups import (
    PromptGroup,
    RolloutStats,
    RowOutcome,
    TrainSample,
    completion_sample,
    rollout_metrics,
    version_metrics,
)
from training.samples.rollout import RolloutSample
from training.update.policy_losses import make_policy_loss_fn

TWO_TURNS = RolloutSample(
    tokens=[11, 12, 13, 14, 15, 16, 17],
    logprobs=[0.0, 0.0, -0.1, -0.2, 0.0, 0.0, -0.3],
    loss_mask=[0, 0, 1, 1, 0, 0, 1],
    reward=1.0,
    finish_reason="length",
    text="again",
)


def weights(sample: TrainSample) -> list[float]:
    return list(sample.datum.loss_fn_inputs["weights"].data)


def gradients(sample: TrainSample) -> list[float]:
    """Of the policy loss, for each target token."""
    rows = sample.behavior_logprobs.float() - 0.05
    policy = rows.clone().requires_grad_()
    loss_fn = make_policy_loss_fn(
        "importance_sampling",
        advantages=[sample.advantage],
        behavior_logprobs=[sample.behavior_logprobs],
    )
    loss, _ = loss_fn([sample.datum], [policy])
    loss.backward()
    return policy.grad.tolist()


# T143 and T145: what a sample becomes.


def test_t143_positions_that_were_not_sampled_have_weight_0_and_logprob_0():
    sample = TrainSample.from_rollout(sample_of(length=3), advantage=0.5)

    assert sample.datum.model_input.to_ints() == [5, 6, 7, 8]
    assert list(sample.datum.loss_fn_inputs["target_tokens"].data) == [6, 7, 8, 9]
    assert weights(sample) == [0.0, 1.0, 1.0, 1.0]
    assert sample.behavior_logprobs.tolist() == [0.0, -0.5, -0.5, -0.5]
    assert sample.old_logprobs is sample.ref_logprobs is None


def test_t143_a_logprob_beside_the_sampled_tokens_does_not_reach_the_loss():
    # An echo has logprobs of the prompt as well: nobody sampled those.
    echoed = sample_of(length=1, logprobs=[0.0, -3.0, -0.5])

    assert TrainSample.from_rollout(echoed, 1.0).behavior_logprobs.tolist() == [0.0, -0.5]


def test_t145_both_assistant_spans_train_and_the_tool_span_does_not():
    sample = TrainSample.from_rollout(TWO_TURNS, advantage=2.0)

    assert list(sample.datum.loss_fn_inputs["target_tokens"].data) == [12, 13, 14, 15, 16, 17]
    assert weights(sample) == [0.0, 1.0, 1.0, 0.0, 0.0, 1.0]
    assert sample.behavior_logprobs.tolist() == [0.0, -0.1, -0.2, 0.0, 0.0, -0.3]
    trained = [gradient != 0.0 for gradient in gradients(sample)]
    assert trained == [False, True, True, False, False, True]


def test_t145_a_group_counts_both_spans_and_the_prompt_before_the_first():
    group = group_from(row_of(0), [[TWO_TURNS], [sample_of(0.0, length=4)]])

    assert group.prompt_lens == [2, 2]
    assert group.completion_lens == [3, 4]
    assert group.truncated == [True, False]
    assert group.completions == ["again", ""]


# Groups.


def test_a_groups_advantages_are_centered_and_scaled_by_the_sample_deviation():
    group = group_of(4, (1.0, 0.0, 0.0, 1.0))

    expected = 0.5 / (1 / 3) ** 0.5
    assert group.rewards == [1.0, 0.0, 0.0, 1.0]
    assert group.advantages == pytest.approx([expected, -expected, -expected, expected])
    assert [sample.advantage for sample in group.flat()] == group.advantages


def test_the_segments_of_a_run_share_its_advantage_and_count_as_one_trajectory():
    long = [sample_of(2.0, length=3), sample_of(2.0, length=1, finish_reason="length", text="end")]
    group = group_from(row_of(0), [long, [sample_of(0.0)]])

    first, second = group.advantages
    assert (first, second) == pytest.approx((0.5**0.5, -(0.5**0.5)))
    assert [[sample.advantage for sample in samples] for samples in group.samples] == [
        [first, first],
        [second],
    ]
    assert group.rewards == [2.0, 0.0]
    assert group.completion_lens == [4, 2]
    assert group.prompt_lens == [2, 2, 2]
    assert (group.truncated, group.completions) == ([True, False], ["end", ""])
    assert len(group.data) == len(group.flat()) == 3


def test_a_group_keeps_its_row_its_meta_and_the_version_of_its_submission():
    group = group_from(row_of(9), [[sample_of(1.0)], [sample_of(0.0)]], {"k": 1}, 6)

    assert (group.row.index, group.row_meta, group.submit_version) == (9, {"k": 1}, 6)


def test_one_trajectory_makes_no_group():
    with pytest.raises(ConfigError, match="rewards must hold at least 2 values, got 1"):
        group_from(row_of(0), [[sample_of(1.0), sample_of(1.0)]])


def test_a_completion_of_one_turn_becomes_a_sample():
    completion = SampledCompletion(
        text="hi",
        full_tokens=[1, 2, 3, 4],
        prompt_len=2,
        finish_reason="length",
        inference_logprobs=[-0.5, -0.75],
        weight_version=3,
    )

    assert completion_sample(completion, 0.5) == RolloutSample(
        tokens=[1, 2, 3, 4],
        logprobs=[0.0, 0.0, -0.5, -0.75],
        loss_mask=[0, 0, 1, 1],
        reward=0.5,
        finish_reason="length",
        text="hi",
        versions=[[3, 2]],
    )


# Numbers of a step.


def versioned(*versions: list[list[int]] | None) -> list[PromptGroup]:
    rollouts = [sample_of(float(i), versions=version) for i, version in enumerate(versions)]
    return [group_from(row_of(0), [[sample] for sample in rollouts])]


@pytest.mark.parametrize(
    ("versions", "mean", "most"),
    [
        (([[5, 2]], [[5, 2]]), 0.0, 0.0),
        (([[5, 2]], [[3, 2]]), 1.0, 2.0),
        (([[3, 1], [5, 1]], [[4, 1], [5, 1]]), 1.5, 2.0),  # by the oldest token
        (([[4, 2]], None), 1.0, 1.0),  # what is not known does not count
    ],
)
def test_staleness_is_counted_from_the_oldest_token(versions, mean, most):
    assert version_metrics(versioned(*versions), 5) == {
        "version/sample_staleness_mean": mean,
        "version/sample_staleness_max": most,
    }


def test_without_versions_there_is_no_staleness():
    assert version_metrics(versioned(None, None), 5) == {}


def stats_of(outcomes: Sequence[RowOutcome]) -> RolloutStats:
    stats = RolloutStats()
    for outcome in outcomes:
        stats.add(outcome)
    return stats


def test_means_do_not_depend_on_the_order_in_which_rows_end():
    rng = random.Random(0)
    rewards = [[rng.uniform(-1e6, 1e6) for _ in range(3)] for _ in range(40)]
    outcomes = [
        RowOutcome(row_of(i), group_of(i, row), completions=3, rewards=row)
        for i, row in enumerate(rewards)
    ]
    shuffled = rng.sample(outcomes, len(outcomes))
    # Plain sums of these do depend on it, or the test would show nothing.
    assert sum(r for outcome in outcomes for r in outcome.rewards) != sum(
        r for outcome in shuffled for r in outcome.rewards
    )

    def metrics(order: Sequence[RowOutcome]) -> dict[str, float]:
        return rollout_metrics(
            stats_of(order), [outcome.group for outcome in order if outcome.group]
        )

    assert metrics(outcomes) == metrics(shuffled)


def test_raw_numbers_are_over_all_rollouts_and_the_rest_over_what_is_trained():
    outcomes = [
        RowOutcome(
            row_of(0), group_of(0, (1.0, 0.0)), completions=2, truncated=1, rewards=(1.0, 0.0)
        ),
        RowOutcome(row_of(1), dropped="filtered", completions=2, rewards=(1.0, 1.0)),
        RowOutcome(row_of(2), dropped="failed", completions=1, rewards=(0.0,), failed_samples=1),
        RowOutcome(row_of(3), dropped="too_few", empty_samples=2),
    ]
    stats = stats_of(outcomes)
    metrics = rollout_metrics(stats, [group_of(0, (1.0, 0.0))])

    assert (stats.failed_samples, stats.empty_samples) == (1, 2)
    assert metrics["rollout/raw_reward"] == metrics["rollout/accuracy"] == 0.6
    assert metrics["rollout/reward"] == 0.5
    assert (metrics["rollout/reward_min"], metrics["rollout/reward_max"]) == (0.0, 1.0)
    assert metrics["rollout/samples_completed"] == 5.0
    assert metrics["rollout/total_sampled"] == 4.0
    assert metrics["rollout/valid_prompt_groups"] == 1.0
    assert metrics["rollout/filter_reject_ratio"] == 0.25
    assert metrics["rollout/sample_fail_count"] == 1.0
    assert metrics["rollout/truncated_ratio"] == 0.2
    assert metrics["rollout/entropy"] == 0.5
    assert metrics["rollout/response_len/mean"] == metrics["rollout/response_len/max"] == 2.0
    dropped = {name: value for name, value in metrics.items() if "dropped" in name}
    assert dropped == {
        "rollout/dropped/failed": 1.0,
        "rollout/dropped/filtered": 1.0,
        "rollout/dropped/too_few": 1.0,
    }


def test_a_step_in_which_no_row_ended_says_nothing_of_what_was_sampled():
    metrics = rollout_metrics(RolloutStats(), [])

    assert metrics["rollout/reward"] == metrics["rollout/entropy"] == 0.0
    assert "rollout/raw_reward" not in metrics
    assert "rollout/accuracy" not in metrics
    assert "rollout/reward_min" not in metrics
    assert "rollout/response_len/mean" not in metrics
