"""Processes of a worker: what they are told, how their end is known, and that none is left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from hearth.errors import ClosedError, EngineError
from hearth.launch.gpus import VISIBLE_VARIABLE, GpuBoard, WorkerGpus, own_gpu
from hearth.launch.records import ProcessId
from hearth.launch.sidecars import LocalSidecar, LocalSidecars, wait_for_end
from hearth.sidecars import Command

PATIENCE_S = 20.0
SLEEP = "import time; time.sleep(600)"


def python(code: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(code)]


def read_lines(sidecar: object, wanted: int) -> list[str]:
    """The lines of a sidecar, once there are as many as wanted."""
    end_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_s:
        lines = list(sidecar.last_lines())  # type: ignore[attr-defined]
        if len(lines) >= wanted:
            return lines
        time.sleep(0.01)
    raise AssertionError("nothing was printed")


def is_gone(pid: int) -> bool:
    end_s = time.monotonic() + PATIENCE_S
    while ProcessId.of(pid) is not None and time.monotonic() < end_s:
        time.sleep(0.01)
    return ProcessId.of(pid) is None


def test_a_sidecar_is_told_its_address_and_environment(tmp_path: Path) -> None:
    sidecars = LocalSidecars(tmp_path)
    code = "import os, sys; print(sys.argv[1], sys.argv[2], os.environ['COLOR'])"
    started = sidecars.start(
        Command(name="one", argv=[*python(code), "{host}", "at:{port}"], env={"COLOR": "red"})
    )
    assert read_lines(started, 1) == [f"127.0.0.1 at:{started.port} red"]
    report = wait_for_end(started, PATIENCE_S)
    assert report is not None
    assert (report.code, report.signal) == (0, None)
    sidecars.close()


def test_its_port_is_kept_for_it_until_it_ends(tmp_path: Path) -> None:
    sidecars = LocalSidecars(tmp_path)
    code = """
        import socketserver, sys
        socketserver.TCPServer.allow_reuse_address = True
        socketserver.TCPServer(("127.0.0.1", int(sys.argv[1])), None)
        print("listens", flush=True)
    """
    started = sidecars.start(Command(name="one", argv=[*python(code), "{port}"]))
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", started.port))
    assert read_lines(started, 1) == ["listens"]
    assert wait_for_end(started, PATIENCE_S) is not None
    with socket.socket() as other:
        other.bind(("127.0.0.1", started.port))
    sidecars.close()


def test_its_end_is_told_with_its_last_lines(tmp_path: Path) -> None:
    sidecars = LocalSidecars(tmp_path)
    started = sidecars.start(Command(name="one", argv=python("print('why'); raise SystemExit(3)")))
    report = wait_for_end(started, PATIENCE_S)
    assert report is not None
    assert report.code == 3
    assert list(report.last_lines) == ["why"]
    sidecars.close()


def test_a_killed_one_says_by_what(tmp_path: Path) -> None:
    sidecars = LocalSidecars(tmp_path)
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    started = sidecars.start(Command(name="one", argv=python(code)))
    os.kill(int(read_lines(started, 1)[0]), signal.SIGKILL)
    report = wait_for_end(started, PATIENCE_S)
    assert report is not None
    assert report.signal == "SIGKILL"
    sidecars.close()


def test_stopping_ends_what_it_started_itself(tmp_path: Path) -> None:
    sidecars = LocalSidecars(tmp_path)
    code = """
        import signal, subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        print(child.pid, flush=True)
        time.sleep(60)
    """
    started = sidecars.start(Command(name="one", argv=python(code)))
    pid = int(read_lines(started, 1)[0])
    sidecars.close()
    assert started.poll() is not None
    assert is_gone(pid)


def test_one_that_does_not_listen_is_killed(tmp_path: Path) -> None:
    sidecars = LocalSidecars(tmp_path)
    code = """
        import os, signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print(os.getpid(), flush=True)
        time.sleep(60)
    """
    started = sidecars.start(Command(name="one", argv=python(code)))
    pid = int(read_lines(started, 1)[0])
    started.stop(grace_s=0.2)
    assert is_gone(pid)
    sidecars.close()


def test_it_ends_with_the_process_that_asked_for_it(tmp_path: Path) -> None:
    code = f"""
        import os, signal, sys, threading, time
        from pathlib import Path
        from hearth.sidecars import Command
        from hearth.launch.sidecars import LocalSidecars
        sleep = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
        # The thread that starts it ends at once; that must not end the sidecar.
        def start():
            global one
            one = LocalSidecars(Path({str(tmp_path)!r})).start(
                Command(name="one", argv=[sys.executable, "-c", sleep]))
        thread = threading.Thread(target=start)
        thread.start()
        thread.join()
        while not one.last_lines():
            time.sleep(0.01)
        time.sleep(0.2)
        assert one.poll() is None
        print(one.last_lines()[0], flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    worker = subprocess.run(python(code), capture_output=True, text=True, timeout=60, check=False)
    assert worker.returncode == -signal.SIGKILL, worker.stderr
    assert is_gone(int(worker.stdout))


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    sidecars = LocalSidecars(tmp_path)
    with pytest.raises(EngineError, match=r"one must be a program that is there, got '/no/such'"):
        sidecars.start(Command(name="one", argv=["/no/such"]))
    with pytest.raises(EngineError, match="plain name"):
        sidecars.start(Command(name="../up", argv=["true"]))
    sidecars.close()


def test_a_name_is_of_one_process_at_a_time(tmp_path: Path) -> None:
    sidecars = LocalSidecars(tmp_path)
    started = sidecars.start(Command(name="one", argv=python("import time; time.sleep(60)")))
    with pytest.raises(EngineError, match="must be new, got 'one'"):
        sidecars.start(Command(name="one", argv=["true"]))
    started.stop()
    again = sidecars.start(Command(name="one", argv=["true"]))
    report = wait_for_end(again, PATIENCE_S)
    assert report is not None
    assert report.code == 0
    sidecars.close()
    with pytest.raises(ClosedError):
        sidecars.start(Command(name="two", argv=["true"]))


@pytest.fixture
def board(tmp_path: Path) -> GpuBoard:
    return GpuBoard(tmp_path / "board", ["0", "1", "2", "3"])


def print_gpus(sidecars: LocalSidecars, name: str, gpus: float) -> str:
    """What a sidecar prints of the GPUs that it sees."""
    code = f"import os; print('sees', os.environ.get({VISIBLE_VARIABLE!r}))"
    sidecar = sidecars.start(Command(name=name, argv=python(code), gpus=gpus))
    report = wait_for_end(sidecar, PATIENCE_S)
    assert report is not None
    return report.last_lines[-1]


def start_sleeping(sidecars: LocalSidecars, name: str, gpus: float) -> LocalSidecar:
    return sidecars.start(Command(name=name, argv=python(SLEEP), gpus=gpus))


def test_sidecars_see_gpus_of_their_own_until_they_end(board: GpuBoard, tmp_path: Path) -> None:
    own = own_gpu(board, "cuda", alone=False)
    ranks = LocalSidecars(tmp_path / "trainer", gpus=WorkerGpus(board, own))
    servers = LocalSidecars(tmp_path / "deployment", gpus=WorkerGpus(board))
    try:
        assert start_sleeping(ranks, "rank-1", 1).gpus == ["1"]
        first = start_sleeping(servers, "replica-0", 2)
        assert first.gpus == ["2", "3"]
        # Of another worker's there is none free; the first are shared.
        assert start_sleeping(servers, "replica-1", 1).gpus == ["0"]
        first.stop()
        assert print_gpus(servers, "replica-0", 2) == "sees 2,3"
        ranks.close()
        assert print_gpus(servers, "replica-2", 3) == "sees 1,2,3"
    finally:
        ranks.close()
        servers.close()
    assert board.take(4) == ["0", "1", "2", "3"]


def test_a_worker_that_needs_more_than_the_machine_has_is_told(
    board: GpuBoard, tmp_path: Path
) -> None:
    sidecars = LocalSidecars(tmp_path / "deployment", gpus=WorkerGpus(board))
    try:
        for name in ("replica-0", "replica-1"):
            start_sleeping(sidecars, name, 2)
        with pytest.raises(
            EngineError,
            match=r"replica-2 must have 2 GPUs that no other process of its worker has, got 0 left "
            r"of 4 on this machine: lower replicas, tensor_parallel_size or ranks",
        ):
            start_sleeping(sidecars, "replica-2", 2)
    finally:
        sidecars.close()


def test_without_gpus_the_environment_stays_as_it_is(tmp_path: Path) -> None:
    sidecars = LocalSidecars(tmp_path / "own", gpus=WorkerGpus(GpuBoard(tmp_path / "board", [])))
    visible = os.environ.get(VISIBLE_VARIABLE)
    assert print_gpus(sidecars, "replica-0", 1) == f"sees {visible}"
    sidecars.close()


def test_processes_see_each_others_and_the_dead_use_none(tmp_path: Path) -> None:
    board = GpuBoard(tmp_path / "board", ["0", "1"])
    code = (
        "import sys; from pathlib import Path; from hearth.launch.gpus import GpuBoard; "
        "print(*GpuBoard(Path(sys.argv[1]), ['0', '1']).take(1))"
    )
    assert board.take(1) == ["0"]
    other = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "board")],
        capture_output=True,
        check=True,
        timeout=60,
    )
    assert other.stdout.split() == [b"1"]
    assert board.take(1) == ["1"]
