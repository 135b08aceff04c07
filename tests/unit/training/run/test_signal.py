"""What is said of steps and rows that teach nothing, and when a run ends for it."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.training.trial_rollouts import config_of, group_of, row_of, run_row, sample_of

from hearth.errors import ConfigError
from training.run.signal import NoSignalError, SignalWatch, find_problems, signal_metrics
from training.samples.groups import ExampleAnswer, RolloutStats, RowOutcome, rollout_metrics

WELL: dict[str, float] = {
    "rollout/truncated_ratio": 0.1,
    "rollout/parse_fail_ratio": 0.1,
    "rollout/samples_completed": 16.0,
    "rollout/reward_fail_count": 0.0,
    "rollout/entropy": 1.0,
    "signal/useful_row_ratio": 0.5,
    "signal/effective_ratio": 1.0,
    "signal/effective_samples": 8.0,
    "train/grad_norm": 2.0,
    "train/ref_kl": 0.01,
}


# One step


def test_of_a_step_that_is_well_nothing_is_said():
    assert find_problems(WELL, [WELL] * 10) == []
    assert find_problems({}) == []


ILL = [
    ({"rollout/truncated_ratio": 0.5}, "truncated", "50% of the answers were cut"),
    ({"rollout/parse_fail_ratio": 0.5}, "parser", "no answer was found in 50% of the completions"),
    ({"rollout/reward_fail_count": 4.0}, "rewards", "the reward of 25% of the answers failed"),
    ({"signal/useful_row_ratio": 0.25}, "rows", "75% of the rows taught nothing"),
    ({"signal/effective_ratio": 0.25}, "effective", "25% of the trained samples have an advantage"),
    ({"train/grad_norm": math.nan}, "gradient", "the gradient norm is nan"),
    ({"train/grad_norm": math.inf}, "gradient", "the gradient norm is inf"),
    ({"train/grad_norm": 0.0}, "gradient", "exactly 0, though 8 samples have an advantage"),
    ({"train/grad_norm": 21.0}, "gradient", "21, 10 times its running median"),
    ({"train/ref_kl": 1.5}, "kl", "the KL to the reference is 1.5 nats per token"),
    ({"train/ref_kl": math.nan}, "kl", "the KL to the reference is nan"),
    ({"rollout/entropy": 0.09}, "entropy", "the entropy has fallen from 1 to 0.09"),
]


@pytest.mark.parametrize(("changes", "kind", "line"), ILL)
def test_what_is_wrong_is_said_with_its_number(changes, kind, line):
    (found,) = find_problems(WELL | changes, [WELL] * 5)

    assert found.kind == kind
    assert line in found.line


WELL_ENOUGH = [
    {"rollout/truncated_ratio": 0.49},
    {"rollout/parse_fail_ratio": 0.49},
    {"rollout/reward_fail_count": 3.0},
    {"signal/useful_row_ratio": 0.26},
    {"signal/effective_ratio": 0.26},
    {"train/grad_norm": 20.0},
    {"train/grad_norm": 0.0, "signal/effective_samples": 0.0},
    {"train/ref_kl": 1.0},
    {"rollout/entropy": 0.1},
]


@pytest.mark.parametrize("changes", WELL_ENOUGH)
def test_below_its_limit_nothing_is_said(changes):
    assert find_problems(WELL | changes, [WELL] * 5) == []


@pytest.mark.parametrize(
    ("why", "kinds"),
    [({"rollout/truncated_ratio": 0.9}, ["truncated"]), ({"rollout/raw_reward": 0.8}, [])],
)
def test_rows_that_teach_nothing_are_not_said_where_that_is_no_wonder(why, kinds):
    found = find_problems(WELL | {"signal/useful_row_ratio": 0.1} | why, [WELL] * 5)

    assert [finding.kind for finding in found] == kinds


def test_a_step_is_not_compared_with_fewer_than_five_others():
    step = WELL | {"train/grad_norm": 1e3, "rollout/entropy": 1e-3}

    assert find_problems(step, [WELL] * 4) == []
    assert [finding.kind for finding in find_problems(step, [WELL] * 5)] == ["gradient", "entropy"]


def test_the_median_is_not_moved_by_one_step_and_the_entropy_is_the_first_steps():
    past = [WELL] * 5 + [WELL | {"train/grad_norm": 1e6, "rollout/entropy": 0.05}]

    found = find_problems(WELL | {"train/grad_norm": 30.0, "rollout/entropy": 0.05}, past)

    assert [warning.kind for warning in found] == ["gradient", "entropy"]


# What is counted


def test_effective_samples_are_those_whose_advantage_is_not_0():
    groups = [group_of(0, (1.0, 0.0)), group_of(1, (1.0, 1.0))]

    assert signal_metrics(groups) == {
        "signal/effective_samples": 2.0,
        "signal/effective_ratio": 0.5,
    }
    assert signal_metrics([]) == {"signal/effective_samples": 0.0, "signal/effective_ratio": 0.0}


def test_a_sample_with_an_advantage_per_token_is_effective_where_one_of_them_is_not_0():
    (sample, *_), *_ = group_of(0, (1.0, 1.0)).samples

    assert not replace(sample, advantage=[0.0, 0.0, 0.0]).is_effective
    assert replace(sample, advantage=[0.0, 0.5, 0.0]).is_effective


def test_rows_that_taught_something_are_a_share_of_all():
    stats = RolloutStats()
    for outcome in (learning(0), uniform(1, 1.0), RowOutcome(row_of(2), dropped="uniform")):
        stats.add(outcome)

    assert rollout_metrics(stats, [])["signal/useful_row_ratio"] == pytest.approx(1 / 3)
    assert "signal/useful_row_ratio" not in rollout_metrics(RolloutStats(), [])


def test_the_share_of_parse_failures_is_over_the_answers_whose_reward_says_so():
    stats = RolloutStats()
    stats.add(uniform(0, 0.0))
    assert "rollout/parse_fail_ratio" not in rollout_metrics(stats, [])

    stats.add(uniform(1, 0.0, parsed=(False, False)))
    stats.add(uniform(2, 1.0, parsed=(True,)))

    assert rollout_metrics(stats, [])["rollout/parse_fail_ratio"] == pytest.approx(2 / 3)


# What is said, and how often


class Said(list[str]):
    def __call__(self, line: str) -> None:
        self.append(line)


def test_one_kind_of_finding_is_said_again_after_20_steps_then_after_40():
    said = Said()
    watch = SignalWatch(note=said)

    for step in range(1, 62):
        watch.see_step(step, WELL | {"rollout/truncated_ratio": 0.9})

    assert [line.split()[1] for line in said] == ["1", "21", "61"]


def test_at_most_two_findings_are_said_per_step_and_the_others_at_the_next():
    said = Said()
    watch = SignalWatch(note=said)
    step = WELL | {
        "rollout/truncated_ratio": 0.9,
        "signal/effective_ratio": 0.0,
        "train/ref_kl": 5.0,
    }

    watch.see_step(1, step)
    assert len(said) == 2
    watch.see_step(2, step)
    watch.see_step(3, step)

    assert len(said) == 3
    assert "the KL to the reference" in said[2]


def test_a_run_is_compared_with_its_own_first_steps():
    said = Said()
    watch = SignalWatch(note=said)

    for step in range(1, 100):
        watch.see_step(step, WELL | {"rollout/entropy": 1.0 / step})

    assert said[0].split()[1] == "31"  # the median of 1, 1/2, 1/3, 1/4, 1/5 is 1/3
    assert len(said) == 3  # again after 20 steps, then after 40


# Patience


def learning(index: int) -> RowOutcome:
    return RowOutcome(row_of(index), group_of(index, (1.0, 0.0)), rewards=(1.0, 0.0), completions=2)


def uniform(index: int, reward: float, **changes: Any) -> RowOutcome:
    usual: dict[str, Any] = {
        "group": group_of(index, (reward, reward)),
        "rewards": (reward, reward),
        "completions": 2,
    }
    return RowOutcome(row_of(index), **(usual | changes))


def dropped(index: int, reason: str, **changes: Any) -> RowOutcome:
    return RowOutcome(row_of(index), dropped=reason, completions=2, **changes)


def see(watch: SignalWatch, outcomes: Sequence[RowOutcome]) -> None:
    for outcome in outcomes:
        watch.see_row(outcome)


def test_patience_is_counted_in_steps_worth_of_rows_and_a_row_with_signal_starts_anew():
    watch = SignalWatch(patience=3, groups_per_step=2)

    see(watch, [uniform(index, 0.0) for index in range(5)])
    watch.see_row(learning(5))
    see(watch, [uniform(index, 0.0) for index in range(5)])

    with pytest.raises(NoSignalError, match=r"none in 6 rows in a row \(no_signal_patience=3\)"):
        watch.see_row(dropped(11, "too_few"))


def test_without_patience_a_run_is_never_ended():
    see(SignalWatch(), [uniform(index, 0.0) for index in range(500)])


def test_rows_whose_rollouts_failed_or_came_late_neither_count_nor_start_anew():
    watch = SignalWatch(patience=2)

    see(watch, [uniform(0, 0.0), *[dropped(1, "failed")] * 9, *[dropped(1, "stale")] * 9])

    with pytest.raises(NoSignalError, match="got none in 2 rows"):
        watch.see_row(uniform(2, 0.0))


def test_rows_that_are_solved_are_said_and_do_not_end_the_run():
    said = Said()

    see(SignalWatch(2, note=said), [uniform(index, 1.0) for index in range(5)])

    assert len(said) == 2
    assert "the last 2 rows taught nothing, and most of their answers are right" in said[0]


CAUSES = [
    ([dropped(0, "too_few", truncated=2)] * 3, "100% of the answers were cut"),
    ([uniform(0, 0.0, parsed=(False, True))] * 3, "no answer was found in 50% of the completions"),
    ([dropped(0, "filtered", parsed=(False, False))] * 3, "no answer was found in 100%"),
    ([uniform(0, 0.0, parsed=(False, True, True))] * 3, "every answer earned 0"),
    ([dropped(0, "overlong_prompt")] * 3, "no room below max_seq_len"),
    ([dropped(0, "non_finite", rewards=(math.nan, 0.0))] * 3, "rewards are NaN or infinite"),
    ([dropped(0, "filtered", rewards=(0.0, 1.0))] * 3, "dynamic_filter_fn refuses"),
    ([dropped(0, "too_few")] * 3, "no answer has a reward"),
    ([uniform(0, 0.0)] * 3, "every answer earned 0: is the reward constant"),
    ([uniform(0, 0.0), uniform(1, 0.0), uniform(2, 1.0)], "raise temperature"),
]


@pytest.mark.parametrize(("outcomes", "cause"), CAUSES, ids=[cause for _, cause in CAUSES])
def test_the_error_names_the_likely_cause(outcomes, cause):
    with pytest.raises(NoSignalError, match=cause):
        see(SignalWatch(patience=3), outcomes)


def test_the_error_shows_one_of_the_last_answers():
    shown = ExampleAnswer("The answer is 42.", [1, 2], 0.0, "stop")
    with pytest.raises(NoSignalError) as caught:
        SignalWatch(1).see_row(uniform(0, 0.0, example=shown))
    assert str(caught.value).endswith(
        "one of the last answers (reward 0, finish reason 'stop'):\nThe answer is 42."
    )

    unmarked = ExampleAnswer("It is 42.", [1, 2], 0.0, "stop", parsed=False)
    with pytest.raises(NoSignalError, match=r"\(reward 0, no answer found, finish reason 'stop'\)"):
        SignalWatch(1).see_row(uniform(0, 0.0, example=unmarked))

    silent = ExampleAnswer("", [7, 8], None, "length")
    watch = SignalWatch(1, decode=lambda tokens: " ".join(f"<{token}>" for token in tokens))
    with pytest.raises(NoSignalError, match=r"\(no reward, finish reason 'length'\):\n<7> <8>"):
        watch.see_row(dropped(0, "too_few", example=silent))

    long = ExampleAnswer("x" * 5000, [], 0.0, "stop")
    with pytest.raises(NoSignalError) as caught:
        SignalWatch(1).see_row(uniform(0, 0.0, example=long))
    assert str(caught.value).endswith("\n" + "x" * 1000 + " ...")


def test_a_row_of_rollouts_has_an_example_with_its_sampled_tokens():
    async def rollout_fn(_row: dict[str, Any]) -> Any:
        return sample_of(0.5, text="seen", finish_reason="length")

    assert run_row(rollout_fn, row_of(0)).example == ExampleAnswer("seen", [7, 8], 0.5, "length")


def test_a_row_of_rollouts_counts_what_was_parsed_and_shows_an_answer_that_was_not():
    said = [True, None, False, True]

    async def rollout_fn(_row: dict[str, Any], sample_index: int) -> Any:
        text = f"answer {sample_index}"
        return sample_of(float(sample_index), text=text, parsed=said[sample_index])

    outcome = run_row(rollout_fn, row_of(0), completions_per_prompt=4)

    assert outcome.parsed == [True, False, True]
    assert outcome.example == ExampleAnswer("answer 2", [7, 8], 2.0, "stop", parsed=False)


def test_patience_below_one_step_is_refused():
    with pytest.raises(ConfigError, match="no_signal_patience must be >= 1 or None, got 0"):
        config_of(no_signal_patience=0).validate()
