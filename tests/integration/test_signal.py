"""A run that has nothing to learn from says so, and ends, in every recipe."""

from __future__ import annotations

import pytest
from tests.integration.conftest import config
from tests.integration.rollouts import make_rollouts

from training.recipes.rl_loop import main
from training.rewards import tags_reward
from training.run.signal import NoSignalError


def make_constant(reward: float):
    return make_rollouts(reward=lambda _text, _row: reward)


def test_rl_loop_ends_on_windows_without_a_step(trial):
    with pytest.raises(NoSignalError, match="none in 4 rows in a row") as caught:
        trial(reward_fn=lambda _text, _row: 0.0, no_signal_patience=2)

    assert "every answer earned 0" in str(caught.value)
    assert "one of the last answers (reward 0," in str(caught.value)


def test_rl_loop_ends_where_every_answer_is_cut(trial):
    with pytest.raises(NoSignalError, match="100% of the answers were cut: raise max_completion"):
        trial(max_completion_tokens=1, truncated_completions="drop", no_signal_patience=2)


def test_rl_loop_ends_where_the_reward_finds_no_answer(tmp_path):
    with pytest.raises(NoSignalError, match="no answer was found in 100% of the comp") as caught:
        main(config(tmp_path, no_signal_patience=2), reward_fn=tags_reward("thought"))

    assert "one of the last answers (reward 0, no answer found, finish" in str(caught.value)


@pytest.mark.parametrize("late", [0, 2])
def test_async_rl_loop_ends_on_steps_that_trained_nothing(async_trial, late):
    with pytest.raises(NoSignalError, match=r"every answer earned 0\.25"):
        async_trial(
            make=make_constant(0.25),
            no_signal_patience=2,
            max_head_offpolicy_versions=late,
            max_rows=12,
        )


def test_async_rl_loop_ends_where_a_filter_leaves_no_step(async_trial):
    with pytest.raises(NoSignalError, match="dynamic_filter_fn refuses the groups"):
        async_trial(accepts=lambda _group: False, no_signal_patience=2)


def test_rows_that_are_solved_end_nothing_and_what_is_wrong_is_said(async_trial, capsys):
    run = async_trial(make=make_constant(1.0), no_signal_patience=2)

    assert run.summary.steps == 4
    assert [record["signal/effective_samples"] for record in run.records()] == [0.0] * 4
    assert [record["signal/useful_row_ratio"] for record in run.records()] == [0.0] * 4
    shown = capsys.readouterr().out
    # Solved rows are no fault of the run's: only the stretch without a lesson is said.
    assert "100% of the rows taught nothing" not in shown
    assert "the last 4 rows taught nothing, and most of their answers are right" in shown
