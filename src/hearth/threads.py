"""One budget of CPU threads for all workers of a platform.

Two workers that compute at once, each with a thread on every core, wait for each other's cores in
every parallel loop, and are slower than one after the other. So a worker that computes alone uses
all threads, and workers that compute at the same time share them. A worker reads its share when an
operation begins and during it (``refresh``): in every decoding step, in every layer of a forward or
backward pass.

A board records which workers compute: one record per worker, in memory if the workers are threads
of one process, in a file if they are processes. A worker that died does not count.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np

logger = logging.getLogger(__name__)

RESTING = frozenset({"idle", "load_snapshot"})
"""Phases without parallel work: nothing is computed, or one thread copies."""
_RECORDS = 64
_PID, _COMPUTES = 0, 1
_FEW_VALUES = 2**23

_this = threading.local()


class ThreadBudget:
    """``total`` threads (by default torch's own number), shared by the workers that compute.

    ``board`` is a file that all processes of the budget share; None keeps the board in memory.
    """

    def __init__(self, total: int | None = None, board: Path | None = None) -> None:
        import torch  # here, so that a process that only launches workers need not import it

        self.total = total or torch.get_num_threads()
        self._set, self._get = torch.set_num_threads, torch.get_num_threads
        self._lock = threading.Lock()
        self._descriptor = _open_board(board) if board is not None else None
        size = _RECORDS * 2 * np.dtype(np.int32).itemsize
        memory = mmap.mmap(-1 if self._descriptor is None else self._descriptor, size)
        self._records = np.frombuffer(memory, np.int32).reshape(_RECORDS, 2)

    def add_member(self) -> Member:
        """Take a record on the board, until ``Member.leave`` or the process's end."""
        with self._hold_lock():
            for number, (pid, _) in enumerate(self._records):
                if pid == 0 or not _is_alive(int(pid)):
                    self._records[number] = os.getpid(), 0
                    return Member(self, number)
        logger.warning(
            "more than %d workers: this one does not share the budget of threads", _RECORDS
        )
        return Member(self, None)

    def note(self, number: int, *, computes: bool) -> None:
        """Record whether a member computes."""
        self._records[number, _COMPUTES] = computes

    def free(self, number: int) -> None:
        """Make a member's record available to the next member."""
        self._records[number] = 0, 0

    def share(self, number: int | None) -> int:
        """The threads of a member that computes: at least one, and all if no other member does."""
        if number is None:
            return self.total
        # Other processes write the board at any time, so this reads a copy. A record counts when it
        # has an owner and computes.
        records = self._records.copy()
        own = os.getpid()
        busy = [
            record
            for record in np.flatnonzero(records.all(axis=1)).tolist()
            if records[record, _PID] == own or _is_alive(int(records[record, _PID]))
        ]
        if number not in busy:
            return self.total
        each, left = divmod(self.total, len(busy))
        return max(1, each + (busy.index(number) < left))

    def use(self, threads: int) -> None:
        """Set the number of threads of this thread's operations."""
        if self._get() != threads:
            self._set(threads)

    @contextlib.contextmanager
    def _hold_lock(self) -> Iterator[None]:
        with self._lock:
            if self._descriptor is None:
                yield
                return
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)


class Member:
    """One worker's record in a budget."""

    def __init__(self, budget: ThreadBudget, number: int | None) -> None:
        self._budget = budget
        self.number = number
        """Index of its record on the board; None without a record."""

    def note(self, phase: str) -> None:
        """Record that ``phase`` begins. Call it on the computing thread, before the end of an
        operation is reported: the receiver of that report may compute next."""
        computes = phase not in RESTING
        _this.member = self if computes else None
        if self.number is not None:
            self._budget.note(self.number, computes=computes)
        self.take_share()

    def take_share(self) -> None:
        """Use this member's current share."""
        self._budget.use(self._budget.share(self.number))

    def leave(self) -> None:
        """Give the record back."""
        number, self.number = self.number, None
        if number is not None:
            self._budget.free(number)


def refresh() -> None:
    """Use this thread's current share; does nothing in a thread that is no member."""
    member: Member | None = getattr(_this, "member", None)
    if member is not None:
        member.take_share()


@contextlib.contextmanager
def use_one_if_small(values: int) -> Iterator[None]:
    """Inside the ``with`` operations on this many ``values`` have one thread, unless they are many.

    Waking a thread takes longer than its part of a small operation.
    """
    import torch  # as in ThreadBudget

    before = torch.get_num_threads()
    torch.set_num_threads(1 if values < _FEW_VALUES else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _open_board(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    size = _RECORDS * 2 * np.dtype(np.int32).itemsize
    if os.fstat(descriptor).st_size < size:
        os.ftruncate(descriptor, size)
    return descriptor


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
