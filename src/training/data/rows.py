"""Dataset rows: objects with ``messages`` and ``ground_truth``, and the order they train in."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from hearth.errors import ConfigError
from training.data.sources import open_dataset

logger = logging.getLogger(__name__)

Row = Mapping[str, Any]
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


def load_rows(
    dataset: str,
    max_rows: int | None = None,
    *,
    columns: Mapping[str, str] | None = None,
    needs_messages: bool = True,
    setting: str = "max_rows",
) -> list[dict[str, Any]]:
    """The first ``max_rows`` rows of a dataset (``training.data.sources`` has its forms).

    ``columns`` name the dataset's column for a field of the row, as ``{"messages": "question"}``; a
    text there is one message of the user. Without ``needs_messages`` any object is a row. Where
    there are more rows, it is said by the name of the ``setting`` that leaves them out.

    Raises:
        ConfigError: the dataset cannot be read, is empty, or a record breaks the row format; the
            message names the file and the line.
    """
    records = open_dataset(dataset, max_rows)
    rows: list[dict[str, Any]] = []
    for where, record in records.items:
        if max_rows is not None and len(rows) >= max_rows:
            total = records.total
            left_out = "" if total is None else f"{total - max_rows} of the {total} "
            logger.warning("%s=%d leaves out %srows of %s", setting, max_rows, left_out, dataset)
            break
        row = parse_row(record, where) if isinstance(record, bytes) else dict(record)
        if columns:
            row = rename_columns(row, columns, where=where)
        rows.append(check_row(row, where=where) if needs_messages else row)
    if not rows:
        raise ConfigError(f"dataset must hold at least one row, got none in {dataset!r}")
    return rows


def rename_columns(row: Row, columns: Mapping[str, str], *, where: str) -> dict[str, Any]:
    """The row with its fields filled from other columns, which stay.

    Raises:
        ConfigError: a column is not there.
    """
    renamed = dict(row)
    for name, column in columns.items():
        if column not in row:
            raise ConfigError(
                f"columns.{name} must be a column of the dataset, got {column!r} for {where}, "
                f"which has {sorted(row)}"
            )
        is_prompt = name == "messages" and isinstance(row[column], str)
        renamed[name] = [{"role": "user", "content": row[column]}] if is_prompt else row[column]
    return renamed


def parse_row(line: bytes, where: str) -> dict[str, Any]:
    """One line of JSON as an object.

    Raises:
        ConfigError: the line is none.
    """
    try:
        return check_object(orjson.loads(line), where=where)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{where} must be a JSON object, got {_short(line)}: {error}") from None


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
        check_message(message, f"{where}: messages[{index}]")
    if not prompt_messages(row):
        raise ConfigError(f"{where}: messages must hold more than assistant turns, got only those")
    return row


def check_message(message: Any, where: str, *, may_call: bool = False) -> None:
    """Judge one message; with ``may_call`` the assistant's may have tool calls and no text.

    Raises:
        ConfigError: it has no known role, or no text.
    """
    is_call = may_call and isinstance(message, Mapping) and bool(message.get("tool_calls"))
    if not is_call and not (
        isinstance(message, Mapping) and isinstance(message.get("content"), str)
    ):
        raise ConfigError(f"{where}.content must be a string, got {_short(message)}")
    if message.get("role") not in _ROLES:
        raise ConfigError(
            f"{where}.role must be one of {sorted(_ROLES)}, got {message.get('role')!r}"
        )


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


def _short(value: object) -> str:
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
