"""The columns of recorded samples, and how a file of them is written.

One line of a file is one token sequence. Lists by token are as long as ``tokens``; where a token
has no value they hold NaN, false, or -1 in ``versions``.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from hearth.files import explain_refusals, fsync

SCHEMA_VERSION = "1"
SCHEMA_KEY = "hearth.schema"
RUN_KEY = "hearth.run"

GROUP_BYTES = 2**20
"""About as many bytes of samples are read to show one of them."""

_INTEGERS = pa.list_(pa.field("element", pa.int32()))
_FLOATS = pa.list_(pa.field("element", pa.float32()))
_TRUTHS = pa.list_(pa.field("element", pa.bool_()))

SCHEMA = pa.schema(
    [
        ("run", pa.string()),
        ("kind", pa.string()),
        ("step", pa.int32()),
        ("index", pa.int64()),
        ("row", pa.int64()),
        ("epoch", pa.int32()),
        ("completion", pa.int32()),
        ("segment", pa.int32()),
        ("tokens", _INTEGERS),
        ("prompt_len", pa.int32()),
        ("loss_mask", _TRUTHS),
        ("behavior_logprobs", _FLOATS),
        ("policy_logprobs", _FLOATS),
        ("old_logprobs", _FLOATS),
        ("ref_logprobs", _FLOATS),
        ("ratios", _FLOATS),
        ("clipped", _TRUTHS),
        ("token_advantages", _FLOATS),
        ("versions", _INTEGERS),
        ("advantage", pa.float64()),
        ("reward", pa.float64()),
        ("reward_parts", pa.map_(pa.string(), pa.float64())),
        ("parsed", pa.bool_()),
        ("outcome", pa.string()),
        ("reason", pa.string()),
        ("finish_reason", pa.string()),
        ("text", pa.string()),
        ("prompt", pa.string()),
        ("ground_truth", pa.string()),
        ("seeds", pa.list_(pa.field("element", pa.int64()))),
        ("turns", pa.int32()),
        ("tool_calls", pa.int32()),
        ("started", pa.float64()),
        ("sample_s", pa.float32()),
        ("score_s", pa.float32()),
        ("metadata", pa.string()),
        ("length", pa.int32()),
        ("mean_logprob", pa.float32()),
        ("version", pa.int32()),
    ]
)
"""The columns of samples; docs/samples.md says what they mean."""

VOCABULARY_SCHEMA = pa.schema([("id", pa.int32()), ("bytes", pa.binary()), ("special", pa.bool_())])

TOKEN_COLUMNS = tuple(
    field.name for field in SCHEMA if pa.types.is_list(field.type) and field.name != "seeds"
)
"""The columns with a value for each token."""
ENTROPIES = "entropies"
"""A column of floats by token that the viewer shows where another program has added it."""
SCALAR_COLUMNS = tuple(field.name for field in SCHEMA if field.name not in TOKEN_COLUMNS)
"""All other columns."""

_SPLIT = [
    f"{field.name}.list.element"
    for field in SCHEMA
    if field.type == _FLOATS  # the bytes of floats are alike place by place
]
_REPEATED = [
    "run",
    "kind",
    "step",
    "index",
    "row",
    "epoch",
    "outcome",
    "reason",
    "finish_reason",
    "text",
    "prompt",
    "ground_truth",
    "metadata",
    "tokens.list.element",
    "versions.list.element",
]

_SEARCHED = ("kind", "step", "index", "row", "reward", "length")
"""Columns by which readers leave out parts of a file."""

_ENCODINGS: dict[str, Any] = {
    "compression": "zstd",
    "use_dictionary": _REPEATED,
    "use_byte_stream_split": _SPLIT,
    "write_statistics": list(_SEARCHED),
    "store_schema": False,  # the columns say their types; 2 KB less in each file
}


def make_table(columns: Mapping[str, Any]) -> pa.Table:
    """Samples by column, with all columns of ``SCHEMA``; one that is not given is null everywhere.

    Values by token are numpy arrays or lists, or None. A column may also be an arrow array.
    """
    count = len(next(iter(columns.values()), ()))
    arrays: list[pa.Array] = []
    for field in SCHEMA:
        values = columns.get(field.name)
        if values is None:
            arrays.append(pa.nulls(count, field.type))
        elif isinstance(values, pa.Array):
            arrays.append(values.cast(field.type))
        elif pa.types.is_list(field.type):
            arrays.append(_make_lists(values, field.type))
        else:
            arrays.append(pa.array(values, field.type))
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


def _make_lists(values: Sequence[Any], kind: pa.ListType) -> pa.Array:
    """One array of all elements: many times as fast as one Python list after the other."""
    dtype = pa.array([], kind.value_type).to_numpy(zero_copy_only=False).dtype
    given = [np.asarray(value, dtype) for value in values if value is not None]
    elements = np.concatenate(given) if given else np.empty(0, dtype)
    lengths = np.array([0 if value is None else len(value) for value in values], np.int64)
    return make_list_array(
        elements, lengths, np.array([value is not None for value in values], bool)
    )


def make_list_array(
    elements: NDArray[Any], lengths: NDArray[np.int64], is_given: NDArray[np.bool_] | None = None
) -> pa.Array:
    """Lists of the given lengths, whose elements stand end to end in ``elements``.

    Where ``is_given`` is false there is no list, and ``elements`` has nothing of it.
    """
    if is_given is not None:
        lengths = np.where(is_given, lengths, 0)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    values = pa.array(elements, from_pandas=False)
    return pa.ListArray.from_arrays(
        offsets,
        values,
        type=pa.list_(pa.field("element", values.type)),
        mask=None if is_given is None or is_given.all() else pa.array(~is_given),
    )


def write_samples(path: Path, tables: Iterable[pa.Table], run: str, *, durable: bool = True) -> int:
    """Write a file of samples, whole or not at all; returns its size in bytes.

    ``tables`` have the columns of ``SCHEMA``; what is small is put together, so that a file can be
    searched without reading all of it. ``durable`` makes it outlast a power cut too.

    Raises:
        StorageError: the disk refused; an older file of the name stays.
    """
    with _replace(path, durable=durable) as draft, _open_writer(draft, SCHEMA) as writer:
        writer.add_key_value_metadata({SCHEMA_KEY: SCHEMA_VERSION, RUN_KEY: run})
        for table in gather_tables(tables, GROUP_BYTES):
            writer.write_table(table.cast(SCHEMA), row_group_size=max(1, len(table)))
    return path.stat().st_size


def gather_tables(tables: Iterable[pa.Table], size_bytes: int) -> Iterator[pa.Table]:
    """The same rows in tables of about ``size_bytes``, in their order."""
    gathered: list[pa.Table] = []
    for table in tables:
        for part in _cut(table, size_bytes):
            gathered.append(part)
            if sum(table.nbytes for table in gathered) >= size_bytes:
                yield pa.concat_tables(gathered)
                gathered = []
    if gathered:
        yield pa.concat_tables(gathered)


def _cut(table: pa.Table, size_bytes: int) -> Iterator[pa.Table]:
    rows = max(1, len(table) * size_bytes // max(size_bytes, table.nbytes))
    return (table.slice(start, rows) for start in range(0, len(table), rows))


def _open_writer(path: Path, schema: pa.Schema) -> pq.ParquetWriter:
    return pq.ParquetWriter(path, schema, **_ENCODINGS)


def write_vocabulary(path: Path, tokens: list[bytes | None], special: set[int], run: str) -> None:
    """Write what each token id stands for; ids of no token (None) are left out.

    Raises:
        StorageError: the disk refused.
    """
    known = [number for number, token in enumerate(tokens) if token is not None]
    table = pa.table(
        [known, [tokens[number] for number in known], [number in special for number in known]],
        schema=VOCABULARY_SCHEMA,
    )
    with _replace(path) as draft, _open_writer(draft, VOCABULARY_SCHEMA) as writer:
        writer.add_key_value_metadata({SCHEMA_KEY: SCHEMA_VERSION, RUN_KEY: run})
        writer.write_table(table)


@contextlib.contextmanager
def _replace(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """Where to write what takes the place of ``path`` at the end of the ``with``."""
    draft = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    with explain_refusals(path):
        try:
            yield draft
            if durable:
                fsync(draft)
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
        if durable:
            fsync(path.parent)
