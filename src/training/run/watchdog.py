"""The end of a run that no longer gets anywhere: a report of who waits for whom, then the exit.

A run can stall without any error: a reward that never returns, an answer that never comes, two
parts that wait for each other. The loop cannot notice it, since the loop is what stands; a thread
of its own does.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from hearth.errors import ConfigError, HearthError
from hearth.files import write_file

logger = logging.getLogger(__name__)

REPORT = "stall.txt"

_NAME = "hearth-watchdog"
_LONGEST_PAUSE_S = 1.0
_LOOKS_PER_LIMIT = 20


class StalledError(HearthError, RuntimeError):
    """No step was finished for so long that none is expected any more."""


@dataclass(frozen=True)
class StallLimits:
    """When a run counts as stalled, and how long its end may take; in seconds.

    Raises:
        ConfigError: ``stall_timeout_s`` is not above 0.
    """

    stall_timeout_s: float
    """Without a finished step."""
    grace_s: float = 30.0
    """From the stall's report to the exit of the process."""
    patience_s: float = 5.0
    """For each part of the report: what hangs the run may hang it as well."""

    def __post_init__(self) -> None:
        if not self.stall_timeout_s > 0:
            raise ConfigError(f"stall_timeout_s must be > 0, got {self.stall_timeout_s}")


class Watchdog:
    """Notices a run that stalls; a context manager around the loop, with a daemon thread.

    Where ``beat`` is not called for ``stall_timeout_s`` seconds, ``report()`` (whose first line
    says who waits for whom) and the stacks of all Python threads are written to
    ``log_path/stall.txt`` and logged as an error. Then ``on_stall`` gets a ``StalledError``, on a
    thread of the watchdog's: it is to end the run, as with
    ``loop.call_soon_threadsafe(task.cancel)``. If the body has not ended ``grace_s`` seconds after
    that, ``exit(1)`` ends the process, whatever still runs.

    ``report``, ``on_stall``, the file and the log may fail, or hang with the run: each gets
    ``patience_s`` seconds. Only a thread that is stuck while it holds the interpreter's lock goes
    unnoticed. ``now`` is the clock, in seconds.
    """

    def __init__(
        self,
        limits: StallLimits,
        report: Callable[[], str],
        *,
        log_path: Path,
        on_stall: Callable[[StalledError], None],
        exit: Callable[[int], NoReturn] = os._exit,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits
        self._report = report
        self._path = log_path / REPORT
        self._on_stall = on_stall
        self._exit = exit
        self._now = now
        self._lock = threading.Lock()
        # Guarded by the lock: when the last step ended, and when the stall was reported.
        self._last = now()
        self._stalled_at: float | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=_NAME, daemon=True)

    def __enter__(self) -> Watchdog:
        self.beat()
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._closed.set()
        self._thread.join(self._limits.patience_s)

    def beat(self) -> None:
        """A step is finished; the next one has ``stall_timeout_s`` from now."""
        with self._lock:
            self._last = self._now()

    def check(self) -> None:
        """Judge the run as of now and act on it, as the thread does by itself."""
        with self._lock:
            now, stalled_at = self._now(), self._stalled_at
            silent_s = now - self._last
        if stalled_at is None and silent_s > self._limits.stall_timeout_s:
            self._tell(silent_s)
            with self._lock:
                self._stalled_at = self._now()
        elif stalled_at is not None and now - stalled_at > self._limits.grace_s:
            self._attempt("the last message", self._log_exit)
            self._exit(1)

    def _watch(self) -> None:
        shortest_s = min(self._limits.stall_timeout_s, self._limits.grace_s) / _LOOKS_PER_LIMIT
        pause_s = min(_LONGEST_PAUSE_S, max(0.01, shortest_s))
        while not self._closed.wait(pause_s):
            self.check()

    def _tell(self, silent_s: float) -> None:
        fact = (
            f"{round(silent_s, 1):g} s have passed without a finished step "
            f"(stall_timeout_s={self._limits.stall_timeout_s:g})"
        )
        report = self._attempt("the report", self._report).strip() or "no report"
        stacks = self._attempt("reading the stacks", thread_stacks)
        text = f"{fact}\n\n{report}\n\n{stacks}"
        place = self._attempt(f"writing {self._path}", lambda: self._write(text))
        error = StalledError(f"{fact}: {report.splitlines()[0]}; see {place}")
        self._attempt("logging", lambda: logger.error("%s\n\n%s\n\n%s", error, report, stacks))
        if not self._closed.is_set():
            self._attempt("on_stall", lambda: self._announce(error))

    def _write(self, text: str) -> Path:
        write_file(self._path, text.encode(errors="backslashreplace"))
        return self._path

    def _announce(self, error: StalledError) -> None:
        try:
            self._on_stall(error)
        except Exception:
            logger.exception("on_stall failed; the process exits in %g s", self._limits.grace_s)

    def _log_exit(self) -> None:
        logger.error(
            "the run has not ended %g s after its stall: the process exits", self._limits.grace_s
        )
        sys.stdout.flush()
        sys.stderr.flush()

    def _attempt(self, what: str, work: Callable[[], object]) -> str:
        """The text of what ``work`` returns, or of why it returned nothing in time.

        It runs on a thread of its own: what hangs the run may hang this as well.
        """
        outcome: list[str] = []

        def run() -> None:
            try:
                outcome.append(str(work()))
            except BaseException as error:  # noqa: BLE001 whatever it is, the run must end
                outcome.append(f"({what} failed with {type(error).__name__}: {error})")

        helper = threading.Thread(target=run, name=f"{_NAME}: {what}", daemon=True)
        helper.start()
        helper.join(self._limits.patience_s)
        return (
            outcome[0] if outcome else f"({what} did not end within {self._limits.patience_s:g} s)"
        )


def thread_stacks() -> str:
    """The stacks of all Python threads but the calling one, the main one first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    # Documented, whatever its name says.
    frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
    frames.pop(threading.get_ident(), None)
    main = threading.main_thread().ident
    order = sorted(frames, key=lambda ident: (ident != main, names.get(ident, ""), ident))
    return "\n".join(
        f"Thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frames[ident]))}"
        for ident in order
    )
