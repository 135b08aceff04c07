"""``hearth show`` and ``hearth compare``: runs in the terminal, from what the viewer reads."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hearth.errors import ConfigError
from hearth.exit_codes import exit_code

if TYPE_CHECKING:
    from hearth.viewer.database import Database
    from hearth.viewer.metrics import Columns
    from hearth.viewer.run import RecordedRun

Explain = Callable[[Mapping[str, float], Sequence[Mapping[str, float]]], Sequence[tuple[str, str]]]
"""What is wrong with a step's metrics, given those before it: kinds, each with a line."""

SHOWN_SAMPLES = 3
_READ_SAMPLES = 200
_PLOT_LINES = 8
_SPARK = 40
_LEAST_CHANGE = 0.01
"""Change of the mean reward below which it is flat, whatever its noise."""
_LEAST_STEPS = 4


@dataclass(frozen=True, kw_only=True)
class CompareFlags:
    """Print where runs differ: settings, curves, held-out numbers, the first token."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders of two to eight runs; each is set beside the first."""


def compare(arguments: list[str]) -> int:
    """Print where runs differ: settings, curves, held-out numbers, the first token."""
    flags = tyro.cli(CompareFlags, args=arguments, prog="hearth compare")

    def run() -> None:
        from hearth.viewer.compare import compare_runs
        from hearth.viewer.database import Database
        from hearth.viewer.tokens import TokenReader

        runs = open_runs(flags.runs)
        found = compare_runs(runs, Database([run.folder for run in runs]), TokenReader())
        _print_comparison(runs, found, make_console())

    return exit_code(run)


def open_runs(folders: Sequence[Path]) -> list[RecordedRun]:
    """The runs of folders that are runs themselves.

    Raises:
        ConfigError: a folder is none, or not the folder of one run.
    """
    from hearth.viewer.library import Library

    folders = [folder.expanduser().resolve() for folder in folders]
    known = {run.folder: run for run in Library(folders).runs()}
    for folder in folders:
        if folder not in known:
            inside = [str(place) for place in known if place.is_relative_to(folder)]
            advice = f"it has {', '.join(inside[:5])}" if inside else "it has no metrics.jsonl"
            raise ConfigError(f"run must be the log_path of one run, got {folder}: {advice}")
    return [known[folder] for folder in folders]


def make_console() -> Console:
    """A console that changes nothing in what it prints."""
    return Console(highlight=False, markup=False, soft_wrap=True)


def print_run(run: RecordedRun, database: Database, explain: Explain, console: Console) -> None:
    """Print a run's state, reward curve, held-out numbers, why it is flat, and some samples."""
    from hearth.viewer.metrics import LOSS
    from hearth.viewer.terminal.drawing import clean

    row = run.row()
    facts = [row["state"], f"step {row['step'] or 0}"]
    facts += [str(row[name]) for name in ("recipe", "policy_loss", "base_model") if row[name]]
    if row["duration_s"]:
        facts.append(f"{row['duration_s']:.0f} s")
    console.print(clean(f"{row['name']}: {', '.join(facts)}"))
    if row["state_text"]:
        console.print(clean(row["state_text"]))
    name, steps, rewards = _read_reward(run)
    kind, told = _list_held_out(run)
    if not rewards:
        console.print(f"{kind}: {told[-1]}" if told else "no step is on record yet")
        return
    _plot(name, steps, rewards, console)
    told = told or ["not measured (eval_dataset and eval_every)"]
    console.print(f"{kind}: " + ", ".join(dict.fromkeys((told[0], told[-1]))))
    if is_flat(rewards):
        console.print(f"\nthe {'loss' if name == LOSS else 'reward'} is flat:")
        for line in _explain_steps(run.metrics.train, explain):
            console.print(f"  {line}")
    for title, is_descending in (("best", "true"), ("worst", "false")):
        _print_samples(run, database, title, is_descending, console)


