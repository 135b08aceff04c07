"""Where runs differ: their settings, and the first step, sample and token at which two part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hearth.errors import RequestError
from hearth.records.layout import SampleId
from hearth.viewer.database import Database, SampleTable
from hearth.viewer.library import find_differences, flatten
from hearth.viewer.run import RecordedRun
from hearth.viewer.tokens import TokenReader

MOST_RUNS = 8
_TIMES = "perf/"
"""Metrics below this are times, in which equal runs differ."""
_IDS = "kind, step, index, completion, segment"
_ORDER = "step, kind, index, completion, segment"
_MISSING = ("missing in the first", "missing in the other")


def compare_runs(
    runs: Sequence[RecordedRun], database: Database, reader: TokenReader
) -> dict[str, Any]:
    """The settings that differ, and where each further run parts from the first.

    Raises:
        RequestError: there are fewer than two runs, or more than eight.
    """
    if not 2 <= len(runs) <= MOST_RUNS:
        raise RequestError(f"runs must be 2 to {MOST_RUNS} names, got {len(runs)}")
    settings = [flatten(run.config()) for run in runs]
    config = [
        {"field": field, "values": [config.get(field) for config in settings]}
        for field in find_differences(settings)
    ]
    first, *others = runs
    return {
        "config": config,
        "parts": [find_parting(first, other, database, reader) for other in others],
    }


def find_parting(
    first: RecordedRun, other: RecordedRun, database: Database, reader: TokenReader
) -> dict[str, Any]:
    """The first metric and the first sample and token in which a run differs from the first one;
    ``step`` is that of the earlier of both, None where they are equal in what both have."""
    first.refresh()
    other.refresh()
    metric = _first_metric(first, other)
    sample = _first_sample(*_load_both(first, other, database))
    found: list[tuple[int, str]] = []
    missing = token = None
    if sample is not None and sample[1] in _MISSING:
        missing = (first, other)[_MISSING.index(sample[1])]
        found.append((sample[0].step, f"sample {sample[0]} is missing in {missing.name}"))
    elif sample is not None:
        token, reason = _describe_sample(first, other, sample, reader)
        found.append((sample[0].step, reason))
    if metric is not None:
        step, name, values = metric
        found.append((step, f"{name} is {values[0]:.9g} and {values[1]:.9g} at step {step}"))
    found.sort(key=lambda entry: entry[0])
    return {
        "run": other.key,
        "step": found[0][0] if found else None,
        "metric": metric[1] if metric is not None else None,
        "metric_step": metric[0] if metric is not None else None,
        "sample": str(sample[0]) if sample is not None else None,
        "missing_in": missing.key if missing is not None else None,
        "token": token,
        "reason": "; ".join(reason for _, reason in found)
        or "the runs are equal in what both have on record",
    }


def _load_both(
    first: RecordedRun, other: RecordedRun, database: Database
) -> tuple[SampleTable, SampleTable]:
    table = database.samples(first)
    return table, database.samples(other, beside=table)


def _first_metric(
    first: RecordedRun, other: RecordedRun
) -> tuple[int, str, tuple[float, float]] | None:
    first_steps, other_steps = first.metrics.train, other.metrics.train
    names = [
        name
        for name in first_steps.columns
        if name in other_steps.columns and not name.startswith(_TIMES)
    ]
    for step in sorted(set(first_steps.steps) & set(other_steps.steps)):
        for name in names:
            values = first_steps.at(name, step), other_steps.at(name, step)
            if values[0] != values[1]:
                return step, name, tuple(math.nan if value is None else value for value in values)  # pyright: ignore[reportReturnType]
    return None


def _first_sample(first: SampleTable, other: SampleTable) -> tuple[SampleId, str] | None:
    """The first sample in which the runs differ by their tables, and in what."""
    columns = ["prompt_key", "length", "text", "finish_reason", "reward"]
    if not (first.has_text and other.has_text):
        columns = ["length", "finish_reason", "reward", "mean_logprob"]
    differs = [f"a.{name} IS DISTINCT FROM b.{name}" for name in columns]
    found = first.database.query(
        f"SELECT {_IDS}, a.place IS NULL, b.place IS NULL, {', '.join(differs)} "
        f"FROM {first.name} a FULL JOIN {other.name} b USING ({_IDS}) "
        # An evaluation that only one of them made is no difference.
        f"WHERE ({' OR '.join(differs)}) AND (kind = 'train' OR a.place + b.place IS NOT NULL) "
        f"AND step <= (SELECT least("
        f"(SELECT max(step) FROM {first.name}), (SELECT max(step) FROM {other.name}))) "
        f"ORDER BY {_ORDER} LIMIT 1"
    )
    if not found:
        return None
    kind, step, index, completion, segment, *flags = found[0]
    sample = SampleId(kind, step, index, completion, segment)
    if flags[0] or flags[1]:
        return sample, _MISSING[bool(flags[1])]
    return sample, next(name for name, flag in zip(columns, flags[2:], strict=True) if flag)


def _describe_sample(
    first: RecordedRun, other: RecordedRun, found: tuple[SampleId, str], reader: TokenReader
) -> tuple[int | None, str]:
    """The first token that differs, None where all are equal, and what differs in words."""
    sample, what = found
    records = [reader.read_record(run, sample) for run in (first, other)]
    ids = [record["tokens"].tolist() for record in records]
    token = next(
        (at for at, pair in enumerate(zip(*ids, strict=False)) if pair[0] != pair[1]),
        min(map(len, ids)) if len(ids[0]) != len(ids[1]) else None,
    )
    if token is None:
        values = " and ".join(str(record.get(what)) for record in records)
        return None, f"the tokens of sample {sample} are equal, its {what} is {values}"
    spelled = [
        f"{reader.vocabulary(run).decode(numbers[token : token + 1])!r} (id {numbers[token]})"
        if token < len(numbers)
        else "its end"
        for run, numbers in zip((first, other), ids, strict=True)
    ]
    where = "the prompt" if token < records[0]["prompt_len"] else "the completion"
    return token, (
        f"token {token} of sample {sample}, in {where}, is {spelled[0]} in {first.name} "
        f"and {spelled[1]} in {other.name}"
    )
