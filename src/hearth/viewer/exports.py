"""The samples that filters choose as a file: CSV, or Parquet with all columns."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from typing import IO, Any

import duckdb
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from hearth.errors import RequestError
from hearth.viewer.samples import ROW_COLUMNS, Filters, Samples

FORMATS = {"csv": "text/csv; charset=utf-8", "parquet": "application/vnd.apache.parquet"}
_ROWS_AT_ONCE = 512
_PLACES_AT_ONCE = 100_000


def export_samples(samples: Samples, query: Mapping[str, str]) -> IO[bytes]:
    """A temporary file with the samples, at its beginning; it is gone when it is closed.

    Raises:
        RequestError: a value breaks its rule.
    """
    kind = query.get("format", "csv")
    if kind not in FORMATS:
        raise RequestError(f"format must be csv or parquet, got {kind[:80]!r}")
    selection = samples.select(Filters.parse(query))
    places = [
        record[0]
        for record in samples.database.query(
            f"SELECT place {selection.sql} ORDER BY step, kind, index, completion, segment",
            selection.values,
        )
    ]
    file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
    try:
        write = _write_csv if kind == "csv" else _write_parquet
        write(file, samples, places)
        file.seek(0)
    except BaseException:
        file.close()
        raise
    return file


def _write_csv(file: IO[bytes], samples: Samples, places: list[int]) -> None:
    columns = ", ".join(f'"{name}"' for name in ROW_COLUMNS)
    writer: Any = None
    for part in _parts(places) or [[]]:
        source, values = samples.table.texts(part)
        sql = (
            f"SELECT {columns}, text, prompt FROM {samples.table.name} r JOIN "
            f"(SELECT place, t.text AS full_text, t.prompt AS full_prompt FROM {source} t) USING "
            "(place) ORDER BY step, kind, index, completion, segment"
        ).replace("text, prompt FROM", "full_text AS text, full_prompt AS prompt FROM", 1)
        for batch in _read(samples, sql, values):
            writer = writer or pa_csv.CSVWriter(file, batch.schema)
            writer.write_batch(batch)
    if writer is not None:
        writer.close()


def _write_parquet(file: IO[bytes], samples: Samples, places: list[int]) -> None:
    """All columns of the files' rows. One file at a time, so that memory is bounded."""
    by_path: dict[str, list[int]] = {}
    for place in places:
        path = samples.table.path_of(place)
        if path is not None:
            by_path.setdefault(str(path), []).append(place % 2**32)
    writer: Any = None
    sql = (
        "SELECT * EXCLUDE (file_row_number) FROM read_parquet(?, file_row_number = true) "
        "WHERE file_row_number IN (SELECT unnest(?))"
    )
    for path, rows in by_path.items():
        for batch in _read(samples, sql, [[path], rows]):
            writer = writer or pq.ParquetWriter(file, batch.schema, compression="zstd")
            writer.write_batch(batch.cast(writer.schema))
    if writer is None:
        writer = pq.ParquetWriter(file, pa.schema([("step", pa.int32())]))
    writer.close()


def _read(samples: Samples, sql: str, values: list[Any]) -> Iterator[pa.RecordBatch]:
    with samples.database.cursor() as cursor:
        try:
            yield from cursor.sql(sql, params=values).to_arrow_reader(_ROWS_AT_ONCE)
        except duckdb.IOException:
            return  # the file was merged into another one meanwhile, or its run is gone


def _parts(places: list[int]) -> list[list[int]]:
    return [
        places[start : start + _PLACES_AT_ONCE] for start in range(0, len(places), _PLACES_AT_ONCE)
    ]
