"""Spans and events of a run (``timeline.jsonl``), and whether the run still runs."""

from __future__ import annotations

import functools
import json
import os
import re
import socket
import statistics
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from hearth.records.layout import SAMPLES, TIMELINE

State = Literal["running", "ended", "failed", "stalled", "killed"]

STARTS = ("start", "resume")
"""Events that say which process runs."""
OLDER_CHECKPOINT = "older_checkpoint"
"""What a run goes on from where the checkpoint of its resume cannot be loaded."""
ENDS = {"end": "ended", "failed": "failed"}
"""Events after which a run has a state of its own making."""

STALLED_AFTER_S = 120.0
STALLED_AFTER_STEPS = 10
"""A living run that has written nothing for this long, in seconds and in median steps, hangs."""
REMOTE_AFTER_S = 60.0
"""How fresh the files of a run on another machine must be to count as running."""
_TAIL_BYTES = 2**16


@dataclass(frozen=True)
class RunState:
    """Whether a run runs, and what its timeline says about it."""

    state: State
    run: str | None
    """The run's id; None where nothing is recorded."""
    recipe: str | None
    started: float | None
    """Unix time of the first start."""
    updated: float
    """Unix time at which a file of it changed last."""
    resumes: int
    pid: int | None
    host: str | None
    text: str
    """What the last event says, as the error of a failed run."""


def read_timeline(log_path: Path, names: Collection[str] | None = None) -> list[dict[str, Any]]:
    """The spans and events of a run in the order in which they were written; [] without a file.

    Given ``names``, those that have one of them; other lines are not parsed. A line that is none is
    left out: a crash cut it.
    """
    lines = _read(log_path / TIMELINE)
    if names is None:
        return list(_parse_lines(lines))
    named = re.compile(rb'"name":\s*"(?:' + "|".join(map(re.escape, names)).encode() + rb')"')
    kept = b"\n".join(line for line in lines.splitlines() if named.search(line))
    return [entry for entry in _parse_lines(kept) if entry.get("name") in names]


def read_events(log_path: Path) -> list[dict[str, Any]]:
    """The events of a run, without its spans."""
    lines = (line for line in _read(log_path / TIMELINE).splitlines() if b'"event"' in line)
    entries = _parse_lines(b"\n".join(lines))
    return [entry for entry in entries if entry["type"] == "event" and _is_event(entry)]


def read_state(
    log_path: Path, now: float | None = None, events: Sequence[Mapping[str, Any]] | None = None
) -> RunState:
    """Whether a run runs, from its files alone; ``now`` is a unix time.

    Who has read the timeline already gives its ``events``, those of ``STARTS`` and ``ENDS`` at
    least.
    """
    now = time.time() if now is None else now
    events = read_events(log_path) if events is None else events
    updated = _last_change(log_path)
    starts = [event for event in events if event["name"] in STARTS]
    last = next((event for event in reversed(events) if event["name"] in (*STARTS, *ENDS)), None)
    process = starts[-1] if starts else {}
    return RunState(
        state=_judge(last, log_path, now - updated),
        run=process.get("run"),
        recipe=process.get("recipe"),
        started=starts[0]["time"] if starts else None,
        updated=updated,
        resumes=sum(event["name"] == "resume" for event in starts),
        pid=process.get("pid"),
        host=process.get("host"),
        text=str(last.get("text", "")) if last else "",
    )


def describe_process() -> dict[str, Any]:
    """What tells this process from every other one: for the event that starts a run."""
    return {
        "pid": os.getpid(),
        "pid_started": psutil.Process().create_time(),
        "host": socket.gethostname(),
        "boot_id": _boot_id(),
    }


def _is_event(entry: Mapping[str, Any]) -> bool:
    return isinstance(entry.get("name"), str) and isinstance(entry.get("time"), int | float)


def _judge(last: Mapping[str, Any] | None, log_path: Path, quiet_s: float) -> State:
    if last is None:  # written before there were timelines
        return "running" if quiet_s < REMOTE_AFTER_S else "ended"
    if last["name"] in ENDS:
        return "ended" if last["name"] == "end" else "failed"
    if (last.get("host"), last.get("boot_id")) != (socket.gethostname(), _boot_id()):
        return "running" if quiet_s < REMOTE_AFTER_S else "killed"
    if not _is_alive(last):
        return "killed"
    if quiet_s <= STALLED_AFTER_S:
        return "running"
    return "stalled" if quiet_s > STALLED_AFTER_STEPS * _median_step_s(log_path) else "running"


def _is_alive(process: Mapping[str, Any]) -> bool:
    try:
        found = psutil.Process(process["pid"])
        # The clock of processes may be set a little meanwhile; another one has its number later.
        is_same = abs(found.create_time() - process.get("pid_started", 0.0)) < 2
        return is_same and found.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, KeyError, TypeError, ValueError):
        return False


@functools.cache
def _boot_id() -> str:
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else str(int(psutil.boot_time()))


def _last_change(log_path: Path) -> float:
    names = (TIMELINE, "metrics.jsonl", SAMPLES, "run.json", "config.json")
    paths = [path for name in names if (path := log_path / name).exists()]
    return max((path.stat().st_mtime for path in paths), default=0.0)


def _median_step_s(log_path: Path) -> float:
    seconds = [
        record["perf/step_wall_time"]
        for record in _parse_lines(_read(log_path / "metrics.jsonl", _TAIL_BYTES))
        if record["type"] == "train" and isinstance(record.get("perf/step_wall_time"), int | float)
    ]
    return statistics.median(seconds) if seconds else 0.0


def _read(path: Path, tail_bytes: int | None = None) -> bytes:
    if not path.exists():
        return b""
    with path.open("rb") as file:
        if tail_bytes is not None:
            file.seek(max(0, path.stat().st_size - tail_bytes))
        return file.read()


def _parse_lines(content: bytes) -> Iterator[dict[str, Any]]:
    for line in content.splitlines():
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict) and isinstance(entry.get("type"), str):
            yield entry
