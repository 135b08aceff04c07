"""Where runs differ: their settings, and the first step, sample and token at which two part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hearth.errors import RequestError
from hearth.records.layout import SampleId
from hearth.viewer.database import Database
from hearth.viewer.library import find_differences, flatten
from hearth.viewer.run import RecordedRun
from hearth.viewer.samples import Samples
from hearth.viewer.tokens import TokenReader

MOST_RUNS = 8
_TIMES = "perf/"
"""Metrics below this are times, in which equal runs differ."""
_IDS = "kind, step, index, completion, segment"
_NOTHING = {"step": None, "metric": None, "sample": None, "token": None}


def compare_runs(
    runs: Sequence[RecordedRun], database: Database, reader: TokenReader
) -> dict[str, Any]:
    """The settings that differ, and where the second run parts from the first.

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
    return {"config": config, "parts": find_parting(runs[0], runs[1], database, reader)}


def find_parting(
    first: RecordedRun, second: RecordedRun, database: Database, reader: TokenReader
) -> dict[str, Any] | None:
    """The first difference of two runs in what they sampled or counted; None where there is none
    in what both have."""
    first.refresh()
    second.refresh()
    metric = _first_metric(first, second)
    sample = _first_sample(Samples(database, first), Samples(database, second))
    if sample is not None and (metric is None or sample[0].step <= metric[0]):
        return {**_NOTHING, **_describe_sample(first, second, sample, reader)}
    if metric is None:
        return None
    step, name, values = metric
    return {
        **_NOTHING,
        "step": step,
        "metric": name,
        "reason": f"{name} is {values[0]:.9g} in {first.name} and {values[1]:.9g} in "
        f"{second.name}; the samples until then are equal where both are on record",
    }


def _first_metric(
    first: RecordedRun, second: RecordedRun
) -> tuple[int, str, tuple[float, float]] | None:
    first_steps, second_steps = first.metrics.train, second.metrics.train
    names = [
        name
        for name in first_steps.columns
        if name in second_steps.columns and not name.startswith(_TIMES)
    ]
    for step in sorted(set(first_steps.steps) & set(second_steps.steps)):
        for name in names:
            values = first_steps.at(name, step), second_steps.at(name, step)
            if values[0] != values[1]:
                return step, name, tuple(math.nan if value is None else value for value in values)  # pyright: ignore[reportReturnType]
    return None


def _first_sample(first: Samples, second: Samples) -> tuple[SampleId, str] | None:
    """The first sample in which the runs differ by their tables, and in what."""
    first_table, second_table = first.table.name, second.table.name
    columns = ["prompt_key", "length", "text", "finish_reason", "reward"]
    if not (first.table.has_text and second.table.has_text):
        columns = ["length", "finish_reason", "reward", "mean_logprob"]
    differs = " OR ".join(f"a.{name} IS DISTINCT FROM b.{name}" for name in columns)
    found = first.database.query(
        f"SELECT {_IDS}, a.place IS NULL, b.place IS NULL, "
        + ", ".join(f"a.{name} IS DISTINCT FROM b.{name}" for name in columns)
        + f" FROM {first_table} a FULL JOIN {second_table} b USING ({_IDS}) "
        f"WHERE ({differs}) AND step <= (SELECT least((SELECT max(step) FROM {first_table}), "
        f"(SELECT max(step) FROM {second_table}))) ORDER BY step, kind, index, "
        "completion, segment LIMIT 1"
    )
    if not found:
        return None
    kind, step, index, completion, segment, *flags = found[0]
    sample = SampleId(kind, step, index, completion, segment)
    if flags[0] or flags[1]:
        return sample, "missing in " + ("the first run" if flags[0] else "the second run")
    names = [name for name, differs_in in zip(columns, flags[2:], strict=True) if differs_in]
    return sample, names[0]


def _describe_sample(
    first: RecordedRun, second: RecordedRun, found: tuple[SampleId, str], reader: TokenReader
) -> dict[str, Any]:
    sample, what = found
    place = {"step": sample.step, "sample": str(sample)}
    if what.startswith("missing"):
        return {**place, "reason": f"sample {sample} is {what}"}
    first_record, second_record = (
        reader.read_record(first, sample),
        reader.read_record(second, sample),
    )
    ids = first_record["tokens"].tolist(), second_record["tokens"].tolist()
    token = next(
        (at for at, pair in enumerate(zip(*ids, strict=False)) if pair[0] != pair[1]),
        min(len(ids[0]), len(ids[1])) if len(ids[0]) != len(ids[1]) else None,
    )
    if token is None:
        return {
            **place,
            "reason": f"the tokens of sample {sample} are equal, its {what} is "
            f"{first_record.get(what)} and {second_record.get(what)}",
        }
    spelled = [
        f"{reader.vocabulary(run).decode(numbers[token : token + 1])!r} (id {numbers[token]})"
        if token < len(numbers)
        else "its end"
        for run, numbers in zip((first, second), ids, strict=True)
    ]
    where = "the prompt" if token < first_record["prompt_len"] else "the completion"
    return {
        **place,
        "token": token,
        "reason": f"token {token} of sample {sample}, in {where}, is {spelled[0]} in {first.name} "
        f"and {spelled[1]} in {second.name}",
    }
