"""The timeline of a run, ``timeline.jsonl``: when each phase began and ended, and what happened.

``hearth.records.timeline`` reads it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from hearth.files import explain_refusals
from hearth.records.layout import TIMELINE
from hearth.records.timeline import STARTS, describe_process, read_events
from training.run.log_path import keep_older

_LANES = {
    "perf/sample_wait_time": ("loop", "wait"),
    "perf/train_wait_time": ("loop", "wait"),
    "perf/fwd_bwd_time": ("trainer", "forward_backward"),
    "perf/optim_step_time": ("trainer", "optim_step"),
    "perf/old_policy_forward_time": ("trainer", "old_policy_forward"),
    "perf/ref_forward_time": ("trainer", "ref_forward"),
    "perf/dcp_save_time": ("trainer", "save"),
    "perf/weight_sync_time": ("sync", "weight_sync"),
    "perf/eval_time": ("sampler", "eval"),
}
"""Lane and name of the phases that a run's clock measures."""

SHORTEST_S = 1e-3
"""Shorter phases are left out: nobody could see them."""


class Timeline:
    """Appends spans and events to a run's timeline; without a path it writes nothing.

    Spans are gathered and written with the next event or ``flush``.
    """

    def __init__(self, path: Path | None = None, run: str = "") -> None:
        self.run = run
        self.step = 0
        """The step under way."""
        self.version = 0
        """The weight version that is served."""
        self._path = path
        self._spans: list[dict[str, Any]] = []

    @classmethod
    @contextlib.contextmanager
    def open(cls, log_path: Path, resumed_step: int | None, **facts: Any) -> Iterator[Timeline]:
        """The timeline of one start of a run, which says at its end how the run ended.

        ``resumed_step`` is the step that the run goes on from; None starts a new one. ``facts`` are
        written with its first event.

        A run keeps its id over all its starts; a new one keeps an older file as
        ``timeline.N.jsonl``.
        """
        path = log_path / TIMELINE
        is_new = resumed_step is None
        before = [] if is_new else read_events(log_path)
        if is_new and keep_older(path):
            path.unlink()
        known = [event["run"] for event in before if event["name"] in STARTS and "run" in event]
        timeline = cls(path, known[-1] if known else secrets.token_hex(8))
        timeline.step = resumed_step or 0
        timeline._end_torn_line()
        known_facts = {"run": timeline.run, **describe_process(), **facts}
        timeline.event("start" if is_new else "resume", **known_facts)
        try:
            yield timeline
        except Exception as error:
            timeline.event("failed", f"{type(error).__name__}: {error}")
            raise
        except BaseException as error:  # Ctrl-C and SIGTERM end it cleanly
            timeline.event("end", f"stopped by {type(error).__name__}")
            raise
        timeline.event("end")

    def event(self, name: str, text: str = "", **facts: Any) -> None:
        """Write what has just happened, in the step under way where ``facts`` have no step.

        Raises:
            StorageError: the disk refused.
        """
        happened = {"type": "event", "time": time.time(), "step": self.step, "name": name}
        if text:
            happened["text"] = text
        self._spans.append(happened | facts)
        self.flush()

    def see_phase(self, phase: str, start: float, end: float) -> None:
        """Keep a phase of the run's clock, if it is one to be seen; times are unix times."""
        if phase in _LANES and end - start >= SHORTEST_S:
            self.see_span(*_LANES[phase], start, end)

    def see_span(self, lane: str, name: str, start: float, end: float, **facts: Any) -> None:
        """Keep a span of the step under way; times are unix times."""
        if self._path is None:
            return
        span = {"type": "span", "step": self.step, "lane": lane, "name": name}
        times = {"start": start, "end": end, "version": self.version}
        self._spans.append(span | times | facts)

    @contextlib.contextmanager
    def span(self, lane: str, name: str, **facts: Any) -> Iterator[None]:
        """The body as a span."""
        start = time.time()
        try:
            yield
        finally:
            self.see_span(lane, name, start, time.time(), **facts)

    def begin_step(self, step: int) -> None:
        """Write what is kept; what comes is of ``step``."""
        self.flush()
        self.step = step

    def flush(self) -> None:
        """Write what is kept.

        Raises:
            StorageError: the disk refused.
        """
        kept, self._spans = self._spans, []
        if self._path is None or not kept:
            return
        lines = b"".join(
            orjson.dumps(entry, default=str, option=orjson.OPT_APPEND_NEWLINE) for entry in kept
        )
        with explain_refusals(self._path), self._path.open("ab", buffering=0) as file:
            file.write(lines)

    def _end_torn_line(self) -> None:
        """Have what comes next begin a line of its own, behind one that a crash has cut."""
        path = self._path
        if path is None or not path.exists() or not path.stat().st_size:
            return
        with path.open("rb+") as file:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
