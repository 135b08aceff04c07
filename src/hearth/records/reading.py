"""Single samples, groups and the vocabulary of a run, read from its files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from hearth.errors import NotFoundError
from hearth.records.layout import (
    SAMPLES,
    VOCABULARY,
    Kind,
    SampleFile,
    SampleId,
    files_of_step,
    list_files,
)
from hearth.records.table import ENTROPIES, RUN_KEY, TOKEN_COLUMNS

Record = dict[str, Any]
"""A sample by column: numpy arrays by token, else plain values; None where there is none."""


def read_sample(log_path: Path, sample: SampleId) -> Record:
    """One sample with all columns.

    Raises:
        NotFoundError: it is not on record.
    """
    wanted = (
        (pc.field("step") == sample.step)
        & (pc.field("index") == sample.index)
        & (pc.field("completion") == sample.completion)
        & (pc.field("segment") == sample.segment)
    )
    for file in files_of_step(log_path, _kind(sample.kind), sample.step):
        table = read_file(file, where=wanted)
        if len(table):
            return to_records(table)[0]
    raise NotFoundError(f"sample {sample} must be on record, got none in {log_path / SAMPLES}")


def read_group(
    log_path: Path,
    kind: str,
    index: int,
    step: int | None = None,
    columns: Sequence[str] | None = None,
) -> list[Record]:
    """All samples of a row's place in the run, by completion and segment; [] for none.

    An evaluation asks the same rows again and again: ``step`` says which time, None the last one.
    """
    files = (
        list_files(log_path, _kind(kind))
        if step is None
        else files_of_step(log_path, _kind(kind), step)
    )
    wanted = pc.field("index") == index
    if step is not None:
        wanted = wanted & (pc.field("step") == step)
    for file in reversed(files):
        found = to_records(read_file(file, columns, where=wanted))
        last = max((record["step"] for record in found), default=None)
        group = [record for record in found if record["step"] == last]
        if group:
            return sorted(group, key=lambda record: (record["completion"], record["segment"]))
    return []


def iterate_tables(
    log_path: Path, kind: Kind | None = None, columns: Sequence[str] | None = None
) -> Iterator[pa.Table]:
    """All samples of a run, file by file in the order of their steps."""
    for file in list_files(log_path, kind):
        yield read_file(file, columns)


def read_file(
    file: SampleFile, columns: Sequence[str] | None = None, where: pc.Expression | None = None
) -> pa.Table:
    """The samples of a file, those that ``where`` chooses; parts without any are not read."""
    chosen = None if columns is None else list(columns)
    return pq.read_table(file.path, columns=chosen, filters=where)


def read_run_id(file: SampleFile) -> str:
    """The id of the run that wrote a file."""
    return (pq.read_metadata(file.path).metadata or {}).get(RUN_KEY.encode(), b"").decode()


def to_records(table: pa.Table) -> list[Record]:
    """The lines of a table, those by token as numpy arrays."""
    columns: dict[str, list[Any]] = {}
    for name in table.column_names:
        column = table.column(name)
        if name in TOKEN_COLUMNS or name == ENTROPIES:
            columns[name] = [_to_array(value) for value in column]
        elif name == "reward_parts":
            columns[name] = [None if parts is None else dict(parts) for parts in column.to_pylist()]
        else:
            columns[name] = column.to_pylist()
    return [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]


def _to_array(value: Any) -> Any:
    return value.values.to_numpy(zero_copy_only=False) if value.is_valid else None


def _kind(kind: str) -> Kind:
    if kind != "train" and kind != "eval":
        raise NotFoundError(f"kind must be train or eval, got {kind[:80]!r}")
    return kind


@dataclass(frozen=True)
class Vocabulary:
    """What the token ids of a run stand for."""

    tokens: dict[int, bytes]
    """The exact bytes of a token, which may be a part of a character."""
    special: frozenset[int]
    """Ids that are marks of the template, not text."""

    def to_bytes(self, ids: Sequence[int]) -> list[bytes]:
        """The bytes of each token; an unknown id has none."""
        return [self.tokens.get(int(number), b"") for number in ids]

    def to_texts(self, ids: Sequence[int]) -> list[str | None]:
        """The text of each token; None where its bytes alone are no text."""
        return [_to_text(token) for token in self.to_bytes(ids)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of all together; bytes that are no text become U+FFFD."""
        return b"".join(self.to_bytes(ids)).decode(errors="replace")


def read_vocabulary(log_path: Path) -> Vocabulary:
    """The vocabulary of a run.

    Raises:
        NotFoundError: it is not on record.
    """
    path = log_path / SAMPLES / VOCABULARY
    if not path.exists():
        raise NotFoundError(f"the vocabulary must be on record, got no {path}")
    table = pq.read_table(path)
    ids = table.column("id").to_pylist()
    return Vocabulary(
        dict(zip(ids, table.column("bytes").to_pylist(), strict=True)),
        frozenset(table.filter(table.column("special")).column("id").to_pylist()),
    )


def _to_text(token: bytes) -> str | None:
    try:
        return token.decode()
    except UnicodeDecodeError:
        return None
