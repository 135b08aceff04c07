"""One run: its settings, numbers, events and state, as its files say them now."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hearth.errors import HearthError, NotFoundError
from hearth.records.layout import RESCORED, SAMPLES, TIMELINE, SampleFile, list_files
from hearth.records.timeline import RunState, read_state
from hearth.viewer.lines import read_object
from hearth.viewer.metrics import LOSS, REWARDS, Metrics
from hearth.viewer.timeline import RecordedTimeline

METRICS = "metrics.jsonl"
CONFIG = "config.json"
_STATE_FOR_S = 1.0
"""How long a state holds while no file changes."""

Stamp = tuple[int, int, int]
"""Inode, size and time of change."""
Signature = tuple[Stamp | None, ...]


class RecordedRun:
    """A run's folder. Any thread may call it."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.name = name
        self.lock = threading.RLock()
        self._metrics = Metrics(folder / METRICS)
        self._timeline = RecordedTimeline(folder / TIMELINE)
        self._read_at: Signature = ()
        self._state: tuple[Signature, float, RunState] | None = None
        self._objects: dict[str, tuple[Stamp | None, dict[str, Any]]] = {}

    @property
    def key(self) -> str:
        """The run's name in URLs."""
        return self.name.replace("/", "~")

    def path(self, *parts: str) -> Path:
        """A file of the run.

        Raises:
            NotFoundError: it leads out of the run's folder.
        """
        path = self.folder.joinpath(*parts)
        if not is_inside(self.folder, path):
            raise NotFoundError(
                f"{'/'.join(parts)} must be inside of the run, got a link out of it"
            )
        return path

    def signature(self) -> Signature:
        """Changes whenever a file of the run has grown, come or gone."""
        names = (METRICS, TIMELINE, SAMPLES, RESCORED, CONFIG, "run.json")
        return tuple(stamp(self.folder / name) for name in names)

    def refresh(self) -> None:
        """Read what the run has written since the last call."""
        with self.lock:
            signature = self.signature()
            if signature == self._read_at:
                return
            if is_inside(self.folder, self.folder / METRICS):
                self._metrics.refresh()
            if is_inside(self.folder, self.folder / TIMELINE):
                self._timeline.refresh()
            self._read_at = signature

    @property
    def metrics(self) -> Metrics:
        """The numbers as of the last ``refresh``."""
        return self._metrics

    @property
    def timeline(self) -> RecordedTimeline:
        """The events as of the last ``refresh``."""
        return self._timeline

    def config(self) -> dict[str, Any]:
        """The run's settings; {} where there are none."""
        return self._read_object(CONFIG)

    def state(self) -> RunState:
        """Whether the run runs."""
        with self.lock:
            signature, now = self.signature(), time.time()
            known = self._state
            if known is None or known[0] != signature or now - known[1] > _STATE_FOR_S:
                # A file that is gone within the look says nothing new.
                try:
                    self.refresh()
                    state = read_state(self.folder, now, self._timeline.turns)
                except (OSError, HearthError, KeyError, TypeError, ValueError):
                    if known is None:
                        state = RunState("killed", None, None, None, 0.0, 0, None, None, "")
                    else:
                        state = known[2]
                known = self._state = (signature, now, state)
            return known[2]

    def files(self) -> list[SampleFile]:
        """The files of samples; one that leads out of the run is left out."""
        if not is_inside(self.folder, self.folder / SAMPLES):
            return []
        try:
            return [
                file
                for file in list_files(self.folder)
                if not file.path.is_symlink() or is_inside(self.folder, file.path)
            ]
        except OSError:
            return []

    def list_rescored(self) -> list[str]:
        """Names under which the samples were scored again."""
        if not is_inside(self.folder, self.folder / RESCORED):
            return []
        paths = sorted((self.folder / RESCORED).glob("*.parquet"))
        return [path.stem for path in paths if is_inside(self.folder, path)]

    def times(self) -> Mapping[int, float]:
        """Seconds since the run's start at which steps ended."""
        return {**self._metrics.step_ends(), **self._timeline.step_ends()}

    def row(self) -> dict[str, Any]:
        """The run in the table of runs."""
        self.refresh()
        config, state, metrics = self.config(), self.state(), self._metrics
        durations = metrics.step_ends()
        duration = self._timeline.duration
        if duration is None and durations:
            duration = max(durations.values())
        return {
            "id": state.run or self.name,
            "name": self.name,
            "key": self.key,
            "path": str(self.folder),
            "state": state.state,
            "state_text": state.text,
            "recipe": state.recipe or self._timeline.start().get("recipe"),
            "base_model": _text(config.get("base_model")),
            "policy_loss": _text(config.get("policy_loss")),
            "step": metrics.step,
            "rows_done": metrics.rows_done or None,
            "rows_total": self._rows_total(config),
            "reward": metrics.train.last(*REWARDS),
            "loss": metrics.train.last(LOSS),
            "held_out": metrics.evals.last("eval/accuracy"),
            "started": state.started or _read_change_time(self.folder / CONFIG),
            "updated": state.updated or None,
            "duration_s": duration,
            "resumes": state.resumes,
            "spark": metrics.spark(),
        }

    def read_changed_settings(self) -> dict[str, Any]:
        """Settings that differ from the recipe's defaults, as [default, value]."""
        changed = self._timeline.start().get("changed")
        return changed if isinstance(changed, dict) else {}

    def checkpoints(self) -> list[dict[str, Any]]:
        """What the run's manifest says about its checkpoints."""
        found = self._read_object("run.json").get("checkpoints")
        return (
            [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []
        )

    def events(self) -> list[dict[str, Any]]:
        """Events in order; the manifest's checkpoints where the run has no timeline."""
        events = self._timeline.list_events()
        if events:
            return events
        times = self.times()
        return [
            {
                "time": None,
                "seconds": times.get(entry["step"]),
                "step": entry["step"],
                "name": "checkpoint",
                "text": str(entry.get("name", "")),
            }
            for entry in self.checkpoints()
            if type(entry.get("step")) is int
        ]

    def _rows_total(self, config: Mapping[str, Any]) -> int | None:
        rows = self._read_object("trained_on.json").get("num_rows")
        epochs = config.get("epochs", 1)
        return rows * epochs if type(rows) is int and type(epochs) is int else None

    def _read_object(self, name: str) -> dict[str, Any]:
        with self.lock:
            path = self.folder / name
            now = stamp(path)
            known = self._objects.get(name)
            if known is None or known[0] != now:
                content = read_object(path) if is_inside(self.folder, path) else {}
                known = self._objects[name] = (now, content)
            return known[1]


def is_inside(folder: Path, path: Path) -> bool:
    """Whether a path, links followed, is in a folder whose own path has no links."""
    try:
        return path.resolve().is_relative_to(folder)
    except (OSError, RuntimeError):
        return False


def stamp(path: Path) -> Stamp | None:
    """What changes when a file or a folder's list of names does; None where there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _read_change_time(path: Path) -> float | None:
    found = stamp(path)
    return found[2] / 1e9 if found is not None else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
