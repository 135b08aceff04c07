"""Where rows come from: a file, a folder of files, a URL, or a dataset of the Hugging Face hub."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from hearth.errors import ConfigError

HUB = "hf:"
SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")
_FORMS = "a JSONL, Parquet or CSV file, a folder of them, an http(s) URL or hf:ORG/NAME[:SPLIT]"
_HUB_NAME = re.compile(r"(?P<name>[^:]+?)(?::(?P<split>.+))?")

Record = bytes | Mapping[str, Any]
"""A line of JSON, or what a table has in a row."""


@dataclass(frozen=True)
class Records:
    """A dataset's records, each with its name for messages, such as ``rows.jsonl:17``."""

    items: Iterator[tuple[str, Record]]
    total: int | None
    """How many there are; None where only reading them all would tell."""


def open_dataset(dataset: str, limit: int | None = None) -> Records:
    """The records of a dataset in their order; no more than ``limit`` and one will be read.

    Raises:
        ConfigError: there is no such dataset, it cannot be read, or its form is none of those here.
    """
    if dataset.startswith(HUB):
        return _open_hub(dataset, limit)
    if dataset.startswith(("http://", "https://")):
        return _split_lines(_download(dataset), dataset)
    path = Path(dataset).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES)
        kinds = sorted({file.suffix for file in files})
        if len(kinds) != 1:
            raise ConfigError(
                f"dataset must be a folder of files of one kind of {list(SUFFIXES)}, got "
                f"{dataset!r} with {kinds or 'none of them'}"
            )
        parts = [_open_file(file, str(file)) for file in files]
        totals = [part.total for part in parts if part.total is not None]
        return Records((item for part in parts for item in part.items), sum(totals))
    if not path.is_file():
        raise ConfigError(f"dataset must be {_FORMS}, got {dataset!r}: no such file")
    return _open_file(path, dataset)


def _open_file(path: Path, name: str) -> Records:
    if path.suffix == ".parquet":
        return _open_parquet(path, name)
    if path.suffix == ".csv":
        return _open_csv(path, name)
    return _split_lines(path.read_bytes(), name)


def _split_lines(content: bytes, name: str) -> Records:
    """Lines of JSON; blank ones do not count."""
    lines = [
        (f"{name}:{number}", line)
        for number, line in enumerate(content.split(b"\n"), start=1)
        if line.strip()
    ]
    return Records(iter(lines), len(lines))


def _open_parquet(path: Path, name: str) -> Records:
    import pyarrow as pa  # most datasets need none of it
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(path)
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(f"dataset must be a Parquet file, got {name!r}: {error}") from None

    def read() -> Iterator[tuple[str, Record]]:
        number = 0
        for batch in table.iter_batches(1024):
            for record in batch.to_pylist():
                number += 1
                yield f"{name}:{number}", record

    return Records(read(), table.metadata.num_rows)


def _open_csv(path: Path, name: str) -> Records:
    """Rows under a header; every value stays the text that it is."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file, strict=True))
    for number, row in enumerate(rows, start=1):
        if None in row or None in row.values():
            raise ConfigError(
                f"{name}, row {number} must have as many values as the header has names, got "
                f"{len([value for value in row.values() if value is not None])}"
            )
    named = [(f"{name}, row {number}", row) for number, row in enumerate(rows, start=1)]
    return Records(iter(named), len(named))


def _open_hub(dataset: str, limit: int | None) -> Records:
    """``hf:ORG/NAME[/CONFIG][:SPLIT]``, or a folder that ``datasets`` reads; the split is train.

    With a ``limit`` rows are streamed; without, they are kept in the hub's local cache.
    """
    try:
        import datasets
    except ImportError:
        raise ConfigError(
            f"dataset must be a file where datasets is not installed, got {dataset!r}: "
            "pip install 'hearth-rl[data]'"
        ) from None
    found = _HUB_NAME.fullmatch(dataset.removeprefix(HUB))
    if found is None:
        raise ConfigError(f"dataset must be hf:ORG/NAME[/CONFIG][:SPLIT], got {dataset!r}")
    name, config, split = found["name"], None, found["split"] or "train"
    if name.count("/") == 2 and not Path(name).exists():
        name, _, config = name.rpartition("/")
    is_streamed = limit is not None and "[" not in split
    try:
        loaded: Any = datasets.load_dataset(name, config, split=split, streaming=is_streamed)
    except Exception as error:  # noqa: BLE001 - of the library's, the hub's and the network's kinds
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ConfigError(
            f"dataset must be one that can be loaded, got {dataset!r}: {reason}"
        ) from None
    chosen = loaded.take(limit + 1) if is_streamed and limit is not None else loaded
    named = ((f"{dataset}:{number}", record) for number, record in enumerate(chosen, start=1))
    return Records(named, None if is_streamed else len(loaded))


def _download(url: str) -> bytes:
    try:
        answer = httpx.get(url, follow_redirects=True, timeout=60.0)
        answer.raise_for_status()
    except httpx.HTTPError as error:
        raise ConfigError(
            f"dataset must be reachable, got {url!r}: {error or type(error).__name__}; "
            "download it and give its path"
        ) from None
    return answer.content
