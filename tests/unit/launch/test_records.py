from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from hearth.launch.app_server import IdleTracker
from hearth.launch.child import Task
from hearth.launch.records import (
    LOG_LIMIT_BYTES,
    PhaseFile,
    ProcessFacts,
    ProcessId,
    WorkerFolder,
    last_lines,
    read_json,
    read_phase,
    remove_socket_folder,
    write_json,
)
from hearth.launch.spec import (
    DeploymentSpec,
    ExitReport,
    ExportSpec,
    TrainerSpec,
    spec_as_dict,
    spec_from_dict,
)


def this_process() -> ProcessId:
    found = ProcessId.of(os.getpid())
    assert found is not None
    return found


@pytest.fixture
def folder(tmp_path: Path) -> WorkerFolder:
    folder = WorkerFolder(tmp_path / "worker")
    folder.prepare()
    return folder


def test_the_last_phase_is_read_whole_whatever_was_there_before(tmp_path: Path) -> None:
    phase = PhaseFile(tmp_path / "phase")
    for name in ("save_weights_for_sampler", "idle"):
        phase(name)
        assert read_phase(tmp_path / "phase") == name
    phase("x" * 200)
    assert read_phase(tmp_path / "phase") == "x" * 64
    phase.close()


def test_a_phase_costs_microseconds(tmp_path: Path) -> None:
    phase = PhaseFile(tmp_path / "phase")
    start_s = time.perf_counter()
    for _ in range(1000):
        phase("forward_backward")
    assert time.perf_counter() - start_s < 0.1
    phase.close()


def test_no_phase_was_told_where_there_is_no_file(tmp_path: Path) -> None:
    assert read_phase(tmp_path / "phase") is None


def test_a_process_is_known_by_its_start_and_not_only_by_its_number() -> None:
    process = this_process()

    assert process.is_alive()
    assert not ProcessId(process.pid, process.started + 1).is_alive()


def test_a_new_life_forgets_the_old_one_but_keeps_its_log(folder: WorkerFolder) -> None:
    folder.log.write_text("before\n")
    folder.ready.touch()
    write_json(folder.exit, {"code": 1, "signal": None, "peak_rss_mb": 1.0})
    folder.write_process(ProcessFacts(this_process(), "/s", this_process()))

    folder.prepare()

    assert sorted(path.name for path in folder.path.iterdir()) == ["log"]
    assert folder.read_process() is None


def test_a_long_log_is_put_aside_when_its_worker_starts_again(folder: WorkerFolder) -> None:
    folder.log.write_bytes(b"x" * (LOG_LIMIT_BYTES + 1))

    folder.prepare()

    assert not folder.log.exists()
    assert (folder.path / "log.1").stat().st_size == LOG_LIMIT_BYTES + 1


def test_a_processs_facts_survive_their_file(folder: WorkerFolder) -> None:
    facts = ProcessFacts(this_process(), "/tmp/s", ProcessId(1, 2))

    folder.write_process(facts)

    assert folder.read_process() == facts


@pytest.mark.parametrize(
    "change",
    [
        {"pid": "1"},
        {"pid": 0},
        {"pid": -1},
        {"pid": True},
        {"started": None},
        {"forkserver_pid": []},
        {"forkserver_started": 1.5},
        {"socket": 3},
    ],
    ids=str,
)
def test_odd_facts_of_a_process_are_none(folder: WorkerFolder, change: dict[str, object]) -> None:
    folder.write_process(ProcessFacts(this_process(), "/tmp/s", ProcessId(1, 2)))
    content = read_json(folder.process)
    assert content is not None

    write_json(folder.process, content | change)

    assert folder.read_process() is None


def test_odd_records_of_an_end_leave_what_is_known(folder: WorkerFolder) -> None:
    write_json(folder.exit, {"code": 3})
    write_json(folder.failure, {"code": "internal"})

    assert folder.report("gone") == ExitReport(reason="gone")


