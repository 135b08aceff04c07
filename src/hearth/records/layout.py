"""The files of the samples of a run, and which of them to read; opens none of them.

samples/tokens.parquet               the vocabulary
samples/train-000012.parquet         what was sampled for step 12
samples/train-000001-000064.parquet  the same of 64 steps, merged
samples/eval-000012.parquet          the held-out answers of step 12
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from hearth.errors import NotFoundError

Kind = Literal["train", "eval"]
KINDS: tuple[Kind, ...] = ("train", "eval")

SAMPLES = "samples"
"""The folder of the samples in a run's folder."""
VOCABULARY = "tokens.parquet"
RESCORED = "rescored"
"""The folder of what other reward functions say about a run's samples."""
TIMELINE = "timeline.jsonl"

OUTCOMES = (
    "trained",
    "uniform",
    "filtered",
    "failed",
    "truncated",
    "stale",
    "dropped",
    "evaluated",
)
"""What can have become of a sample."""

_NAME = re.compile(r"(train|eval)-(\d{6,})(?:-(\d{6,}))?\.parquet")


@dataclass(frozen=True, order=True)
class SampleId:
    """Names one sample of a run, as ``train.12.40.3.0``."""

    kind: str
    step: int
    index: int
    completion: int
    segment: int = 0

    def __str__(self) -> str:
        return f"{self.kind}.{self.step}.{self.index}.{self.completion}.{self.segment}"

    @classmethod
    def parse(cls, text: str) -> SampleId:
        """The id that a text stands for.

        Raises:
            NotFoundError: it stands for none.
        """
        kind, *numbers = text.split(".")
        is_id = kind in KINDS and len(numbers) == 4
        if not (is_id and all(re.fullmatch(r"-?\d{1,18}", number) for number in numbers)):
            raise NotFoundError(
                f"a sample's id must be KIND.STEP.INDEX.COMPLETION.SEGMENT, got {text[:80]!r}"
            )
        return cls(kind, *map(int, numbers))


@dataclass(frozen=True)
class SampleFile:
    """A file of samples: those of the steps ``first`` to ``last``."""

    path: Path
    kind: Kind
    first: int
    last: int

    def covers(self, other: SampleFile) -> bool:
        """Whether it holds all that ``other`` holds."""
        return self.kind == other.kind and self.first <= other.first and other.last <= self.last

    @property
    def is_merged(self) -> bool:
        """Whether it was made of the files of several steps."""
        return self.first != self.last


def name_file(kind: Kind, first: int, last: int | None = None) -> str:
    """The name of the file with the samples of one step, or of all from ``first`` to ``last``."""
    if last is None or last == first:
        return f"{kind}-{first:06d}.parquet"
    return f"{kind}-{first:06d}-{last:06d}.parquet"


def list_files(log_path: Path, kind: Kind | None = None) -> list[SampleFile]:
    """The files to read, in the order of their steps: no sample is in two of them.

    A file that was merged into another one is left out. None where nothing is recorded.
    """
    return choose_files(
        file for file in _find_files(log_path / SAMPLES) if kind is None or file.kind == kind
    )


def choose_files(files: Iterable[SampleFile]) -> list[SampleFile]:
    """Those of ``files`` that no other one covers, by kind and step."""
    chosen: list[SampleFile] = []
    for file in sorted(files, key=lambda file: (file.kind, file.first, -file.last)):
        if not (chosen and chosen[-1].covers(file)):
            chosen.append(file)
    return chosen


def files_of_step(log_path: Path, kind: Kind, step: int) -> list[SampleFile]:
    """The files that can hold samples of a step."""
    return [file for file in list_files(log_path, kind) if file.first <= step <= file.last]


def all_files(log_path: Path) -> list[SampleFile]:
    """All files of samples, those that were merged into others too."""
    return list(_find_files(log_path / SAMPLES))


def rescored_names(log_path: Path) -> list[str]:
    """The names under which a run's samples were scored again."""
    return sorted(path.stem for path in (log_path / RESCORED).glob("*.parquet"))


def _find_files(folder: Path) -> Iterable[SampleFile]:
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match is not None:
            first = int(match[2])
            last = int(match[3]) if match[3] else first
            yield SampleFile(path, cast("Kind", match[1]), first, last)
