"""Dataset rows: JSON lines with ``messages`` and ``ground_truth``, from a path or a URL."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import orjson

from hearth.errors import ConfigError

logger = logging.getLogger(__name__)

Row = Mapping[str, Any]
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


def load_rows(
    dataset: str,
    max_rows: int | None = None,
    *,
    needs_messages: bool = True,
    setting: str = "max_rows",
) -> list[dict[str, Any]]:
    """The first ``max_rows`` rows of a JSONL file or http(s) URL; blank lines do not count.

    Without ``needs_messages`` any JSON object is a row. Where there are more rows, it is said by
    the name of the ``setting`` that leaves them out.

    Raises:
        ConfigError: the dataset cannot be read, is empty, or a line breaks the row format; the
            message names the file and the line.
    """
    rows: list[dict[str, Any]] = []
    lines = _read(dataset).split(b"\n")
    for number, line in enumerate(lines, start=1):
        if max_rows is not None and len(rows) >= max_rows:
            left_out = sum(bool(later.strip()) for later in lines[number - 1 :])
            if left_out:
                logger.warning(
                    "%s=%d leaves out %d of the %d rows of %s",
                    setting,
                    max_rows,
                    left_out,
                    max_rows + left_out,
                    dataset,
                )
            break
        if line.strip():
            row = parse_row(line, where=f"{dataset}:{number}", needs_messages=needs_messages)
            rows.append(row)
    if not rows:
        raise ConfigError(f"dataset must hold at least one row, got none in {dataset!r}")
    return rows


def parse_row(line: bytes, *, where: str, needs_messages: bool = True) -> dict[str, Any]:
    """One line as a row.

    Raises:
        ConfigError: the line is no JSON object, or has no usable ``messages`` and needs them.
    """
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{where} must be a JSON object, got {_short(line)}: {error}") from None
    return check_row(row, where=where) if needs_messages else check_object(row, where=where)


def check_object(row: Any, *, where: str) -> dict[str, Any]:
    """The row itself if it is an object.

    Raises:
        ConfigError: it is none.
    """
    if not isinstance(row, Mapping):
        raise ConfigError(f"{where} must be a JSON object, got {_short(row)}")
    return dict(row)


def check_row(row: Any, *, where: str) -> dict[str, Any]:
    """The row itself if its ``messages`` can be sampled from.

    Raises:
        ConfigError: it is no object, or ``messages`` is missing, empty or malformed, or nothing but
            assistant messages.
    """
    row = check_object(row, where=where)
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ConfigError(
            f"{where}: messages must be a non-empty list of {{role, content}}, got "
            f"{_short(messages)}: rows look like "
            '{"messages": [{"role": "user", "content": "..."}], "ground_truth": "..."}'
        )
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), str):
            raise ConfigError(
                f"{where}: messages[{index}].content must be a string, got {_short(message)}"
            )
        if message.get("role") not in _ROLES:
            raise ConfigError(
                f"{where}: messages[{index}].role must be one of {sorted(_ROLES)}, got "
                f"{message.get('role')!r}"
            )
    if not prompt_messages(row):
        raise ConfigError(f"{where}: messages must hold more than assistant turns, got only those")
    return row


def prompt_messages(row: Row) -> list[dict[str, str]]:
    """The messages to continue: the documents drop every assistant turn."""
    return [dict(message) for message in row["messages"] if message.get("role") != "assistant"]


@dataclass(frozen=True)
class IndexedRow:
    """A row and its place: ``index`` counts over all epochs from 0, ``source`` in the dataset."""

    index: int
    epoch: int
    row: Row
    source: int = 0


def epoch_rows(
    rows: Sequence[Row],
    *,
    epochs: int,
    shuffle: bool,
    seed: int,
    done: frozenset[int] = frozenset(),
) -> Iterator[IndexedRow]:
    """All rows of all epochs in training order, without those in ``done``.

    With ``shuffle`` each epoch has its own permutation, fixed by ``seed`` and the epoch's number.
    """
    for epoch in range(epochs):
        order = list(range(len(rows)))
        if shuffle:
            random.Random(f"{seed}/{epoch}").shuffle(order)
        for place, source in enumerate(order):
            index = epoch * len(rows) + place
            if index not in done:
                yield IndexedRow(index, epoch, rows[source], source)


def _read(dataset: str) -> bytes:
    if dataset.startswith(("http://", "https://")):
        return _download(dataset)
    path = Path(dataset).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"dataset must be a JSONL file or an http(s) URL, got {dataset!r}: no such file"
        )
    return path.read_bytes()


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


def _short(value: object) -> str:
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
