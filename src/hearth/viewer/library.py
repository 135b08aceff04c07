"""Which runs there are: the folders that were named, and runs a few levels below them."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hearth.errors import ConfigError, NotFoundError
from hearth.records.layout import SAMPLES, TIMELINE
from hearth.viewer.run import METRICS, RecordedRun

DEPTH = 3
"""Levels below a named folder at which runs are looked for."""
MOST_RUNS = 2000
_SCAN_EVERY_S = 1.0
_OWN = ("log_path",)
"""Settings in which all runs differ."""


class Library:
    """The runs of the named folders. Any thread may call it.

    Raises:
        ConfigError: a folder that was named is none.
    """

    def __init__(self, roots: Sequence[Path]) -> None:
        for root in roots:
            if not root.is_dir():
                raise ConfigError(
                    f"run must be a folder, got {str(root)!r}: name a run's log_path, or a folder "
                    "of runs"
                )
        self.roots = list(dict.fromkeys(root.resolve() for root in roots))
        self._lock = threading.Lock()
        self._runs: dict[Path, RecordedRun] = {}
        self._scanned = -_SCAN_EVERY_S

    def runs(self) -> list[RecordedRun]:
        """All runs by name."""
        with self._lock:
            now = time.monotonic()
            if now - self._scanned >= _SCAN_EVERY_S:
                self._scan()
                self._scanned = now
            return sorted(self._runs.values(), key=lambda run: run.name)

    def find(self, key: str) -> RecordedRun:
        """The run of a name as URLs have it.

        Raises:
            NotFoundError: there is none.
        """
        for run in self.runs():
            if key in (run.key, run.name):
                return run
        raise NotFoundError(f"run must be one of those named to hearth view, got {key[:200]!r}")

    def table(self) -> list[dict[str, Any]]:
        """The row of each run, and the settings in which they differ."""
        runs = self.runs()
        rows = [run.row() for run in runs]
        settings = [flatten(run.config()) for run in runs]
        fields = find_differences(settings)
        for row, config in zip(rows, settings, strict=True):
            row["differs"] = {field: config[field] for field in fields if field in config}
        return rows

    def _scan(self) -> None:
        found = [(root, folder) for root in self.roots for folder in _find_runs(root, DEPTH)][
            :MOST_RUNS
        ]
        found = list({folder: (root, folder) for root, folder in reversed(found)}.values())[::-1]
        names = _name_runs(found)
        self._runs = {
            folder: known
            if (known := self._runs.get(folder)) is not None and known.name == name
            else RecordedRun(folder, name)
            for folder, name in names.items()
        }


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by dotted name."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def find_differences(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Settings whose values differ; those of a run that lacks one count as another value."""
    fields = list(dict.fromkeys(field for config in settings for field in config))
    return [
        field
        for field in fields
        if field not in _OWN and len({repr(config.get(field, ...)) for config in settings}) > 1
    ]


def _find_runs(folder: Path, depth: int) -> Iterator[Path]:
    if _is_run(folder):
        yield folder
        return
    if depth == 0:
        return
    try:
        names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    except OSError:
        return
    for name in names:
        below = folder / name
        # A link leads out of the folder, or to what is found there anyway.
        if not name.startswith(".") and not below.is_symlink():
            yield from _find_runs(below, depth - 1)


def _is_run(folder: Path) -> bool:
    files = (folder / METRICS, folder / TIMELINE)
    return any(file.is_file() for file in files) or _has_samples(folder / SAMPLES)


def _has_samples(folder: Path) -> bool:
    return folder.is_dir() and any(folder.glob("*-*.parquet"))


def _name_runs(found: Sequence[tuple[Path, Path]]) -> dict[Path, str]:
    """A name for each folder: its path below the root that was named, as short as is clear."""
    short = {
        folder: folder.name if folder == root else folder.relative_to(root).as_posix()
        for root, folder in found
    }
    long = {
        folder: folder.name if folder == root else f"{root.name}/{short[folder]}"
        for root, folder in found
    }
    counts = Counter(name.replace("/", "~") for name in short.values())
    names: dict[Path, str] = {}
    taken: set[str] = set()
    for folder, name in short.items():
        chosen = name if counts[name.replace("/", "~")] == 1 else long[folder]
        number = 2
        while chosen.replace("/", "~") in taken:
            chosen = f"{long[folder]}-{number}"
            number += 1
        taken.add(chosen.replace("/", "~"))
        names[folder] = chosen
    return names
