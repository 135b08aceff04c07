"""``hearth rescore``: what another reward function says about the recorded samples of a run."""

from __future__ import annotations

import asyncio
import inspect
import io
import multiprocessing
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console

from hearth.errors import ConfigError
from hearth.files import write_file
from hearth.records.layout import RESCORED, list_files
from hearth.records.reading import read_file, read_run_id
from hearth.records.table import RUN_KEY, SCHEMA_KEY, SCHEMA_VERSION
from training.data.rows import Row, load_rows
from training.rewards.score import Unscored, as_score
from training.rewards.scoring import AnyReward, call_reward, find_reward
from training.run.rescore_report import Pair, compare, describe
from training.run.rescore_verb import RescoreOptions

REWARD_KEY = "hearth.reward"
COLUMNS = (
    "kind",
    "step",
    "index",
    "completion",
    "segment",
    "row",
    "length",
    "reward",
    "text",
    "ground_truth",
)
SCHEMA = pa.schema(
    [
        ("step", pa.int32()),
        ("kind", pa.string()),
        ("index", pa.int64()),
        ("completion", pa.int32()),
        ("segment", pa.int32()),
        ("reward", pa.float64()),
        ("error", pa.string()),
    ]
)
_CHUNK = 256
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")

Outcome = tuple[float | None, str | None]
"""A reward, or the error in its place; neither for a sample without any text."""


def rescore_and_report(options: RescoreOptions, console: Console) -> Path:
    """Score all samples, write the result, print the comparison; returns the file.

    Raises:
        ConfigError: an option breaks its rule, or nothing is recorded.
    """
    log_path = Path(options.run).expanduser()
    if options.workers < 1:
        raise ConfigError(f"workers must be >= 1, got {options.workers}")
    reward_fn = find_reward(options.reward)
    name = options.name or options.reward.rpartition(":")[2]
    if not _NAME.fullmatch(name):
        raise ConfigError(f"name must be of letters, digits and _ . -, got {name!r}")
    path = log_path / RESCORED / f"{name}.parquet"
    if path.exists() and not options.replace:
        raise ConfigError(f"name must be new, got {name!r}: give another --name, or --replace")
    run, samples = _read_samples(log_path)
    rows = find_rows(log_path)
    tasks = [(sample["text"], rows(sample)) if sample["length"] else None for sample in samples]
    outcomes = list(score_all(reward_fn, options, tasks))
    path.parent.mkdir(exist_ok=True)
    write_file(path, _to_parquet(samples, outcomes, run, options.reward))
    pairs = [
        Pair(sample, reward, error)
        for sample, (reward, error) in zip(samples, outcomes, strict=True)
    ]
    for line in describe(compare(pairs)):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(f"written to {path}", markup=False, highlight=False, soft_wrap=True)
    return path


def find_rows(log_path: Path) -> Callable[[Mapping[str, Any]], Row]:
    """What gives the dataset's row of a sample, or its truth alone where the row is not there.

    A row counts as found where the run's dataset is a file and the row has the sample's truth:
    a program may have trained on other rows than those that its config names.
    """
    try:
        config = orjson.loads((log_path / "config.json").read_bytes())
    except (OSError, orjson.JSONDecodeError):
        config = {}
    columns = config.get("columns")
    datasets = {
        "train": _load(config.get("dataset"), config.get("max_rows"), columns),
        "eval": _load(config.get("eval_dataset"), config.get("eval_rows"), columns),
    }

    def find_row(sample: Mapping[str, Any]) -> Row:
        rows, place, truth = datasets[sample["kind"]], sample["row"], sample["ground_truth"]
        if place is not None and 0 <= place < len(rows) and _has_truth(rows[place], truth):
            return rows[place]
        return {"ground_truth": truth}

    return find_row


def _load(
    dataset: str | None, count: int | None, columns: Mapping[str, str] | None
) -> list[dict[str, Any]]:
    if not dataset or not Path(dataset).exists():
        return []
    try:
        return load_rows(dataset, count, columns=columns, needs_messages=False)
    except ConfigError:
        return []


def _has_truth(row: Row, truth: str | None) -> bool:
    found = row.get("ground_truth")
    if found is None or isinstance(found, str):
        return found == truth
    try:
        return truth is not None and orjson.loads(truth) == found
    except orjson.JSONDecodeError:
        return False


def score_all(
    reward_fn: AnyReward, options: RescoreOptions, tasks: Sequence[tuple[str, Row] | None]
) -> Iterator[Outcome]:
    """What each text of a row earns, in order; None of a task earns nothing."""
    if options.workers == 1 or inspect.iscoroutinefunction(reward_fn):
        yield from asyncio.run(_score(reward_fn, tasks, options.workers))
        return
    chunks = [tasks[start : start + _CHUNK] for start in range(0, len(tasks), _CHUNK)]
    # Started anew: what this process has loaded has threads, which a fork would not have.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.workers, mp_context=context) as pool:
        for outcomes in pool.map(_score_chunk, [options.reward] * len(chunks), chunks):
            yield from outcomes


def _score_chunk(reward: str, tasks: Sequence[tuple[str, Row] | None]) -> list[Outcome]:
    return asyncio.run(_score(find_reward(reward), tasks, 1))


async def _score(
    reward_fn: AnyReward, tasks: Sequence[tuple[str, Row] | None], at_once: int
) -> list[Outcome]:
    """All outcomes, with ``at_once`` calls that are awaited under way."""
    outcomes: list[Outcome] = [(None, None)] * len(tasks)
    places = iter(place for place, task in enumerate(tasks) if task is not None)

    async def work() -> None:
        for place in places:
            task = tasks[place]
            assert task is not None, "others are left out above"
            outcomes[place] = await _score_text(reward_fn, *task)

    await asyncio.gather(*(work() for _ in range(at_once)))
    return outcomes


async def _score_text(reward_fn: AnyReward, text: str, row: Row) -> Outcome:
    try:
        outcome = call_reward(reward_fn, text, row)
        if inspect.isawaitable(outcome):
            outcome = await outcome
        if isinstance(outcome, Unscored):
            raise outcome.error
        return as_score(outcome).reward, None
    except Exception as error:  # noqa: BLE001 - a function of the user may raise any
        return None, f"{type(error).__name__}: {error}"


def _read_samples(log_path: Path) -> tuple[str, list[dict[str, Any]]]:
    """The id of the run, and all its samples."""
    while True:
        files = list_files(log_path)
        if not files:
            raise ConfigError(f"run must be a folder with recorded samples, got none in {log_path}")
        try:
            samples = [sample for file in files for sample in read_file(file, COLUMNS).to_pylist()]
            return read_run_id(files[0]), samples
        except FileNotFoundError:  # a run that goes on has merged it into another one
            continue


def _to_parquet(
    samples: Sequence[Mapping[str, Any]], outcomes: Sequence[Outcome], run: str, reward: str
) -> bytes:
    columns = [[sample[name] for sample in samples] for name in SCHEMA.names[:5]]
    columns += [[reward for reward, _ in outcomes], [error for _, error in outcomes]]
    metadata = {SCHEMA_KEY: SCHEMA_VERSION, RUN_KEY: run, REWARD_KEY: reward}
    table = pa.table(columns, schema=SCHEMA.with_metadata(metadata))
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd")
    return buffer.getvalue()