def is_flat(rewards: Sequence[float]) -> bool:
    """Whether the last third of a curve is where the first was, as far as its noise tells."""
    if len(rewards) < _LEAST_STEPS:
        return False
    third = max(2, len(rewards) // 3)
    first, last = rewards[:third], rewards[-third:]
    noise = math.hypot(*(statistics.stdev(part) / math.sqrt(third) for part in (first, last)))
    change = statistics.fmean(last) - statistics.fmean(first)
    return abs(change) <= max(_LEAST_CHANGE, 2 * noise)


def _read_reward(run: RecordedRun) -> tuple[str, list[int], list[float]]:
    from hearth.viewer.metrics import LOSS, REWARDS

    columns = run.metrics.train.columns
    name = next((name for name in (*REWARDS, LOSS) if name in columns), REWARDS[0])
    pairs = sorted(zip(run.metrics.train.steps, columns.get(name, ()), strict=False))
    known = [(step, value) for step, value in pairs if math.isfinite(value)]
    return name, [step for step, _ in known], [value for _, value in known]


def _plot(name: str, steps: Sequence[int], values: Sequence[float], console: Console) -> None:
    from hearth.viewer.terminal.drawing import plot

    width = max(20, console.width - 12)
    lines = plot(values, width, _PLOT_LINES)
    console.print(f"\n{'':>11}{name}: {values[0]:.4g} at first, {values[-1]:.4g} at last")
    for number, line in enumerate(lines):
        edge = {0: max(values), len(lines) - 1: min(values)}.get(number)
        console.print(f"{edge:>10.4g} {line}" if edge is not None else f"{'':>11}{line}")
    first, last = f"step {steps[0]}", str(steps[-1])
    console.print(" " * 11 + first + last.rjust(width - len(first)))


def _list_held_out(run: RecordedRun) -> tuple[str, list[str]]:
    """What was measured on held-out rows, and its values; of graded rewards their mean."""
    evaluations = run.metrics.evaluations()
    losses = [result for result in evaluations if result["loss"] is not None]
    if losses:
        told = [f"{result['loss']:.4f} at step {result['step']:.0f}" for result in losses]
        return "held-out loss", told
    results = [result for result in evaluations if result["reward"] is not None]
    # Where each reward is 0 or 1, their mean is the share of right answers.
    is_share = all(result["reward"] == result["accuracy"] for result in results)
    kind = "held-out accuracy" if is_share and results else "held-out reward"
    return kind, [f"{result['reward']:.3f} at step {result['step']:.0f}" for result in results]


def _explain_steps(train: Columns, explain: Explain) -> Iterator[str]:
    """The lines of what is wrong with a third of the steps or more; the last of each kind."""
    past: list[Mapping[str, float]] = []
    lines: dict[str, list[str]] = {}
    for step in sorted(train.steps):
        metrics = {
            name: value for name in train.columns if (value := train.at(name, step)) is not None
        }
        for kind, line in explain(metrics, past):
            lines.setdefault(kind, []).append(line)
        past.append(metrics)
    often = [told for told in lines.values() if 3 * len(told) >= len(past)]
    for told in sorted(often, key=len, reverse=True):
        yield f"in {len(told)} of {len(past)} steps: {told[-1]}"
    if not often:
        yield "no step shows a cause: is learning_rate high enough, were there enough steps?"


def _print_samples(
    run: RecordedRun, database: Database, title: str, is_descending: str, console: Console
) -> None:
    """Print the last steps' samples of the highest or of the lowest reward, each of its own row."""
    from hearth.viewer.samples import Samples
    from hearth.viewer.terminal.drawing import cell

    query = {"kind": "train", "sort": "reward", "descending": is_descending}
    query |= {"limit": str(_READ_SAMPLES), "step_min": str(3 * (run.metrics.step or 0) // 4)}
    found = [row for row in Samples(database, run).page(query)["rows"] if row["reward"] is not None]
    if not found:
        return
    of_rows: dict[int, dict[str, Any]] = {}
    for row in found:
        of_rows.setdefault(row["index"], row)
    console.print(f"\n{title} samples of the last steps")
    for row in list(of_rows.values())[:SHOWN_SAMPLES]:
        console.print(f"  {row['id']}  reward {row['reward']:.4g}  {row['finish_reason'] or ''}")
        for label, text in (("asked", row["prompt_end"][-200:]), ("answer", row["text"])):
            line = Text(f"    {label:<7}") + cell(text, width=max(20, console.width - 12))
            console.print(line, no_wrap=True)


def _print_comparison(
    runs: Sequence[RecordedRun], found: Mapping[str, Any], console: Console
) -> None:
    from hearth.viewer.terminal.drawing import cell, clean, spark

    rows = [run.row() for run in runs]
    width = max(8, (console.width - 24) // len(runs))
    table = Table("", box=None, pad_edge=False)
    for row in rows:
        table.add_column(cell(row["name"], width=width))
    for name in ("state", "step", "duration_s", "reward"):
        table.add_row(name, *(_short(row[name], width) for row in rows))
    results = [_list_held_out(run) for run in runs]
    kinds = {kind for kind, _ in results}
    if len(kinds) > 1:
        kinds.discard("held-out accuracy")  # each is a mean of rewards
    kind = " or ".join(sorted(kinds))
    for label, place in (("first", 0), ("last", -1)):
        values = [told[place] if told else None for _, told in results]
        table.add_row(f"{kind}, {label}", *(_short(value, width) for value in values))
    table.add_row("reward curve", *(spark(row["spark"], min(width, _SPARK)) for row in rows))
    console.print(table)
    _print_settings(found["config"], width, console)
    console.print()
    for row, parts in zip(rows[1:], found["parts"], strict=True):
        is_equal = parts["step"] is None
        where = "" if is_equal else f" parts from {rows[0]['name']} at step {parts['step']}"
        console.print(clean(f"{row['name']}{where}: {parts['reason']}"))


def _print_settings(fields: Sequence[Mapping[str, Any]], width: int, console: Console) -> None:
    if not fields:
        console.print("\nno setting differs")
        return
    empty = [""] * len(fields[0]["values"])
    table = Table("setting that differs", *empty, box=None, pad_edge=False)
    for field in fields:
        table.add_row(field["field"], *(_short(value, width) for value in field["values"]))
    console.print()
    console.print(table)


def _short(value: object, width: int) -> Text:
    from hearth.viewer.terminal.drawing import cell

    found = cell(value, ".4g" if isinstance(value, float) else "", width)
    found.justify = "left"
    return found
