"""The numbers of a run's ``metrics.jsonl``, by name and step."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hearth.viewer.lines import GrowingFile

REWARDS = ("rollout/raw_reward", "rollout/reward")
"""The reward of what was sampled; older runs have only that of what was trained."""
LOSS = "train/loss"
"""The loss of recipes that train on given answers."""
STEP_SECONDS = "perf/step_wall_time"
_ROWS = ("rollout/total_sampled", "train/rows")
_MOST_NAMES = 5000
_SPARK = 40


class Columns:
    """Numbers by name, one for each step; NaN where a step has none."""

    def __init__(self) -> None:
        self.steps: array[int] = array("q")
        self.columns: dict[str, array[float]] = {}
        self._places: dict[int, int] = {}

    def add(self, step: int, record: Mapping[str, Any]) -> None:
        """Add the record of a step; one that came before is replaced."""
        place = self._places.get(step)
        if place is None:
            place = self._places[step] = len(self.steps)
            self.steps.append(step)
            for column in self.columns.values():
                column.append(math.nan)
        for name, value in record.items():
            if name in ("type", "step") or not isinstance(value, int | float):
                continue
            column = self.columns.get(name)
            if column is None:
                if len(self.columns) >= _MOST_NAMES:
                    continue
                column = self.columns[name] = array("d", [math.nan]) * len(self.steps)
            column[place] = _to_float(value)

    def last(self, *names: str) -> float | None:
        """The last number of the first of ``names`` that has one."""
        for name in names:
            for value in reversed(self.columns.get(name, ())):
                if math.isfinite(value):
                    return value
        return None

    def at(self, name: str, step: int) -> float | None:
        """A number of a step; None where it has none."""
        place = self._places.get(step)
        value = self.columns[name][place] if place is not None and name in self.columns else None
        return value if value is not None and math.isfinite(value) else None


class Metrics:
    """What the file says now; ``refresh`` reads on. One thread at a time."""

    def __init__(self, path: Path) -> None:
        self._file = GrowingFile(path)
        self.train = Columns()
        self.evals = Columns()
        self.rows_done = 0

    def refresh(self) -> None:
        """Read what was appended, or all of a file that was replaced."""
        is_new, lines = self._file.read_new()
        if is_new:
            self.train, self.evals, self.rows_done = Columns(), Columns(), 0
        for line in lines:
            self._add(line.content)

    @property
    def skipped(self) -> int:
        """Lines that are no records."""
        return self._file.skipped

    @property
    def step(self) -> int | None:
        """The last step."""
        return max(self.train.steps, default=None)

    def _add(self, record: dict[str, Any]) -> None:
        kind, step = record.get("type"), record.get("step")
        if type(step) is not int or not 0 <= step < 2**62:
            return
        if kind in ("train", "dropped"):
            rows = next((record[name] for name in _ROWS if name in record), None)
            if isinstance(rows, int | float) and math.isfinite(rows):
                self.rows_done += round(rows)
        if kind == "train":
            self.train.add(step, record)
        elif kind == "eval":
            self.evals.add(step, record)

    def spark(self) -> list[float | None]:
        """At most 40 rewards over the run, or losses: means of equal stretches."""
        name = next((name for name in (*REWARDS, LOSS) if name in self.train.columns), None)
        values = self.train.columns.get(name or "", array("d"))
        width = max(1, math.ceil(len(values) / _SPARK))
        return [_mean(values[start : start + width]) for start in range(0, len(values), width)]

    def evaluations(self) -> list[dict[str, float | None]]:
        """Step, accuracy, reward and loss of each evaluation."""
        return [
            {
                "step": step,
                "accuracy": self.evals.at("eval/accuracy", step),
                "reward": self.evals.at("eval/reward", step),
                "loss": self.evals.at("eval/loss", step),
            }
            for step in sorted(self.evals.steps)
        ]

    def step_ends(self) -> dict[int, float]:
        """Seconds at which each step ended, by the steps' own durations."""
        ends: dict[int, float] = {}
        seconds = 0.0
        durations = self.train.columns.get(STEP_SECONDS, array("d"))
        for step, duration in zip(self.train.steps, durations, strict=False):
            seconds += duration if math.isfinite(duration) else 0.0
            ends[step] = seconds
        return ends

    def series(self, names: Iterable[str], times: Mapping[int, float]) -> dict[str, Any]:
        """Steps in order, their times, and the numbers of ``names``; evaluations beside them."""
        wanted = list(names)
        return {**_select(self.train, wanted, times), "eval": _select(self.evals, wanted, times)}

    def names(self) -> list[str]:
        """All names, of evaluations too."""
        return sorted({*self.train.columns, *self.evals.columns})


def _select(columns: Columns, names: list[str], times: Mapping[int, float]) -> dict[str, Any]:
    order = sorted(range(len(columns.steps)), key=columns.steps.__getitem__)
    steps = [columns.steps[place] for place in order]
    return {
        "steps": steps,
        "times": [times.get(step) for step in steps],
        "series": {
            name: [columns.columns[name][place] for place in order]
            for name in names
            if name in columns.columns
        },
    }


def _mean(values: Iterable[float]) -> float | None:
    known = [value for value in values if math.isfinite(value)]
    return sum(known) / len(known) if known else None


def _to_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.nan
