"""The samples' columns in memory, in one DuckDB that may read nothing but the named folders.

All columns but those by token are kept of the runs that were looked at last, their texts as far as
memory allows; a larger run's texts are read from its files each time. A place (file number and row
number) names a sample while its file is there.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import pyarrow.parquet as pq

from hearth.records.layout import SAMPLES
from hearth.viewer.run import RecordedRun, Stamp, stamp

logger = logging.getLogger(__name__)

MEMORY = "320MB"
"""Most that DuckDB may take."""
TEXT_BYTES = 200 * 2**20
"""Most bytes of texts that are kept."""
MOST_ROWS = 2_000_000
"""Most samples of all runs that are kept, that of the run last asked for excepted."""
THREADS = 2
_FILES_AT_ONCE = 64
_FILE = 2**32
"""A place is the file's number times this, and the row in the file."""

_NUMBER = "map_extract_value(map(?::VARCHAR[], ?::BIGINT[]), filename)"
"""A file's number by two lists of values."""

NUMBERS = {
    "step": "BIGINT",
    "index": "BIGINT",
    "row": "BIGINT",
    "epoch": "INTEGER",
    "completion": "INTEGER",
    "segment": "INTEGER",
    "prompt_len": "INTEGER",
    "length": "INTEGER",
    "turns": "INTEGER",
    "tool_calls": "INTEGER",
    "version": "INTEGER",
    "reward": "DOUBLE",
    "advantage": "DOUBLE",
    "mean_logprob": "FLOAT",
    "started": "DOUBLE",
    "sample_s": "FLOAT",
    "score_s": "FLOAT",
}
"""The numeric columns, which can be sorted by and counted."""
OTHERS = {
    "kind": "VARCHAR",
    "outcome": "VARCHAR",
    "reason": "VARCHAR",
    "finish_reason": "VARCHAR",
    "parsed": "BOOLEAN",
}
COLUMNS = {**NUMBERS, **OTHERS}


class _Counts(NamedTuple):
    """How many samples a run's files have, as of a look at their folder."""

    at: Stamp | None
    rows: dict[tuple[Path, Stamp | None], int]


class Database:
    """The connection, and the tables of the runs looked at last. Any thread may call it."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self._connection = duckdb.connect(
            ":memory:", config={"threads": str(THREADS), "memory_limit": MEMORY}
        )
        settings: dict[str, Any] = {
            "temp_directory": "",
            "preserve_insertion_order": False,
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
            "allow_community_extensions": False,
            "enable_external_file_cache": False,
            "parquet_metadata_cache": True,
            "allowed_directories": [f"{root}/" for root in roots],
            "enable_external_access": False,
        }
        for name, value in settings.items():
            self._connection.execute(f"SET {name} = $value", {"value": value})
        self._connection.execute("SET lock_configuration = true")
        self._lock = threading.Lock()
        self._tables: OrderedDict[Path, SampleTable] = OrderedDict()
        self._count = 0
        self._counts: dict[Path, _Counts] = {}

    def query(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """The rows of an answer."""
        with self.cursor() as cursor:
            return cursor.execute(sql, list(values)).fetchall()

    def cursor(self) -> duckdb.DuckDBPyConnection:
        """A connection of one thread's own, to be closed by it."""
        return self._connection.cursor()

    def samples(self, run: RecordedRun, beside: SampleTable | None = None) -> SampleTable:
        """The table of a run's samples, as its files are now; that of ``beside`` stays."""
        with self._lock:
            table = self._tables.get(run.folder)
            if table is None:
                self._count += 1
                table = self._tables[run.folder] = SampleTable(self, run, self._count)
            self._tables.move_to_end(run.folder)
            others = sum(known.text_bytes for known in self._tables.values() if known is not table)
        table.refresh(TEXT_BYTES - others)
        self._drop_oldest(table, beside)
        return table

    def count_samples(self, runs: Sequence[RecordedRun]) -> dict[str, int]:
        """Samples on record by the key of each run that records them.

        Only what files say about themselves is read, and kept.
        """
        counts: dict[str, int] = {}
        for run in runs:
            at = stamp(run.folder / SAMPLES)
            known = self._counts.get(run.folder)
            if known is None or known.at != at:
                rows = known.rows if known is not None else {}
                files = {(file.path, stamp(file.path)): file.path for file in run.files()}
                rows = {
                    key: rows[key] if key in rows else _count_rows(path)
                    for key, path in files.items()
                }
                known = self._counts[run.folder] = _Counts(at, rows)
            if known.rows:
                counts[run.key] = sum(known.rows.values())
        return counts

    def list_damaged(self, run: RecordedRun) -> dict[str, str]:
        """Files of a run's samples that cannot be read, with why; of runs not looked at, none."""
        with self._lock:
            table = self._tables.get(run.folder)
        return dict(table.damaged) if table is not None else {}

    def close(self) -> None:
        """Give all memory back."""
        self._connection.close()

    def _drop_oldest(self, wanted: SampleTable, beside: SampleTable | None) -> None:
        with self._lock:
            for folder, table in list(self._tables.items()):
                tables = self._tables.values()
                rows, size = (
                    sum(each.rows for each in tables),
                    sum(each.text_bytes for each in tables),
                )
                is_full = size > TEXT_BYTES // 2 and not wanted.has_text
                if rows <= MOST_ROWS and not is_full:
                    return
                if table is not wanted and table is not beside:
                    del self._tables[folder]
                    table.drop()


