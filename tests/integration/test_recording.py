"""What small runs of each recipe record: every outcome once, with what was sampled."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from tests.integration.conftest import async_config, config
from tests.integration.rollouts import make_rollouts, make_two_turns
from tests.integration.runs import read_metrics, read_records, read_samples, read_steps, sample_id

from hearth.records.layout import list_files
from hearth.records.reading import iterate_tables, read_group, read_vocabulary
from hearth.records.timeline import read_state, read_timeline
from training.data.rows import load_rows
from training.quickstart import TRAIN_ROWS
from training.recipes import igpo_loop
from training.recipes.rl_loop import main


def count_outcomes(folder: Path) -> Counter[str]:
    return Counter(
        outcome
        for table in iterate_tables(folder, "train", ["outcome"])
        for outcome in table["outcome"].to_pylist()
    )


def check_once(folder: Path) -> list[dict[str, Any]]:
    """No sample is there twice, and as many are trained in each step as its record says."""
    samples = read_samples(folder)
    assert len({sample_id(sample) for sample in samples}) == len(samples)
    trained = Counter(
        (sample["step"], sample["index"]) for sample in samples if sample["outcome"] == "trained"
    )
    groups = Counter(step for step, _ in trained)
    for record in read_steps(folder):
        assert groups.pop(record["step"]) == record["rollout/valid_prompt_groups"]
    assert not groups
    return samples


def length_reward(text: str, row: Any) -> float:
    """Nothing to learn from rows of even numbers."""
    return float(len(text)) if int(row["ground_truth"]) % 2 else 1.0


def test_rl_loop_records_every_completion_with_its_outcome(trial) -> None:
    run = trial(
        reward_fn=length_reward,
        max_completion_tokens=6,
        truncated_completions="drop",
        weight_sync_interval=2,
        kl_beta=0.001,
    )

    check_once(run.folder)
    outcomes = count_outcomes(run.folder)
    records = run.records()
    assert outcomes.total() == 8 * 4
    assert outcomes["truncated"] > 0
    assert outcomes["uniform"] > 0
    assert outcomes["trained"] > 0
    assert not set(outcomes) - {"trained", "uniform", "truncated", "dropped"}
    assert records
    vocabulary = read_vocabulary(run.folder)
    for index in range(8):
        for line in read_group(run.folder, "train", index):
            sampled = line["tokens"][line["loss_mask"]]
            assert len(line["seeds"]) == line["turns"] == 1
            assert vocabulary.decode(line["tokens"][: line["prompt_len"]]) == line["prompt"]
            assert line["text"] in vocabulary.decode(sampled)
            assert line["sample_s"] > 0
            if line["outcome"] == "trained":
                assert np.isfinite(line["policy_logprobs"][line["loss_mask"]]).all()
                assert np.isfinite(line["ref_logprobs"][line["loss_mask"]]).all()
            else:
                assert line["policy_logprobs"] is None


def test_ratios_are_those_of_the_loss_where_samples_are_older(trial) -> None:
    run = trial(reward_fn=lambda text, _row: float(len(text)), weight_sync_interval=2)

    older = [
        line
        for index in range(8)
        for line in read_group(run.folder, "train", index)
        if line["outcome"] == "trained" and line["ratios"] is not None
    ]
    assert older
    for line in older:
        mask = line["loss_mask"]
        gap = line["policy_logprobs"][mask] - line["behavior_logprobs"][mask]
        np.testing.assert_allclose(line["ratios"][mask], np.exp(gap), rtol=1e-4)


def test_recording_changes_no_number_of_a_run(trial) -> None:
    recorded, silent = trial(), trial(record_samples="none")

    assert read_records(recorded.folder) == read_records(silent.folder)
    assert recorded.has_weights_of(silent)
    assert list_files(silent.folder) == []
    assert not (silent.folder / "samples").exists()


def test_a_run_has_a_timeline_and_ends_by_itself(trial) -> None:
    run = trial()

    entries = read_timeline(run.folder)
    names = {entry["name"] for entry in entries}
    assert {"start", "sample", "forward_backward", "optim_step", "weight_sync", "end"} <= names
    assert all(entry["end"] >= entry["start"] for entry in entries if entry["type"] == "span")
    state = read_state(run.folder)
    assert (state.state, state.recipe, state.resumes) == ("ended", "rl_loop", 0)
    spans = [entry for entry in entries if entry["type"] == "span"]
    sampled = {(span["rows"][0], span["version"]) for span in spans if span["name"] == "sample"}
    served = [span["version"] for span in spans if span["name"] == "weight_sync"]
    recorded = [
        (sample["index"], sample["version"])
        for table in iterate_tables(run.folder, "train", ["index", "version"])
        for sample in table.to_pylist()
    ]
    assert sampled == set(recorded)
    assert served == list(range(1, len(served) + 1))
    changed = entries[0]["changed"]
    assert changed["prompt_groups_per_step"] == [1, 2]
    assert "shuffle" not in changed


def test_held_out_answers_are_recorded(tmp_path: Path) -> None:
    rows = load_rows(str(TRAIN_ROWS), 4)
    changes = {"output_model_id": None, "eval_samples_per_prompt": 2}

    main(config(tmp_path, **changes), rows, reward_fn=length_reward, eval_rows=rows[:1])

    evaluated = [record for record in read_metrics(tmp_path) if record["type"] == "eval"]
    first = read_group(tmp_path, "eval", 0, step=0)
    assert [line["outcome"] for line in first] == ["evaluated"] * 2
    assert sum(line["reward"] for line in first) / 2 == evaluated[0]["eval/reward"]
    assert len(list_files(tmp_path, "eval")) == len(evaluated) == 2


def test_async_rl_loop_records_filtered_and_failed_rollouts(async_trial) -> None:
    async def fail_last(row: int, number: int) -> None:
        if (row, number) == (1, 3):
            raise TimeoutError("no answer")

    run = async_trial(
        make=make_rollouts(fail_last),
        accepts=lambda group: group.row.index != 0,
        rollout_retries=0,
        min_group_size=2,
    )

    samples = check_once(run.folder)
    assert {sample["outcome"] for sample in samples if sample["index"] == 0} == {"filtered"}
    failed = [sample for sample in samples if sample["outcome"] == "failed"]
    assert [(sample["index"], sample["completion"]) for sample in failed] == [(1, 3)]
    assert failed[0]["reason"] == "TimeoutError: no answer"
    assert Counter(sample["index"] for sample in samples) == dict.fromkeys(range(8), 4)
    assert all(len(sample["seeds"]) == sample["turns"] for sample in samples)
    assert read_state(run.folder).recipe == "async_rl_loop"


def test_a_row_that_came_too_late_is_on_record_as_stale_with_what_was_sampled(async_trial) -> None:
    async def sleep_long(row: int, number: int) -> None:
        if row == 2 and number != 3:
            await asyncio.sleep(3600)

    run = async_trial(
        make=make_rollouts(sleep_long),
        max_head_offpolicy_versions=1,
        late_row_wait_s=1.0,
        max_rows=9,
    )

    stale = [sample for sample in check_once(run.folder) if sample["outcome"] == "stale"]
    assert [(sample["index"], sample["completion"]) for sample in stale] == [(2, 0)]
    assert stale[0]["length"] > 0
    assert "still being sampled when their last chance was over" in stale[0]["reason"]


def test_igpo_loop_records_what_each_token_is_worth(tmp_path: Path) -> None:
    fields = vars(async_config(tmp_path, max_rows=4, output_model_id=None))

    igpo_loop.main(igpo_loop.Config(**fields), rollout_fn_factory=make_two_turns())

    check_once(tmp_path)
    for index in range(4):
        for line in read_group(tmp_path, "train", index):
            assert (line["turns"], len(line["seeds"]), line["tool_calls"]) == (2, 2, 0)
            assert line["advantage"] is None
            worth, mask = line["token_advantages"], line["loss_mask"]
            assert np.isfinite(worth[mask]).all()
            assert np.isnan(worth[~mask]).all()
            assert len(set(worth[mask].tolist())) == 2
