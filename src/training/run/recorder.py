"""Writes what a run samples, file by file, on a thread beside the training.

A step's file is begun before its last optimizer step and there before its record in
``metrics.jsonl``. Rows that were dropped before a checkpoint are there before its manifest names
it. So a start that goes on from the checkpoint finds the lines of all rows that the checkpoint
counts as finished, and takes the others away: no line is there twice, and none is missing.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from hearth.records.layout import (
    KINDS,
    SAMPLES,
    VOCABULARY,
    Kind,
    SampleFile,
    all_files,
    choose_files,
    files_of_step,
    list_files,
    name_file,
)
from hearth.records.reading import read_file
from hearth.records.table import write_samples, write_vocabulary
from training.data.rows import Row
from training.run.checkpoints import Cursor
from training.run.log_path import first_free
from training.run.record_lines import (
    RowRecord,
    dropped_record,
    evaluation_records,
    make_lines,
    trained_record,
)
from training.run.token_bytes import TokenBytes
from training.samples.groups import PromptGroup, RowOutcome
from training.samples.trajectories import SampledTrajectory

MERGED_FILES = 64
"""Files of single steps that become one."""


@dataclass(frozen=True)
class RecordLimits:
    """What is recorded: the groups that ``share`` of all seeds choose, up to ``max_bytes``."""

    share: float = 1.0
    """Of the rows; 0 records nothing, and 1 everything."""
    seed: int = 0
    max_bytes: float = float("inf")
    """Bytes of all files at which recording stops."""

    def choose(self, kind: Kind, index: int) -> bool:
        """Whether the row at a place of the run is recorded: the same in every start."""
        digest = hashlib.blake2b(f"{self.seed}/{kind}/{index}".encode(), digest_size=8).digest()
        return int.from_bytes(digest) < self.share * 2**64


class Recorder:
    """Records a run's samples in ``log_path/samples``; ``say`` gets a line when it stops.

    All methods are the recipe's thread's; the files are written on one of its own, one by one.
    Without a folder it records nothing.
    """

    def __init__(
        self,
        log_path: Path | None = None,
        run: str = "",
        limits: RecordLimits | None = None,
        tokens: TokenBytes | None = None,
        say: Callable[[str], None] = lambda _line: None,
    ) -> None:
        self.step = 0
        """The last step whose samples were begun."""
        self._log_path = log_path or Path()
        self._run = run
        self._limits = limits or RecordLimits()
        self._tokens = tokens or TokenBytes([], frozenset())
        self._say = say
        self._is_on = log_path is not None and self._limits.share > 0
        self._waiting: dict[int, RowOutcome] = {}
        """Rows with a group that is not trained yet."""
        self._dropped: list[RowOutcome] = []
        self._writing: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, "hearth-records") if self._is_on else None
        self._bytes = 0

    @classmethod
    @contextlib.contextmanager
    def open(
        cls,
        log_path: Path,
        run: str,
        limits: RecordLimits,
        tokens: Callable[[], TokenBytes],
        say: Callable[[str], None],
    ) -> Iterator[Recorder]:
        """The recorder of one start of a run; at its end all that was said to it is on disk.

        Raises:
            StorageError: the disk refused.
        """
        if limits.share <= 0:
            yield cls()
            return
        folder = log_path / SAMPLES
        folder.mkdir(exist_ok=True)
        texts = tokens()
        write_vocabulary(folder / VOCABULARY, texts.tokens, set(texts.special), run)
        recorder = cls(log_path, run, limits, texts, say)
        recorder._bytes = measure_bytes(log_path)
        try:
            yield recorder
        except BaseException:
            recorder.close(quietly=True)
            raise
        recorder.close()

    def see_row(self, outcome: RowOutcome) -> None:
        """Keep what was sampled for a row until its step is written."""
        if not (self._is_on and self._limits.choose("train", outcome.row.index)):
            return
        if outcome.group is None:
            self._dropped.append(outcome)
        else:
            self._waiting[outcome.row.index] = outcome

    def begin_step(self, step: int, groups: Sequence[PromptGroup]) -> None:
        """Begin to write the samples of the groups that ``step`` trains, once for each step."""
        if not self._is_on or self.step == step:
            return
        self.step = step
        trained = [
            trained_record(step, group, self._waiting.pop(group.row.index, None))
            for group in groups
            if self._limits.choose("train", group.row.index)
        ]
        self._begin("train", step, trained)

    def begin_flush(self) -> None:
        """Begin to write the rows that were dropped since the last step, as of the next one."""
        if self._is_on and self._dropped:
            self._begin("train", self.step + 1, [])

    def begin_evaluation(
        self, step: int, rows: Sequence[Row], trajectories: Sequence[Sequence[SampledTrajectory]]
    ) -> None:
        """Begin to write the answers of an evaluation, in place of an earlier one of ``step``."""
        if not self._is_on:
            return
        records = [
            record
            for record in evaluation_records(step, rows, trajectories)
            if self._limits.choose("eval", record.row.index)
        ]
        self._begin("eval", step, records)

    def finish(self) -> None:
        """Wait until all that was begun is on disk.

        Raises:
            StorageError: the disk refused.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def close(self, *, quietly: bool = False) -> None:
        """Write what is left, and end the thread; ``quietly`` leaves errors out."""
        if self._thread is None:
            return
        with contextlib.suppress(Exception) if quietly else contextlib.nullcontext():
            self.begin_flush()
            self.finish()
        self._is_on = False
        self._thread.shutdown()

    def _begin(self, kind: Kind, step: int, records: list[RowRecord]) -> None:
        if kind == "train":
            dropped, self._dropped = self._dropped, []
            records = records + [dropped_record(step, outcome) for outcome in dropped]
        if self._thread is None or not records or self._stop_at_bound():
            return
        before = self._writing

        def write() -> None:
            if before is not None:
                before.result()
            self._write(kind, step, records)

        self._writing = self._thread.submit(write)

    def _stop_at_bound(self) -> bool:
        limit = self._limits.max_bytes
        if self._bytes < limit:
            return False
        self._is_on = False
        self._waiting.clear()
        self._say(
            f"samples are no longer recorded: {self._log_path / SAMPLES} has reached "
            f"record_max_gb={limit / 1e9:g}; raise it, or move files away, and start the run again"
        )
        return True

    def _write(self, kind: Kind, step: int, records: Sequence[RowRecord]) -> None:
        lines = make_lines(records, self._run, self._tokens)
        folder = self._log_path / SAMPLES
        path, earlier = folder / name_file(kind, step), []
        for file in files_of_step(self._log_path, kind, step):
            path = file.path
            kept = read_file(file)
            if kind == "eval":
                kept = kept.filter(pc.field("step") != step)
            earlier.append(kept)
        write_samples(path, [*earlier, lines], self._run, durable=False)
        merge_files(self._log_path, kind, self._run, before=step)
        self._bytes = measure_bytes(self._log_path)