class SampleTable:
    """The samples of one run by column."""

    def __init__(self, database: Database, run: RecordedRun, number: int) -> None:
        self.database = database
        self.run = run
        self.name = f"rows_{number}"
        self.prompts = f"prompts_{number}"
        self.lock = threading.RLock()
        self.generation = 0
        """Goes up with every change."""
        self.rows = 0
        self.text_bytes = 0
        self.has_text = True
        """Whether texts and prompts are in memory."""
        self.damaged: dict[str, str] = {}
        """Files that cannot be read, with why."""
        self._files: dict[Path, tuple[int, Stamp | None]] = {}
        self._next_number = 0
        self._end = 0
        """Behind the last row id; ids of deleted rows are not used again."""
        self._looked_at: Stamp | None = None
        self._found: OrderedDict[Any, str] = OrderedDict()
        columns = ", ".join(f'"{name}" {kind}' for name, kind in COLUMNS.items())
        database.query(
            f"CREATE TABLE {self.name} (place BIGINT, {columns}, text VARCHAR, prompt_key UBIGINT)"
        )
        database.query(f"CREATE TABLE {self.prompts} (prompt_key UBIGINT, prompt VARCHAR)")

    def refresh(self, text_bytes: int = TEXT_BYTES) -> None:
        """Load the files that are new, and forget those that are gone."""
        with self.lock:
            now = stamp(self.run.folder / SAMPLES)
            if now == self._looked_at:
                return
            files = {file.path: stamp(file.path) for file in self.run.files()}
            old = [path for path, (_, at) in self._files.items() if files.get(path) != at]
            new = [
                path
                for path, at in files.items()
                if at is not None and (path not in self._files or path in old)
            ]
            self._change(old, new, text_bytes)
            self.damaged = {
                name: why
                for name, why in self.damaged.items()
                if any(path.name == name for path in files)
            }
            self._looked_at = now

    def drop(self) -> None:
        """Give the memory back."""
        with self.lock:
            for name in (self.name, self.prompts, *self._found.values()):
                self.database.query(f"DROP TABLE IF EXISTS {name}")
            self._found.clear()

    def path_of(self, place: int) -> Path | None:
        """The file of a sample."""
        number = place // _FILE
        return next((path for path, (known, _) in self._files.items() if known == number), None)

    def texts(self, places: Sequence[int] | None = None) -> tuple[str, list[Any]]:
        """SQL of a table (place, text, prompt) and its values: of ``places``, or of all samples."""
        if self.has_text:
            source = f"{self.name} LEFT JOIN {self.prompts} USING (prompt_key)"
            if places is None:
                return f"(SELECT place, text, prompt FROM {source})", []
            return (
                f"(SELECT place, text, prompt FROM {source} WHERE place IN (SELECT unnest(?)))",
                [list(places)],
            )
        numbers = {number: path for path, (number, _) in self._files.items()}
        if places is not None:
            wanted = {place // _FILE for place in places}
            numbers = {number: path for number, path in numbers.items() if number in wanted}
        if not numbers:
            return f"(SELECT place, text, NULL::VARCHAR AS prompt FROM {self.name} WHERE false)", []
        names = [str(path) for path in numbers.values()]
        sql = (
            f"(SELECT {_NUMBER} * {_FILE} + file_row_number AS place, "
            "text, prompt FROM read_parquet(?, filename = true, file_row_number = true, "
            "union_by_name = true))"
        )
        if places is None:
            return sql, [names, list(numbers), names]
        return f"(SELECT * FROM {sql} WHERE place IN (SELECT unnest(?)))", [
            names,
            list(numbers),
            names,
            list(places),
        ]

    def list_halves(self) -> list[str]:
        """Conditions that cut the rows in two, so that both threads look for a pattern: DuckDB
        itself leaves 122,880 rows to one."""
        middle = self._end // 2
        return [f"rowid < {middle}", f"rowid >= {middle}"]

    def remember(self, key: Any, sql: str, values: Sequence[Any]) -> str:
        """The table of places that a query finds, kept for the next questions with that key."""
        with self.lock:
            key = (self.generation, key)
            name = self._found.get(key)
            if name is None:
                name = f"{self.name}_found_{self.generation}_{len(self._found)}_{id(key)}"
                self.database.query(f"CREATE TABLE {name} AS {sql}", values)
                self._found[key] = name
                while len(self._found) > 8:
                    self.database.query(
                        f"DROP TABLE IF EXISTS {self._found.popitem(last=False)[1]}"
                    )
            self._found.move_to_end(key)
            return name

    def _change(self, old: list[Path], new: list[Path], text_bytes: int) -> None:
        if not old and not new:
            return
        self.generation += 1
        has_text = self.has_text and self._count_text(new) + self.text_bytes <= text_bytes
        if not has_text and self.has_text and self.rows:
            self.database.query(f"UPDATE {self.name} SET text = NULL, prompt_key = NULL")
            self.database.query(f"DELETE FROM {self.prompts}")
        self.has_text = has_text
        if not self.rows:
            self._files = self._load(self.name, new)
        else:
            self._exchange(old, new)
        self._measure()

    def _exchange(self, old: list[Path], new: list[Path]) -> None:
        """Put the rows of new files in place of the old ones', so that whoever reads meanwhile
        sees all of the change or nothing of it."""
        staging = f"{self.name}_new"
        self.database.query(f"CREATE OR REPLACE TABLE {staging} AS FROM {self.name} LIMIT 0")
        loaded = self._load(staging, new)
        with self.database.cursor() as cursor:
            cursor.begin()
            gone = [self._files.pop(path)[0] for path in old]
            cursor.execute(
                f"DELETE FROM {self.name} WHERE place // {_FILE} IN (SELECT unnest(?))", [gone]
            )
            cursor.execute(f"INSERT INTO {self.name} FROM {staging}")
            cursor.commit()
        self.database.query(f"DROP TABLE {staging}")
        self._files |= loaded

    def _load(self, target: str, paths: list[Path]) -> dict[Path, tuple[int, Stamp | None]]:
        """Append the rows of files to a table; one that cannot be read is named as damaged."""
        loaded: dict[Path, tuple[int, Stamp | None]] = {}
        parts = [paths[at : at + _FILES_AT_ONCE] for at in range(0, len(paths), _FILES_AT_ONCE)]
        while parts:
            part = parts.pop(0)
            numbers = {path: self._next_number + place for place, path in enumerate(part)}
            stamps = {path: stamp(path) for path in part}
            try:
                self._insert(target, numbers)
            except duckdb.Error as error:
                if len(part) > 1:
                    parts = [[path] for path in part] + parts
                elif part[0].exists():
                    self.damaged[part[0].name] = str(error).splitlines()[0][:300]
                    logger.warning("%s must be a file of samples, got %s", part[0], error)
                continue
            self._next_number += len(part)
            loaded |= {path: (number, stamps[path]) for path, number in numbers.items()}
            for path in part:
                self.damaged.pop(path.name, None)
        return loaded

    def _insert(self, target: str, numbers: dict[Path, int]) -> None:
        names = [str(path) for path in numbers]
        source = "read_parquet(?, filename = true, file_row_number = true, union_by_name = true)"
        texts = "text, hash(prompt)" if self.has_text else "NULL, NULL"
        with self.database.cursor() as cursor:
            described = cursor.execute(f"DESCRIBE SELECT * FROM {source}", [names]).fetchall()
            there = {column[0] for column in described}
            picked = ", ".join(_pick(name, kind, there) for name, kind in COLUMNS.items())
            cursor.begin()
            cursor.execute(
                f"INSERT INTO {target} SELECT {_NUMBER} * {_FILE} + "
                f"file_row_number, {picked}, {texts} FROM {source}",
                [names, list(numbers.values()), names],
            )
            if self.has_text:
                cursor.execute(
                    f"INSERT INTO {self.prompts} SELECT DISTINCT hash(prompt), prompt "
                    f"FROM {source} "
                    f"WHERE hash(prompt) NOT IN (SELECT prompt_key FROM {self.prompts})",
                    [names],
                )
            cursor.commit()

    def _count_text(self, paths: list[Path]) -> int:
        """About how many bytes the texts of files take."""
        total = 0
        for path in paths:
            try:
                found = self.database.query(
                    "SELECT sum(total_uncompressed_size) FROM parquet_metadata(?) "
                    "WHERE path_in_schema = 'text'",
                    [str(path)],
                )
            except duckdb.Error:
                continue
            total += int(found[0][0] or 0)
        return total

    def _measure(self) -> None:
        found = self.database.query(
            f"SELECT count(*), sum(strlen(text)), max(rowid) + 1 FROM {self.name}"
        )[0]
        self.rows, self.text_bytes, self._end = (int(number or 0) for number in found)


def _count_rows(path: Path) -> int:
    try:
        return pq.read_metadata(path).num_rows
    except (OSError, ValueError):  # gone or damaged; pyarrow's errors are of these
        return 0


def _pick(name: str, kind: str, there: set[str]) -> str:
    """SQL of a column, null where its value is of another kind, NaN or infinite."""
    if name == "version" and name not in there:
        if "versions" not in there:
            return "NULL"
        return "nullif(list_max(versions), -1)"
    if name not in there:
        return "NULL"
    value = f'TRY_CAST("{name}" AS {kind})'
    return f"CASE WHEN isfinite({value}) THEN {value} END" if kind in ("DOUBLE", "FLOAT") else value
