"""Held-out evaluation on the embedded platform: beside the training, without changing it."""

import asyncio
import logging

import pytest
from tests.integration.conftest import async_config, config
from tests.integration.rollouts import make_rollouts, spread
from tests.integration.runs import read_metrics

from training.data.rows import load_rows
from training.quickstart import HELDOUT_ROWS
from training.recipes import igpo_loop, rl_loop

HELD_OUT = {"eval_dataset": str(HELDOUT_ROWS), "eval_rows": 4, "eval_samples_per_prompt": 2}


def test_evaluation_beside_the_training_changes_nothing_that_is_trained(async_trial):
    plain = async_trial()
    evaluated = async_trial(eval_every=2, **HELD_OUT)

    assert plain.records() == evaluated.records()
    assert plain.has_weights_of(evaluated)
    assert plain.records("eval") == []
    records = evaluated.records("eval")
    assert records[0]["step"] == 0
    assert records[-1]["step"] == evaluated.summary.steps == 4
    assert read_metrics(evaluated.folder)[-1]["type"] == "eval"
    for record in records:
        assert record["eval/samples"] == 8
        assert record["eval/pass@1"] == pytest.approx(record["eval/accuracy"])
        assert record["eval/pass@1"] <= record["eval/pass@2"]
        assert record["eval/weight_version_min"] >= 0
        assert record["eval/weight_version_max"] <= 4
    # Nothing is trained any more: the last weights sample all of it.
    assert records[-1]["eval/weight_version_min"] == records[-1]["eval/weight_version_max"] == 4
    assert [step for step, _ in evaluated.summary.evaluations] == [
        record["step"] for record in records
    ]


def test_it_goes_on_while_steps_are_trained_off_policy(async_trial):
    run = async_trial(
        max_rows=16, max_head_offpolicy_versions=2, eval_dataset=str(HELDOUT_ROWS), eval_rows=64
    )

    kinds = [record["type"] for record in read_metrics(run.folder)]
    assert kinds.count("train") == 8
    # The first one began before the first step and ended amid the others; the last one is awaited.
    assert "train" in kinds[: kinds.index("eval")]
    assert [record["step"] for record in run.records("eval")] == [0, 8]
    assert max(record["async/version_offset_max"] for record in run.records()) <= 2


def test_given_rows_need_no_messages_and_a_failing_evaluation_is_only_a_warning(
    async_trial, caplog
):
    rows = []

    def read_messages(row):
        rows.append(row)
        if "question" in row:
            raise ValueError("no such tool")
        return row["messages"]

    make = make_rollouts(messages=read_messages)
    with caplog.at_level(logging.WARNING):
        run = async_trial(make=make, held_out=[{"question": "6 * 7"}])

    assert run.summary.steps == 4
    assert run.summary.evaluations == []
    assert run.records("eval") == []
    assert {"question": "6 * 7"} in rows
    warning = "has no record: ValueError: no such tool, in the rollout of held-out row 0, sample 0"
    assert caplog.text.count(warning) == 2


def test_rl_loop_retries_and_goes_on_without_a_failed_evaluation(trial, caplog):
    def reward(text, row):
        if row in held_out:
            raise ValueError("the judge is away")
        return spread(text, row)

    held_out = load_rows(str(HELDOUT_ROWS), 4)
    with caplog.at_level(logging.WARNING):
        run = trial(reward_fn=reward, max_rows=4, eval_every=1, **HELD_OUT)

    assert run.summary.steps == len(run.records()) == 2
    assert run.records("eval") == run.summary.evaluations == []
    assert caplog.text.count("has no record: ValueError: the judge is away, in reward_fn") == 3
    assert caplog.text.count(", in the evaluation of held-out row ") == 3


def after_the_first_evaluation(held_out):
    """A factory whose training rollouts wait until each held-out row was sampled twice."""
    left = 2 * len(held_out)
    is_over = asyncio.Event()

    def make_rollout_fn(setup):
        inner = make_rollouts()(setup)

        async def rollout_fn(row, *, cursor_index, sample_index):
            nonlocal left
            if row not in held_out:
                await is_over.wait()
            sample = await inner(row, cursor_index=cursor_index, sample_index=sample_index)
            left -= row in held_out
            if left == 0:
                is_over.set()
            return sample

        return rollout_fn

    return make_rollout_fn


def test_both_recipes_sample_the_same_held_out_answers_from_the_same_weights(trial, async_trial):
    (first, _) = trial(reward_fn=spread, max_rows=2, **HELD_OUT).records("eval")
    make = after_the_first_evaluation(load_rows(str(HELDOUT_ROWS), 4))
    (before, after) = async_trial(max_rows=2, make=make, **HELD_OUT).records("eval")

    shared = {name: value for name, value in before.items() if name in first}
    assert shared == first
    assert after["eval/weight_version_min"] == 1


def test_a_run_that_fails_does_not_wait_for_its_evaluation(async_trial):
    held_out = load_rows(str(HELDOUT_ROWS), 4)
    cancelled = []

    def make_rollout_fn(setup):
        inner = make_rollouts()(setup)

        async def rollout_fn(row, *, cursor_index, sample_index):
            if row in held_out:
                try:
                    await asyncio.Event().wait()
                finally:
                    cancelled.append(sample_index)
            if cursor_index == 3:
                raise ValueError("a bug in the rollout")
            return await inner(row, cursor_index=cursor_index, sample_index=sample_index)

        return rollout_fn

    with pytest.raises(ValueError, match="a bug in the rollout"):
        async_trial(make=make_rollout_fn, rollout_timeout_s=None, **HELD_OUT)

    assert sorted(cancelled) == [0] * 4 + [1] * 4


def test_held_out_rows_may_be_given_to_every_recipe(tmp_path):
    held_out = load_rows(str(HELDOUT_ROWS), 3)

    runs = [
        rl_loop.main(config(tmp_path / "sync", max_rows=2), reward_fn=spread, eval_rows=held_out),
        igpo_loop.main(
            igpo_loop.Config(**vars(async_config(tmp_path / "igpo", max_rows=2))),
            rollout_fn_factory=make_rollouts(),
            eval_rows=held_out,
        ),
    ]

    for run in runs:
        assert [step for step, _ in run.evaluations] == [0, 1]
        assert [len(result.samples) for _, result in run.evaluations] == [3, 3]
