"""The files of a worker's folder, through which its processes inform each other. JSON only.

    <folder>/log            what the worker printed and logged; log.1 is what came before
    <folder>/phase          what it does right now
    <folder>/heartbeat      when it last lived, and where its work was then; by the worker
    <folder>/process.json   which process it is and where it answers; by the forkserver, at the fork
    <folder>/ready          it answers; by the worker
    <folder>/failure.json   why it could not start or go on; by the worker
    <folder>/exit.json      how it ended; by the forkserver, when it reaps it

After a crash of any of them the folder still has what was last known.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import select
import signal
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hearth.files import explain_refusals, write_file
from hearth.launch.spec import ExitReport

logger = logging.getLogger(__name__)

LOG_LIMIT_BYTES = 10 * 2**20
"""A log that is longer is put aside when its worker starts again."""

_PHASE_BYTES = 64
_EXIT_RECORD_S = 1.5
_TAIL_BYTES = 2**16
_TAIL_LINES = 20
_LONGEST_LINE = 300
_START = re.compile(r"hearth\.launch\.child worker \S+: process \d")
_EXCEPTION = re.compile(r"(\w+\.)*\w+(Error|Exception): ")


@dataclass(frozen=True)
class ProcessId:
    """One process, and no other that later gets its number."""

    pid: int
    started: int
    """Clock ticks from boot to its start, as the kernel counts them."""

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """The process that has this number now; None where there is none, or only its remains."""
        try:
            text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        except OSError:
            return None
        # The name, in brackets, may hold anything; the fields after it are fixed.
        fields = text.rpartition(")")[2].split()
        return None if fields[0] in "ZX" else cls(pid, int(fields[19]))

    def is_alive(self) -> bool:
        """Whether it still runs."""
        return ProcessId.of(self.pid) == self

    def open(self) -> int | None:
        """A descriptor that becomes readable when it ends; None when it has ended already."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return None
        # Between the question and the descriptor the number may have gone to another.
        if self.is_alive():
            return descriptor
        os.close(descriptor)
        return None


class ProcessHandle:
    """A process that is watched through a descriptor; it need not be a child of this one.

    Safe to use from several threads.
    """

    def __init__(self, identity: ProcessId) -> None:
        self.identity = identity
        self._descriptor = identity.open()
        if self._descriptor is not None:
            # Not sooner: another thread may be waiting on it.
            weakref.finalize(self, os.close, self._descriptor)

    def wait(self, timeout_s: float | None) -> bool:
        """Whether it has ended, after ``timeout_s`` at most."""
        if self._descriptor is None:
            return True
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return bool(poll.poll(None if timeout_s is None else max(0, timeout_s) * 1000))

    def send(self, number: signal.Signals) -> None:
        """Send it a signal, if it still runs."""
        if self._descriptor is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, number)

    def kill_group(self) -> None:
        """End it and all that it started."""
        if not self.wait(0):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.identity.pid, signal.SIGKILL)


@dataclass(frozen=True)
class ProcessFacts:
    """What ``process.json`` says."""

    process: ProcessId
    socket: str
    forkserver: ProcessId
    """Its parent, which writes ``exit.json``."""


