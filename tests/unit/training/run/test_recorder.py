"""The recorder alone: what it writes, what it takes away, and where it stops."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.training.trial_rollouts import group_of, row_of

from hearth.errors import ConfigError, StorageError
from hearth.records.layout import SAMPLES, list_files
from hearth.records.reading import iterate_tables, read_group
from training.config.parts import read_share
from training.run.checkpoints import Cursor
from training.run.recorder import (
    MERGED_FILES,
    Recorder,
    RecordLimits,
    go_on_with_samples,
    set_samples_aside,
)
from training.run.token_bytes import TokenBytes
from training.samples.groups import PromptGroup, RowOutcome
from training.samples.trajectories import SampledTrajectory

TOKENS = TokenBytes([bytes([65 + number]) for number in range(12)], frozenset())
Open = Callable[..., Any]


@pytest.fixture
def opening(tmp_path: Path) -> Open:
    def opened(**limits: Any) -> Any:
        said: list[str] = limits.pop("said", [])
        return Recorder.open(tmp_path, "r1", RecordLimits(**limits), lambda: TOKENS, said.append)

    return opened


def train(recorder: Recorder, step: int, *indices: int) -> None:
    """A step on the groups of some rows."""
    groups = [group_of(index) for index in indices]
    for group in groups:
        recorder.see_row(outcome_of(group))
    recorder.begin_step(step, groups)
    recorder.finish()


def outcome_of(group: PromptGroup) -> RowOutcome:
    trajectories = [
        SampledTrajectory([sample.rollout], reward=sample.rollout.reward) for sample in group.flat()
    ]
    return RowOutcome(group.row, group, sampled_trajectories=trajectories)


def drop(recorder: Recorder, index: int, reason: str = "uniform") -> None:
    outcome = outcome_of(group_of(index))
    recorder.see_row(replace(outcome, group=None, dropped=reason))


def places(folder: Path, kind: Any = "train") -> list[tuple[int, int, str]]:
    """Step, index and outcome of all lines."""
    return sorted(
        (line["step"], line["index"], line["outcome"])
        for table in iterate_tables(folder, kind, ["step", "index", "outcome"])
        for line in table.to_pylist()
    )


def test_each_line_says_what_became_of_its_row(tmp_path: Path, opening: Open) -> None:
    with opening() as recorder:
        drop(recorder, 5)
        train(recorder, 1, 3)
        drop(recorder, 6, "too_few")

    assert places(tmp_path) == [
        *[(1, 3, "trained")] * 2,
        *[(1, 5, "uniform")] * 2,
        *[(2, 6, "dropped")] * 2,
    ]
    first, second = read_group(tmp_path, "train", 3)
    assert (first["reward"], second["reward"]) == (1.0, 0.0)
    assert first["advantage"] == -second["advantage"] > 0
    assert (first["text"], first["prompt"], first["length"]) == ("HI", "FG", 2)
    assert first["behavior_logprobs"][2:].tolist() == [-0.5, -0.5]
    assert read_group(tmp_path, "train", 6)[0]["reason"].startswith("of a row with fewer than two")


def test_a_row_of_which_nothing_was_sampled_has_one_line(tmp_path: Path, opening: Open) -> None:
    with opening() as recorder:
        recorder.see_row(RowOutcome(row_of(2), dropped="failed", error=TimeoutError("too late")))

    (line,) = read_group(tmp_path, "train", 2)
    assert (line["outcome"], line["reason"]) == ("failed", "TimeoutError: too late")
    assert (line["length"], len(line["tokens"])) == (0, 0)


@pytest.mark.slow
def test_files_of_single_steps_become_one(tmp_path: Path, opening: Open) -> None:
    with opening() as recorder:
        for step in range(1, MERGED_FILES + 2):
            train(recorder, step, step)

    names = [file.path.name for file in list_files(tmp_path)]
    assert names == ["train-000001-000064.parquet", "train-000065.parquet"]
    assert [index for _, index, _ in places(tmp_path)] == [
        index for index in range(1, MERGED_FILES + 2) for _ in range(2)
    ]


@pytest.mark.slow
def test_a_resumed_run_has_the_lines_of_finished_rows_alone(tmp_path: Path, opening: Open) -> None:
    with opening() as recorder:
        for step in range(1, MERGED_FILES + 2):
            train(recorder, step, step - 1)
        drop(recorder, 80)
        drop(recorder, 81)
    before = places(tmp_path)

    aside = go_on_with_samples(tmp_path, 40, Cursor(40, {80}))

    kept = places(tmp_path)
    assert {index for _, index, _ in kept} == {*range(40), 80}
    assert kept == [place for place in before if place[1] < 40 or place[1] == 80]
    assert aside == tmp_path / "samples.1"
    assert sorted(path.name for path in aside.iterdir()) == [
        "train-000001-000064.parquet",
        "train-000065.parquet",
        "train-000066.parquet",
    ]
    assert go_on_with_samples(tmp_path, 40, Cursor(40, {80})) is None

    with opening() as recorder:
        recorder.step = 40
        train(recorder, 41, 40)
    assert {index for _, index, _ in places(tmp_path)} == {*range(41), 80}


def test_rows_dropped_before_a_checkpoint_join_those_of_their_step(
    tmp_path: Path, opening: Open
) -> None:
    with opening() as recorder:
        train(recorder, 1, 0)
        drop(recorder, 1)
        recorder.begin_flush()
        recorder.finish()
        assert places(tmp_path)[-1] == (2, 1, "uniform")
        train(recorder, 2, 2)

    assert [place[:2] for place in places(tmp_path)[2:]] == [(2, 1), (2, 1), (2, 2), (2, 2)]


@pytest.mark.slow
def test_a_repeated_evaluation_replaces_the_earlier_one(tmp_path: Path, opening: Open) -> None:
    rows = [{"ground_truth": "4"}]
    with opening() as recorder:
        for step in (*range(MERGED_FILES + 1), 3):
            reward = 0.25 if step != 3 or recorder.step else 0.5
            recorder.step = step
            recorder.begin_evaluation(step, rows, [[SampledTrajectory(reward=reward)]])
            recorder.finish()

    assert len(places(tmp_path, "eval")) == MERGED_FILES + 1
    assert [file.path.name for file in list_files(tmp_path)] == [
        "eval-000000-000063.parquet",
        "eval-000064.parquet",
    ]
    (line,) = read_group(tmp_path, "eval", 0, step=3)
    assert (line["outcome"], line["ground_truth"]) == ("evaluated", "4")


def test_a_share_of_the_rows_is_recorded_whole_and_the_same_each_time(
    tmp_path: Path, opening: Open
) -> None:
    with opening(share=0.25) as recorder:
        train(recorder, 1, *range(200))
    chosen = [index for _, index, _ in places(tmp_path)]

    assert 30 <= len(set(chosen)) <= 70
    assert all(chosen.count(index) == 2 for index in chosen)
    limits = RecordLimits(share=0.25)
    assert set(chosen) == {index for index in range(200) if limits.choose("train", index)}


def test_recording_stops_at_its_bound_and_says_how_to_go_on(tmp_path: Path, opening: Open) -> None:
    said: list[str] = []
    with opening(max_bytes=1.0, said=said) as recorder:
        for step in (1, 2, 3):
            train(recorder, step, step)

    assert {step for step, _, _ in places(tmp_path)} == {1}
    assert len(said) == 1
    assert "raise it, or move files away" in said[0]


@pytest.fixture
def small_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_takes_no_more_is_one_clear_error(
    tmp_path: Path, opening: Open, small_files: None
) -> None:
    refusal = pytest.raises(StorageError, match=r"train-000001\.parquet must be writable")
    with refusal, opening() as recorder:
        train(recorder, 1, 3)

    assert list_files(tmp_path) == []
    assert sorted(path.name for path in (tmp_path / SAMPLES).iterdir()) == ["tokens.parquet"]


def test_a_new_run_moves_older_samples_aside(tmp_path: Path, opening: Open) -> None:
    with opening() as recorder:
        train(recorder, 1, 3)

    assert set_samples_aside(tmp_path) == tmp_path / "samples.1"
    assert list_files(tmp_path) == []


@pytest.mark.parametrize("value", ["some", "sampled:0", "sampled:1.5", "sampled:x", "sampled", ""])
def test_a_share_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="record_samples must be all, none or sampled:SHARE"):
        read_share(value)


def test_shares_are_read() -> None:
    assert [read_share(value) for value in ("all", "none", "sampled:0.1")] == [1.0, 0.0, 0.1]


def test_tool_calls_are_counted_in_both_forms_that_have_tags(tmp_path: Path, opening: Open) -> None:
    text = (
        '<tool_call>{"name": "add", "arguments": {}}</tool_call><tool_call>no call</tool_call>'
        "<tool_call>\n<function=add>\n</function>\n</tool_call>"
    )
    rollout = replace(next(iter(group_of(0).flat())).rollout, text=text)
    with opening() as recorder:
        recorder.begin_evaluation(1, [{}], [[SampledTrajectory([rollout], reward=1.0)]])

    tables = iterate_tables(tmp_path, "eval", ["tool_calls"])
    assert [line for table in tables for line in table.to_pylist()] == [{"tool_calls": 2}]
