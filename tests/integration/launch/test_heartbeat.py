"""Workers that hang, and such as only look so, each in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.waiting import wait_until

from hearth.launch.heartbeat import HangDetector, HangLimits, read_beat
from hearth.launch.records import ProcessId

LIMITS = HangLimits(stopped_s=2.0, silent_s=2.0, blocked_s=1e4, look_every_s=0.05)
WORKER = """
import ctypes, resource, subprocess, sys, threading, time
from pathlib import Path
from hearth.launch.heartbeat import Heartbeat, read_beat

path = Path(sys.argv[1])
heartbeat = Heartbeat(path, {"idle"}, every_s=0.05)

def wait_for_a_lock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

def compute():
    while True:
        sum(range(10_000))

def compile():
    subprocess.run([sys.executable, "-c", "while True: pass"])

def rest_while_the_disk_refuses():
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    wait_for_a_lock()

def block_all_threads():
    ctypes.PyDLL(None).pause()  # it waits, and keeps the interpreter's lock

heartbeat.note_phase(sys.argv[2])
while read_beat(path).phase != sys.argv[2]:
    time.sleep(0.01)
globals()[sys.argv[3]]()
"""

Starter = Callable[..., tuple[subprocess.Popen[bytes], HangDetector]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starter]:
    processes: list[subprocess.Popen[bytes]] = []

    def run(what: str, phase: str = "forward") -> tuple[subprocess.Popen[bytes], HangDetector]:
        path = tmp_path / "heartbeat"
        command = [sys.executable, "-c", WORKER, str(path), phase, what]
        process = subprocess.Popen(command, start_new_session=True)
        processes.append(process)
        wait_until(lambda: (beat := read_beat(path)) is not None and beat.phase == phase)
        identity = ProcessId.of(process.pid)
        assert identity is not None
        return process, HangDetector(path, identity, watches_work=True, limits=LIMITS)

    yield run
    for process in processes:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def look(detector: HangDetector, seconds: float) -> str | None:
    """The first hang that is found within that time."""
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        if hang := detector.find_hang():
            return hang
        time.sleep(0.05)
    return None


def test_work_that_waits_without_end_is_found_with_its_phase_and_place(start):
    _, detector = start("wait_for_a_lock")

    hang = look(detector, 240.0)

    assert hang is not None
    assert hang.startswith("nothing has moved for ")
    assert "in forward, at <string>:" in hang
    assert "in wait_for_a_lock" in hang


@pytest.mark.parametrize(
    ("what", "phase"),
    [
        ("compute", "forward"),
        ("compile", "forward"),
        ("wait_for_a_lock", "idle"),
        ("rest_while_the_disk_refuses", "idle"),
    ],
)
def test_what_computes_or_compiles_or_rests_does_not_hang(start, what, phase):
    _, detector = start(what, phase)

    assert look(detector, 3 * LIMITS.silent_s) is None


def test_a_process_that_is_stopped_is_found(start):
    process, detector = start("compute")
    process.send_signal(signal.SIGSTOP)

    hang = look(detector, 240.0)

    assert hang is not None
    assert hang.startswith("it is stopped since ")


def test_a_process_all_threads_of_which_wait_is_found(start):
    _, detector = start("block_all_threads")

    hang = look(detector, 240.0)

    assert hang is not None
    assert hang.startswith("no thread of it has run for ")


def test_a_launcher_that_was_stopped_itself_accuses_nobody(start):
    process, detector = start("compute")
    assert detector.find_hang() is None
    process.send_signal(signal.SIGSTOP)
    time.sleep(1.2 * LIMITS.stopped_s)  # nothing has looked meanwhile

    process.send_signal(signal.SIGCONT)
    assert detector.find_hang() is None
    assert look(detector, LIMITS.stopped_s) is None


def test_a_worker_of_a_release_without_heartbeats_is_not_accused(tmp_path):
    process = subprocess.Popen(["sleep", "240"], start_new_session=True)
    identity = ProcessId.of(process.pid)
    assert identity is not None
    detector = HangDetector(tmp_path / "none", identity, watches_work=True, limits=LIMITS)

    assert look(detector, 2 * LIMITS.silent_s) is None

    process.send_signal(signal.SIGSTOP)
    assert "it is stopped since" in str(look(detector, 240.0))
    process.kill()
    process.wait()
