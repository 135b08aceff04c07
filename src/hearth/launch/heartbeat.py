"""How a worker that hangs is told from one that computes.

A thread of the worker writes twice a second that it lives, and what the thread that does the work
is at: into memory, since a disk that is full, slow or read-only must not look like a hang. The
launcher reads it through a link. A worker hangs when its heartbeats stop although nothing keeps
them (it is stopped, or all its threads wait for each other), or when the thread that works neither
moves nor computes (a driver's call that never returns). A long computation, a slow disk, a compiler
that runs as a child and a debugger are none of these.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hearth.files import explain_refusals
from hearth.launch.records import ProcessId

_BEAT_S = 0.5
_BEAT_BYTES = 2**14
_FRAMES = 4
_LONGEST_FRAME = 200
_ON_DISK = "D"
_STOPPED = "T"


@dataclass(frozen=True)
class Beat:
    """What a worker last wrote. Times are seconds of the machine's monotonic clock."""

    at_s: float
    phase: str
    moved_s: float
    """When the thread that works last moved, computed, or had nothing to do."""
    state: str
    """Of that thread, as the kernel has it: R, S, D."""
    stack: tuple[str, ...]
    """Where it is, the innermost call first."""


@dataclass(frozen=True)
class HangLimits:
    """From when on a worker counts as hung; in seconds."""

    stopped_s: float = 4.0
    """Without a heartbeat, of a process that is stopped."""
    silent_s: float = 8.0
    """Without a heartbeat or a movement, of what waits and computes nothing."""
    blocked_s: float = 120.0
    """The same of what waits for a disk, or keeps others from running while it computes."""
    look_every_s: float = 0.5


class Heartbeat:
    """The worker's side; a daemon thread writes until the process ends.

    ``path`` becomes a link to the memory, which ends with the process. ``note_phase`` is called by
    the thread that works; in the phases ``resting`` it may wait.

    Raises:
        StorageError: the disk refuses the link.
    """

    def __init__(self, path: Path, resting: Collection[str], every_s: float = _BEAT_S) -> None:
        descriptor = os.memfd_create("heartbeat")
        with explain_refusals(path):
            os.ftruncate(descriptor, _BEAT_BYTES)
            path.unlink(missing_ok=True)
            path.symlink_to(f"/proc/{os.getpid()}/fd/{descriptor}")
        # A write to mapped memory cannot be refused; one to a file can, whatever it is on.
        self._memory = mmap.mmap(descriptor, _BEAT_BYTES)
        self._resting = resting
        self._every_s = every_s
        self._phase = "starting"
        self._worker = threading.current_thread()
        self._seen: tuple[Any, ...] = ()
        self._children = -1
        self._moved_s = time.monotonic()
        self._write()
        threading.Thread(target=self._beat, name="hearth-heartbeat", daemon=True).start()

    def note_phase(self, phase: str) -> None:
        """The calling thread begins with ``phase``."""
        self._worker, self._phase = threading.current_thread(), phase

    def _beat(self) -> None:
        while True:
            time.sleep(self._every_s)
            self._write()

    def _write(self) -> None:
        now_s, worker, phase = time.monotonic(), self._worker, self._phase
        frame = sys._current_frames().get(worker.ident or 0)  # pyright: ignore[reportPrivateUsage]
        state, ticks = _read_stat(f"/proc/self/task/{worker.native_id}/stat")
        seen = (phase, id(frame), frame and frame.f_lasti, ticks)
        children = _children_ticks() if seen == self._seen else -1
        if phase in self._resting or seen != self._seen or children != self._children:
            self._moved_s = now_s
        self._seen, self._children = seen, children
        calls = itertools.islice(traceback.walk_stack(frame), _FRAMES) if frame else ()
        stack = tuple(
            f"{call.f_code.co_filename}:{line} in {call.f_code.co_name}"[-_LONGEST_FRAME:]
            for call, line in calls
        )
        content = json.dumps(asdict(Beat(now_s, phase, self._moved_s, state, stack))).encode()
        self._memory[:] = content.ljust(_BEAT_BYTES)


class HangDetector:
    """The launcher's side, for one process; ``find_hang`` may be called as often as one likes.

    ``watches_work`` also judges the thread that works, not the process alone: to be left out where
    that thread waits for other processes.
    """

    def __init__(
        self,
        path: Path,
        process: ProcessId,
        *,
        watches_work: bool,
        limits: HangLimits | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._stat = f"/proc/{process.pid}/stat"
        self._watches_work = watches_work
        self._limits = limits or HangLimits()
        self._now = now
        self._since_s = self._looked_s = now()
        self._ticks = -1

    def find_hang(self) -> str | None:
        """What shows that the process hangs; None while it does not."""
        now_s, before_s = self._now(), self._looked_s
        if now_s - before_s < self._limits.look_every_s:
            return None
        self._looked_s = now_s
        beat = read_beat(self._path)
        state, ticks = _read_stat(self._stat)
        computes, self._ticks = ticks != self._ticks, ticks
        if now_s - before_s > self._limits.stopped_s:
            # This process did not run itself, and then perhaps nobody did.
            self._since_s = now_s
            return None
        silent_s = now_s - max(self._since_s, beat.at_s if beat else 0.0)
        place = f"{beat.phase}, at {' < '.join(beat.stack)}" if beat else "starting"
        if state == _STOPPED and silent_s > self._limits.stopped_s:
            return f"it is stopped since {silent_s:.0f} s, in {place}"
        if beat is None:
            return None  # forked just now, or by a release without heartbeats
        if computes or state in (_ON_DISK, "t"):
            limit_s = self._limits.blocked_s
        else:
            limit_s = self._limits.silent_s
        if silent_s > limit_s and state != "t":
            return f"no thread of it has run for {silent_s:.0f} s, in {place}"
        if not self._watches_work:
            return None
        stuck_s = beat.at_s - max(beat.moved_s, self._since_s)
        limits = self._limits
        if stuck_s > (limits.blocked_s if beat.state == _ON_DISK else limits.silent_s):
            return f"nothing has moved for {stuck_s:.0f} s, in {place}"
        return None


def read_beat(path: Path) -> Beat | None:
    """The last heartbeat; None where none can be read."""
    try:
        content = json.loads(path.read_bytes())
        return Beat(**{**content, "stack": tuple(content["stack"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def is_stopped(pid: int) -> bool:
    """Whether a process is held by SIGSTOP or its like."""
    return _read_stat(f"/proc/{pid}/stat")[0] == _STOPPED


def _read_stat(path: str) -> tuple[str, int]:
    """State and CPU time, in ticks, of a thread or a process; ``("", 0)`` of one that is gone."""
    try:
        text = Path(path).read_text(encoding="ascii", errors="replace")
    except OSError:
        return "", 0
    # The name, in brackets, may hold anything; the fields after it are fixed.
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[11]) + int(fields[12])


def _children_ticks() -> int:
    """CPU time of this process's children, in ticks; of those that ended too."""
    ended = os.times()
    ticks = round((ended.children_user + ended.children_system) * os.sysconf("SC_CLK_TCK"))
    # A thread that ends meanwhile, or a process without a free descriptor, reads what it can.
    with contextlib.suppress(OSError):
        for path in Path("/proc/self/task").glob("*/children"):
            children = path.read_text(encoding="ascii").split()
            ticks += sum(_read_stat(f"/proc/{child}/stat")[1] for child in children)
    return ticks
