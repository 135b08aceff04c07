"""Processes of a worker: what they are told, how their end is known, and that none is left."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import is_running, wait_until

from hearth.errors import ClosedError, EngineError
from hearth.launch.gpus import VISIBLE_VARIABLE, GpuBoard, WorkerGpus, own_gpu
from hearth.launch.sidecars import LocalSidecar, LocalSidecars, wait_for_end
from hearth.launch.spec import ExitReport
from hearth.sidecars import Command

PATIENCE_S = 20.0
SLEEP = "import time; time.sleep(600)"


def python(code: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(code)]


def read_line(sidecar: LocalSidecar) -> str:
    """The one line that a sidecar prints."""
    wait_until(lambda: bool(sidecar.last_lines()), PATIENCE_S, "a line")
    (line,) = sidecar.last_lines()
    return line


def await_end(sidecar: LocalSidecar) -> ExitReport:
    report = wait_for_end(sidecar, PATIENCE_S)
    assert report is not None
    return report


def wait_until_gone(pid: int) -> None:
    wait_until(lambda: not is_running(pid), PATIENCE_S, f"the end of {pid}")


@pytest.fixture
def sidecars(tmp_path: Path) -> Iterator[LocalSidecars]:
    sidecars = LocalSidecars(tmp_path)
    yield sidecars
    sidecars.close()


@pytest.fixture
def start(sidecars: LocalSidecars) -> Callable[..., LocalSidecar]:
    """Start Python code as the sidecar ``one``; keyword arguments are fields of its command."""

    def run(code: str, *arguments: str, **fields: Any) -> LocalSidecar:
        return sidecars.start(Command(name="one", argv=[*python(code), *arguments], **fields))

    return run


def test_a_sidecar_is_told_its_address_and_environment(start):
    code = "import os, sys; print(sys.argv[1], sys.argv[2], os.environ['COLOR'])"
    started = start(code, "{host}", "at:{port}", env={"COLOR": "red"})
    report = await_end(started)
    assert list(report.last_lines) == [f"127.0.0.1 at:{started.port} red"]
    assert (report.code, report.signal) == (0, None)


def test_its_port_is_kept_for_it_until_it_ends(start):
    code = """
        import socketserver, sys
        socketserver.TCPServer.allow_reuse_address = True
        socketserver.TCPServer(("127.0.0.1", int(sys.argv[1])), None)
        print("listens", flush=True)
    """
    started = start(code, "{port}")
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", started.port))
    assert read_line(started) == "listens"
    await_end(started)
    with socket.socket() as other:
        other.bind(("127.0.0.1", started.port))


def test_its_end_is_told_with_its_last_lines(start):
    started = start("print('why'); raise SystemExit(3)")
    report = await_end(started)
    assert report.code == 3
    assert list(report.last_lines) == ["why"]


def test_a_killed_one_says_by_what(start):
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    started = start(code)
    os.kill(int(read_line(started)), signal.SIGKILL)
    report = await_end(started)
    assert report.signal == "SIGKILL"


def test_one_that_is_stopped_hangs_and_is_killed(start):
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    started = start(code)
    os.kill(int(read_line(started)), signal.SIGSTOP)
    report = await_end(started)
    assert report.signal == "SIGKILL"
    assert re.match(r"hung, and was killed: it was stopped for \d s", report.describe())


def test_stopping_ends_what_it_started_itself(start, sidecars):
    code = """
        import signal, subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        print(child.pid, flush=True)
        time.sleep(60)
    """
    started = start(code)
    pid = int(read_line(started))
    sidecars.close()
    assert started.poll() is not None
    wait_until_gone(pid)


def test_one_that_does_not_listen_is_killed(start):
    code = """
        import os, signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print(os.getpid(), flush=True)
        time.sleep(60)
    """
    started = start(code)
    pid = int(read_line(started))
    started.stop(grace_s=0.2)
    wait_until_gone(pid)


def test_it_ends_with_the_process_that_asked_for_it(tmp_path):
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
    wait_until_gone(int(worker.stdout))


def test_what_is_not_there_is_refused(sidecars):
    with pytest.raises(EngineError, match=r"one must be a program that is there, got '/no/such'"):
        sidecars.start(Command(name="one", argv=["/no/such"]))
    with pytest.raises(EngineError, match="plain name"):
        sidecars.start(Command(name="../up", argv=["true"]))


def test_a_name_is_of_one_process_at_a_time(start, sidecars):
    started = start("import time; time.sleep(60)")
    with pytest.raises(EngineError, match="must be new, got 'one'"):
        sidecars.start(Command(name="one", argv=["true"]))
    started.stop()
    again = sidecars.start(Command(name="one", argv=["true"]))
    report = await_end(again)
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
    report = await_end(sidecar)
    return report.last_lines[-1]


def start_sleeping(sidecars: LocalSidecars, name: str, gpus: float) -> LocalSidecar:
    return sidecars.start(Command(name=name, argv=python(SLEEP), gpus=gpus))


def test_sidecars_see_gpus_of_their_own_until_they_end(board, tmp_path):
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


def test_a_worker_that_needs_more_than_the_machine_has_is_told(board, tmp_path):
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


def test_without_gpus_the_environment_stays_as_it_is(tmp_path):
    sidecars = LocalSidecars(tmp_path / "own", gpus=WorkerGpus(GpuBoard(tmp_path / "board", [])))
    visible = os.environ.get(VISIBLE_VARIABLE)
    assert print_gpus(sidecars, "replica-0", 1) == f"sees {visible}"
    sidecars.close()


def test_processes_see_each_others_and_the_dead_use_none(tmp_path):
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
