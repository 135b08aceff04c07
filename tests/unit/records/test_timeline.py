"""The timeline of a run, and the state that it tells."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from hearth.records.timeline import describe_process, read_events, read_state, read_timeline


def write(folder: Path, *entries: dict[str, Any]) -> None:
    lines = [json.dumps({"type": "event", "step": 0, **entry}) for entry in entries]
    (folder / "timeline.jsonl").write_text("\n".join(lines) + "\n")


def start(**fields: Any) -> dict[str, Any]:
    return {"name": "start", "time": 1.0, "run": "r1", "recipe": "rl_loop", **fields}


def finished_process() -> dict[str, Any]:
    """What a process said about itself whose number no process of this machine has."""
    return {**describe_process(), "pid": 2**31 - 1}


def touch(folder: Path, unix_s: float) -> None:
    for path in folder.iterdir():
        os.utime(path, (unix_s, unix_s))


def test_a_run_whose_process_lives_is_running(tmp_path: Path) -> None:
    write(tmp_path, start(**describe_process()))

    state = read_state(tmp_path)

    assert (state.state, state.run, state.recipe, state.started) == (
        "running",
        "r1",
        "rl_loop",
        1.0,
    )
    assert (state.pid, state.resumes) == (os.getpid(), 0)


def test_a_run_whose_process_is_gone_was_killed(tmp_path: Path) -> None:
    write(tmp_path, start(**finished_process()))

    assert read_state(tmp_path).state == "killed"


def test_another_process_with_the_same_number_is_not_the_run(tmp_path: Path) -> None:
    write(tmp_path, start(**{**describe_process(), "pid_started": 12.0}))

    assert read_state(tmp_path).state == "killed"


@pytest.mark.parametrize(("name", "state"), [("end", "ended"), ("failed", "failed")])
def test_the_last_event_says_how_a_run_ended(tmp_path: Path, name: str, state: str) -> None:
    write(tmp_path, start(**describe_process()), {"name": name, "time": 2.0, "text": "why"})

    assert (read_state(tmp_path).state, read_state(tmp_path).text) == (state, "why")


def test_a_run_that_went_on_after_its_end_runs(tmp_path: Path) -> None:
    here = describe_process()
    write(
        tmp_path,
        start(**finished_process()),
        {"name": "failed", "time": 2.0},
        start(name="resume", time=3.0, **here),
    )

    state = read_state(tmp_path)

    assert (state.state, state.resumes, state.started) == ("running", 1, 1.0)


def test_a_living_run_that_writes_nothing_has_stalled(tmp_path: Path) -> None:
    write(tmp_path, start(**describe_process()))
    touch(tmp_path, 1000.0)

    assert read_state(tmp_path, now=1119.0).state == "running"
    assert read_state(tmp_path, now=1121.0).state == "stalled"


def test_slow_steps_give_a_run_more_patience(tmp_path: Path) -> None:
    write(tmp_path, start(**describe_process()))
    record = {"type": "train", "step": 1, "perf/step_wall_time": 60.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    touch(tmp_path, 1000.0)

    assert read_state(tmp_path, now=1599.0).state == "running"
    assert read_state(tmp_path, now=1601.0).state == "stalled"


def test_a_run_of_another_machine_runs_while_its_files_change(tmp_path: Path) -> None:
    write(tmp_path, start(**{**describe_process(), "host": "elsewhere"}))
    touch(tmp_path, 1000.0)

    assert read_state(tmp_path, now=1059.0).state == "running"
    assert read_state(tmp_path, now=1061.0).state == "killed"


def test_a_torn_or_foreign_line_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, start(**describe_process()), {"name": "checkpoint", "time": 2.0})
    with (tmp_path / "timeline.jsonl").open("ab") as file:
        file.write(b'[1, 2]\n\xff\xfe\n{"type": "event", "name": 3}\n{"type": "span", "st')

    assert [event["name"] for event in read_events(tmp_path)] == ["start", "checkpoint"]
    assert len(read_timeline(tmp_path)) == 3
    assert [event["time"] for event in read_timeline(tmp_path, ("checkpoint",))] == [2.0]
    assert read_state(tmp_path).state == "running"


def test_a_folder_without_a_timeline_has_a_state(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    touch(tmp_path, 1000.0)

    assert read_state(tmp_path, now=1059.0).state == "running"
    assert read_state(tmp_path, now=1061.0).state == "ended"
    assert read_state(tmp_path / "nothing", now=1061.0).state == "ended"