class WorkerFolder:
    """One worker's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.log = path / "log"
        self.phase = path / "phase"
        self.heartbeat = path / "heartbeat"
        self.ready = path / "ready"
        self.process = path / "process.json"
        self.failure = path / "failure.json"
        self.exit = path / "exit.json"

    def prepare(self) -> None:
        """Make the folder for a new process: of an earlier one only the log stays.

        Raises:
            StorageError: the disk refused.
        """
        records = (self.phase, self.heartbeat, self.ready, self.process, self.failure, self.exit)
        with explain_refusals(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            for path in records:
                path.unlink(missing_ok=True)
            put_long_log_aside(self.log)

    def write_process(self, facts: ProcessFacts) -> None:
        """Write which process the worker is."""
        content = {
            "pid": facts.process.pid,
            "started": facts.process.started,
            "socket": facts.socket,
            "forkserver_pid": facts.forkserver.pid,
            "forkserver_started": facts.forkserver.started,
        }
        write_json(self.process, content)

    def read_process(self) -> ProcessFacts | None:
        """Which process the worker is or was; None before it has one, or where that is damaged."""
        content = read_json(self.process)
        if content is None:
            return None
        names = ("pid", "started", "forkserver_pid", "forkserver_started")
        values = [content.get(name) for name in names]
        # A signal to process 0 or -1 would reach others.
        numbers = [value for value in values if type(value) is int and value > 0]
        socket = content.get("socket")
        if not isinstance(socket, str) or len(numbers) < len(names):
            logger.warning("%s must say which process it is, got %.200r", self.process, content)
            return None
        pid, started, forkserver_pid, forkserver_started = numbers
        return ProcessFacts(
            ProcessId(pid, started), socket, ProcessId(forkserver_pid, forkserver_started)
        )

    def wait_for_exit(self, forkserver: ProcessId) -> None:
        """Give a living forkserver the time to write down how its child ended."""
        end_s = time.monotonic() + _EXIT_RECORD_S
        while not self.exit.exists() and time.monotonic() < end_s and forkserver.is_alive():
            time.sleep(0.002)

    def report(self, otherwise: str) -> ExitReport:
        """How the worker ended; ``otherwise`` is the reason where none was recorded."""
        ended = read_end(self.exit)
        report = ExitReport(
            phase=read_phase(self.phase),
            last_lines=last_lines(self.log),
            reason=read_end(self.failure).reason,
        )
        if ended.peak_rss_mb is None or (ended.code is None and ended.signal is None):
            return replace(report, reason=report.reason or otherwise)
        return replace(report, code=ended.code, signal=ended.signal, peak_rss_mb=ended.peak_rss_mb)


def remove_socket_folder(folder: Path, workers_dir: Path) -> None:
    """Remove a folder of sockets, unless a living worker has one there or will have."""
    for path in workers_dir.glob("*"):
        facts = WorkerFolder(path).read_process()
        if facts and Path(facts.socket).parent == folder and facts.process.is_alive():
            return
    with contextlib.suppress(OSError):
        folder.rmdir()


class PhaseFile:
    """A marker of fixed size, overwritten in place by one system call of a few microseconds.

    What was written stays readable however the process ends. Safe to use from several threads.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def __call__(self, phase: str) -> None:
        """Say that ``phase`` begins; longer than 64 bytes it is cut. A disk may refuse it."""
        with contextlib.suppress(OSError):
            os.pwrite(self._descriptor, phase.encode()[:_PHASE_BYTES].ljust(_PHASE_BYTES), 0)

    def close(self) -> None:
        """Write no more; the file stays."""
        os.close(self._descriptor)


def put_long_log_aside(log: Path) -> None:
    """Have a log that is too long begin anew; ``log.1`` is what came before."""
    with contextlib.suppress(FileNotFoundError):
        if log.stat().st_size > LOG_LIMIT_BYTES:
            log.replace(log.with_name("log.1"))


def read_phase(path: Path) -> str | None:
    """The last phase that was written; None where there is none."""
    try:
        return path.read_bytes().decode(errors="replace").strip() or None
    except OSError:
        return None


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Put ``content`` at ``path``: whole, or not at all."""
    # What it says is of processes, which a power cut ends as well.
    write_file(path, json.dumps(content).encode(), durable=False)


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None where there is no such file, or something else in it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def read_end(path: Path) -> ExitReport:
    """What ``exit.json`` or ``failure.json`` says; odd values are unknown."""
    content = read_json(path) or {}
    kinds = {"code": int, "signal": str, "peak_rss_mb": (int, float), "reason": str}
    known: dict[str, Any] = {
        name: content[name] for name, kind in kinds.items() if isinstance(content.get(name), kind)
    }
    return ExitReport(**known)


def last_lines(path: Path) -> tuple[str, ...]:
    """The end of a log, some twenty lines of its last process.

    Empty lines are left out, long ones cut.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ()
    # The last line of a crash lists every extension module there is.
    useful = (line.rstrip() for line in text.splitlines() if not line.startswith("Extension mod"))
    lines = [line[:_LONGEST_LINE] for line in useful if line]
    starts = [place for place, line in enumerate(lines) if _START.search(line)]
    lines = lines[starts[-1] if starts else 0 :]
    # A crash says what it is first, and then where each thread was.
    before, tail = lines[:-_TAIL_LINES], lines[-_TAIL_LINES:]
    crash = [line for line in before if line.startswith("Fatal Python error")]
    if any("root cause above" in line for line in tail):
        # One process of several points to another's exception.
        crash += [line for line in before if _EXCEPTION.match(line)]
    return (*crash[-1:], *tail)
