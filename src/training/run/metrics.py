"""Where a run's numbers go: JSON lines always, trackers when asked for, and the terminal."""

from __future__ import annotations

import contextlib
import io
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from hearth.files import explain_refusals, write_file
from training.run.log_path import keep_older
from training.run.trackers import Metrics, Tracker

logger = logging.getLogger(__name__)


class MetricsLog:
    """Appends one JSON object per record to ``log_path/metrics.jsonl`` and forwards it.

    Records hold ``type``, ``step`` and the metrics; keys are in the order they were given. Wall
    times stand only under ``perf/``. A new run keeps an older file as ``metrics.N.jsonl``.
    """

    def __init__(self, path: Path, trackers: Sequence[Tracker] = ()) -> None:
        self.path = path
        self._file = self._open_file()
        self._trackers = trackers

    @classmethod
    @contextlib.contextmanager
    def open(
        cls, log_path: Path, trackers: Sequence[Tracker] = (), resumed_step: int | None = None
    ) -> Iterator[MetricsLog]:
        """The log of one run, closed at the end of the ``with``.

        A resumed run goes on behind the records of its checkpoint; those of steps that it takes
        again are left in the older file.

        Raises:
            StorageError: the disk refused.
        """
        path = log_path / "metrics.jsonl"
        with explain_refusals(path):
            keep_older(path)
        if path.exists():
            kept = b"".join(_records_until(path, resumed_step or 0))
            write_file(path, kept if resumed_step is not None else b"")
        log = cls(path, trackers)
        try:
            yield log
        finally:
            log.close()

    def write(self, kind: str, step: int, metrics: Metrics) -> None:
        """Write one record, whole or not at all; it is in the file when this returns.

        Raises:
            StorageError: the disk refused.
        """
        record = {"type": kind, "step": step, **metrics}
        line = memoryview(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE))
        with explain_refusals(self.path):
            end = os.fstat(self._file.fileno()).st_size
            try:
                while line:
                    line = line[self._file.write(line) or 0 :]
            except OSError:
                self._file.truncate(end)
                raise
        for tracker in self._trackers:
            tracker.log(step, metrics)

    def drop_after(self, step: int) -> None:
        """Leave out the records of later steps, which are taken again."""
        self._file.close()
        write_file(self.path, b"".join(_records_until(self.path, step)))
        self._file = self._open_file()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _open_file(self) -> io.FileIO:
        with explain_refusals(self.path):
            return self.path.open("ab", buffering=0)


def read_records(path: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The records of a ``metrics.jsonl``, those of one ``type`` with ``kind``; none without a file.

    A line that is no record is left out and said: a crash cut it, or somebody else wrote it.
    """
    records: list[dict[str, Any]] = []
    odd: list[int] = []
    for number, line in enumerate(path.read_bytes().splitlines() if path.exists() else (), 1):
        record = _parse_record(line)
        if record is None:
            odd.append(number)
        elif kind is None or record["type"] == kind:
            records.append(record)
    if odd:
        logger.warning("%s: lines %s are no records and are left out", path, odd[:8])
    return records


def _parse_record(line: bytes) -> dict[str, Any] | None:
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    is_record = isinstance(record, dict) and isinstance(record.get("type"), str)
    return record if is_record and type(record.get("step")) is int else None


def _records_until(path: Path, step: int) -> Iterator[bytes]:
    for line in path.read_bytes().splitlines():
        record = _parse_record(line)
        if record is not None and record["step"] <= step:
            yield line + b"\n"  # the last may have been cut just before it


class Display:
    """Progress of a run: a live bar on a terminal, one plain line per step elsewhere."""

    def __init__(self, total_rows: int, console: Console | None = None) -> None:
        self.console = console or Console()
        self._bar: Progress | None = None
        if self.console.is_terminal:
            self._bar = Progress(
                BarColumn(bar_width=6),
                MofNCompleteColumn(),
                TimeRemainingColumn(compact=True),
                # What does not fit into the rest of the line is cut: a second line would stay.
                TextColumn(
                    "{task.description}",
                    table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"),
                ),
                console=self.console,
                expand=True,
                transient=True,
            )
            self._task = self._bar.add_task("", total=total_rows)
            self._bar.start()

    @classmethod
    @contextlib.contextmanager
    def open(cls, total_rows: int) -> Iterator[Display]:
        """The display of one run, taken away at the end of the ``with``."""
        display = cls(total_rows)
        try:
            yield display
        finally:
            display.close()

    def note(self, line: str) -> None:
        """Print one line above the bar."""
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def rows(self, rows_done: int) -> None:
        """Move the bar: so many rows are finished, trained or dropped."""
        if self._bar is not None:
            self._bar.update(self._task, completed=rows_done)

    def step(self, step: int, rows_done: int, metrics: Metrics) -> None:
        """Show a finished step."""
        line = f"step {step:>4}  " + "  ".join(_format_metrics(metrics))
        if self._bar is None:
            self.note(line)
        else:
            self._bar.update(self._task, completed=rows_done, description=line)

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _format_metrics(metrics: Metrics) -> list[str]:
    sampled, trained = "rollout/raw_reward", "rollout/reward"
    wanted = (
        ("reward", sampled if sampled in metrics else trained, ".3f"),
        ("loss", "train/loss", ".4f"),
        ("groups", "rollout/valid_prompt_groups", ".0f"),
        ("kl", "train/mean_kl", ".4f"),
        ("grad", "train/grad_norm", ".3f"),
        ("len", "rollout/response_len/mean", ".1f"),
        ("held-out", "eval/reward", ".3f"),
        ("s", "perf/step_wall_time", ".2f"),
    )
    return [f"{name} {metrics[key]:{form}}" for name, key, form in wanted if key in metrics]