def merge_files(log_path: Path, kind: Kind, run: str, before: int) -> None:
    """Make one file of ``MERGED_FILES`` single ones of steps before ``before``, if there are."""
    singles = [
        file for file in list_files(log_path, kind) if not file.is_merged and file.last < before
    ][:MERGED_FILES]
    if len(singles) < MERGED_FILES:
        return
    name = name_file(kind, singles[0].first, singles[-1].last)
    write_samples(log_path / SAMPLES / name, map(read_file, singles), run)
    for file in singles:
        file.path.unlink()


def measure_bytes(log_path: Path) -> int:
    """How much room the files of samples take."""
    return sum(file.path.stat().st_size for file in all_files(log_path))


def go_on_with_samples(log_path: Path, step: int, cursor: Cursor) -> Path | None:
    """Take away the samples that a run samples again which goes on from a checkpoint.

    Those of rows that ``cursor`` counts as finished stay, and evaluations of steps up to ``step``.
    Files with others are kept in the first free ``samples.N``, which is returned.
    """
    folder = log_path / SAMPLES
    if not folder.is_dir():
        return None
    _clean_up(log_path)
    aside = first_free(log_path / f"{SAMPLES}.{{}}")
    finished = cursor.list_finished()
    for kind in KINDS:
        for file in list_files(log_path, kind):
            if kind == "eval" and file.last <= step:
                continue
            column = "step" if kind == "eval" else "index"
            places = read_file(file, [column])[column].to_pylist()
            is_kept = [place <= step if kind == "eval" else place in finished for place in places]
            if not all(is_kept):
                aside.mkdir(exist_ok=True)
                _keep_lines(file, is_kept, aside)
    return aside if aside.exists() else None


def set_samples_aside(log_path: Path) -> Path | None:
    """Move all samples to the first free ``samples.N``; a run begins anew in their folder."""
    folder = log_path / SAMPLES
    if not folder.is_dir():
        return None
    return folder.rename(first_free(log_path / f"{SAMPLES}.{{}}"))


def _clean_up(log_path: Path) -> None:
    """Remove what a kill left behind: drafts, and files that were merged into another one."""
    for draft in (log_path / SAMPLES).glob(".*.parquet-*"):
        draft.unlink()
    files = all_files(log_path)
    chosen = {file.path for file in choose_files(files)}
    for file in files:
        if file.path not in chosen:
            file.path.unlink()


def _keep_lines(file: SampleFile, is_kept: list[bool], aside: Path) -> None:
    """Keep some lines of a file, and the whole file in ``aside``, whatever kills it in between."""
    if not any(is_kept):
        file.path.rename(aside / file.path.name)
        return
    _link_or_copy(file.path, aside / file.path.name)
    table = read_file(file)
    run = table["run"][0].as_py()
    kept = table.filter(pa.array(is_kept))
    steps = kept["step"].to_pylist()
    path = file.path.with_name(name_file(file.kind, min(steps), max(steps)))
    # A shorter name is covered by the old one, and so not read before that is gone.
    write_samples(path, [kept], run)
    if path != file.path:
        file.path.unlink()


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        shutil.copy2(source, target)