def test_a_report_says_what_is_known_and_only_that(folder: WorkerFolder) -> None:
    assert folder.report("gone") == ExitReport(reason="gone")

    write_json(folder.exit, {"code": None, "signal": "SIGKILL", "peak_rss_mb": 12.0})
    PhaseFile(folder.phase)("optim_step")
    folder.log.write_text("one\n\ntwo\n")
    assert folder.report("gone") == ExitReport(
        signal="SIGKILL", peak_rss_mb=12.0, phase="optim_step", last_lines=("one", "two")
    )

    write_json(folder.failure, {"reason": "could not start: no"})
    assert folder.report("gone").reason == "could not start: no"


def test_the_end_of_a_log_is_short_and_says_first_how_it_crashed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    lines = ["Fatal Python error: Aborted", *map(str, range(50)), "y" * 1000, "Extension modules: "]
    log.write_text("\n".join(["x" * 20000, *lines]))

    found = last_lines(log)

    assert found == ("Fatal Python error: Aborted", *map(str, range(31, 50)), "y" * 300)
    assert last_lines(tmp_path / "none") == ()


def test_the_end_of_a_log_is_of_its_last_process(tmp_path: Path) -> None:
    log = tmp_path / "log"
    start = "INFO hearth.launch.child worker trainer-one: process"
    log.write_text(f"{start} 1, 1 threads\nan old end\n{start} 2, 1 threads\nthe end\n")

    assert last_lines(log) == (f"{start} 2, 1 threads", "the end")


def test_what_is_no_json_object_is_nothing(tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert read_json(path) is None
    for text in ("", "{", "[1]"):
        path.write_text(text)
        assert read_json(path) is None


SPECS = [
    TrainerSpec(
        worker_id="trainer-a", base_model="m", source="/m", bucket="b", checkpoint_dir="/c"
    ),
    DeploymentSpec(
        worker_id="deployment-a", name="n", base_model="m", source="/m", bucket="b", state_dir="/s"
    ),
    ExportSpec(bucket="b", identity="i", base_model="m", source="/m", folder="/f"),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: type(spec).__name__)
def test_a_spec_survives_json(spec: TrainerSpec, tmp_path: Path) -> None:
    write_json(tmp_path / "spec", spec_as_dict(spec))
    assert spec_from_dict(read_json(tmp_path / "spec") or {}) == spec


def test_a_task_survives_json(tmp_path: Path) -> None:
    task = Task(
        worker_id="w", entry="m:f", arguments={"a": None}, health_path=None, working_dir="/"
    )
    write_json(tmp_path / "task", task.as_dict())
    assert Task(**read_json(tmp_path / "task") or {}) == task


async def test_an_app_is_idle_only_while_it_answers_nobody() -> None:
    clock = [0.0]
    seen: list[float] = []

    async def app(scope: object, receive: object, send: object) -> None:
        clock[0] += 100
        seen.append(tracker.idle_s())

    tracker = IdleTracker(app, now=lambda: clock[0])
    clock[0] = 5
    assert tracker.idle_s() == 5
    await tracker({"type": "http"}, None, None)  # type: ignore[arg-type]
    assert seen == [0]
    clock[0] += 7
    assert tracker.idle_s() == 7


def test_an_exception_that_the_last_lines_point_to_is_told_first(tmp_path: Path) -> None:
    log = tmp_path / "log"
    cause = "torch.OutOfMemoryError: no room"
    earlier = ["ValueError: refused", cause, *(f"  frame {n}" for n in range(30))]
    log.write_text("\n".join([*earlier, "RuntimeError: failed. See root cause above."]))

    assert last_lines(log)[0] == cause
    log.write_text("\n".join([*earlier, "RuntimeError: failed."]))
    assert cause not in last_lines(log)


def test_a_folder_of_sockets_stays_while_a_worker_that_lives_will_have_one_there(tmp_path: Path):
    sockets, workers = tmp_path / "sockets", tmp_path / "workers"
    sockets.mkdir()
    own = ProcessId.of(os.getpid())
    assert own is not None
    folder = WorkerFolder(workers / "trainer-j")
    folder.prepare()
    folder.write_process(ProcessFacts(own, str(sockets / "0.sock"), own))

    remove_socket_folder(sockets, workers)
    assert sockets.exists(), "a worker that starts binds its socket last"

    ended = ProcessId(own.pid, own.started + 1)
    folder.write_process(ProcessFacts(ended, str(sockets / "0.sock"), own))
    remove_socket_folder(sockets, workers)
    assert not sockets.exists()
