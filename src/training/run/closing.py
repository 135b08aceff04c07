"""What a finished run says of itself: the lines that it ends with, and the card of its model.

Both are made of the run's records, so that they hold for a run that was killed and went on, too.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

import hearth
from training.config.recipe import RecipeConfig
from training.config.rl import RLConfig
from training.run.continuation import find_changed
from training.run.metrics import read_records
from training.run.model_license import find_license
from training.run.state import Run

EDGE = 0.1
"""Share of the steps whose mean reward stands for the beginning, and for the end."""
_LEFT_OUT = frozenset({"log_path", "base_model", "output_model_id"})
"""Settings that a card says elsewhere, or that are of this machine."""


@dataclass(frozen=True)
class Change:
    """A measure at a run's beginning and at its end."""

    name: str
    first: float
    last: float
    note: str = ""

    def __str__(self) -> str:
        """Such as ``0.391 -> 0.639 (first and last step)``."""
        return f"{self.first:.3f} -> {self.last:.3f}{self.note}"


def list_changes(records: Sequence[Mapping[str, Any]]) -> list[Change]:
    """What became of reward or loss and of the held-out measure, by a run's records, in order."""
    return [
        *_curve_change("reward", records, "rollout/raw_reward", "rollout/reward"),
        *_curve_change("loss", records, "train/loss"),
        *_heldout_change(records),
        *_heldout_loss_change(records),
    ]


def _curve_change(
    name: str, records: Sequence[Mapping[str, Any]], *metrics: str
) -> Iterator[Change]:
    """Of the first of ``metrics`` that a step has."""
    steps = [record for record in records if record["type"] == "train"]
    found = [next((step[metric] for metric in metrics if metric in step), None) for step in steps]
    values = [value for value in found if value is not None]  # None stands for NaN, too
    if not values:
        return
    edge = max(1, int(EDGE * len(values)))
    which = "first and last step" if edge == 1 else f"means of the first and last {edge} steps"
    first, last = sum(values[:edge]) / edge, sum(values[-edge:]) / edge
    yield Change(name, first, last, f" ({which})")


def _heldout_loss_change(records: Sequence[Mapping[str, Any]]) -> Iterator[Change]:
    results = [record for record in records if record["type"] == "eval" and "eval/loss" in record]
    note = " (one evaluation)" if len(results) == 1 else ""
    names = {"held-out loss": "eval/loss", "held-out accuracy": "eval/accuracy"}
    for name, metric in names.items():
        values = [result[metric] for result in results if result.get(metric) is not None]
        if values:
            yield Change(name, values[0], values[-1], note)


def _heldout_change(records: Sequence[Mapping[str, Any]]) -> Iterator[Change]:
    results = [
        record
        for record in records
        if record["type"] == "eval" and record.get("eval/reward") is not None
    ]
    if not results:
        return
    # Where each reward is 0 or 1, their mean is the share of right answers.
    is_share = all(record["eval/reward"] == record["eval/accuracy"] for record in results)
    name = "held-out accuracy" if is_share else "held-out reward"
    first, last = (result["eval/reward"] for result in (results[0], results[-1]))
    note = " (one evaluation)" if len(results) == 1 else ""
    yield Change(name, first, last, note)


def _read_changes(run: Run) -> list[Change]:
    return list_changes(read_records(run.log_path / "metrics.jsonl"))


def name_recipe(config: RecipeConfig) -> str:
    """The recipe that a config belongs to: the name of its module, or of the program's file."""
    module = type(config).__module__
    if module == "__main__":
        spec = sys.modules[module].__spec__
        module = spec.name if spec is not None else Path(sys.argv[0]).stem
    return module.rsplit(".", 1)[-1]


def closing_lines(run: Run) -> list[str]:
    """What a run that has ended well says: how far it came, where the model is, what to do next."""
    facts = [(change.name, str(change)) for change in _read_changes(run)]
    if run.model_path is not None:
        facts.append(("model", str(run.model_path)))
        if (run.model_path / "config.json").is_file():
            # A served platform keeps the model in its own folder.
            is_inside = run.model_path.is_relative_to(run.log_path)
            model = run.log_path if is_inside else run.model_path
            facts.append(("talk to it", shlex.join(["hearth", "chat", str(model)])))
    facts.append(("look at it", shlex.join(["hearth", "view", str(run.log_path)])))
    seconds = run.now() - run.started
    title = f"done: {run.step} steps, {run.cursor.count} rows, {seconds:.0f} s"
    return [title, *(f"  {name:<18} {value}" for name, value in facts)]


def model_card(config: RecipeConfig, run: Run) -> str:
    """README.md of the exported model, in the hub's form: what it is, and how it was trained."""
    base = _public_name(config.base_model)
    is_adapter = config.lora_rank > 0 and not config.merge_adapter
    facts = {
        "steps": run.step,
        "rows": run.cursor.count,
        **_describe_method(config),
        **{change.name: str(change) for change in _read_changes(run)},
    }
    changed = {
        name: value for name, (_, value) in find_changed(config).items() if name not in _LEFT_OUT
    }
    return "\n".join(
        [
            "---",
            *([f"base_model: {base}"] if base == config.base_model else []),
            f"license: {find_license(config.base_model)}",
            f"library_name: {'peft' if is_adapter else 'transformers'}",
            "pipeline_tag: text-generation",
            f"tags: [{', '.join([*config.card_tags, 'hearth'])}]",
            "---",
            "",
            f"# {config.output_model_id or run.log_path.name}",
            "",
            f"{'A LoRA adapter for' if is_adapter else 'Trained from'} `{base}` with the recipe "
            f"`{name_recipe(config)}` of Hearth {hearth.__version__}. The license is the base's.",
            "",
            *_table(("", ""), facts),
            "",
            "Settings that are not the recipe's defaults:",
            "",
            *_table(("setting", "value"), {name: _plain(value) for name, value in changed.items()}),
            "",
        ]
    )


def _describe_method(config: RecipeConfig) -> dict[str, object]:
    if not isinstance(config, RLConfig):
        return {}
    return {"completions per row": config.completions_per_prompt, "loss": config.objective_name}


def _table(heads: tuple[str, str], rows: Mapping[str, object]) -> Iterator[str]:
    yield f"| {heads[0]} | {heads[1]} |"
    yield "|---|---|"
    for name, value in rows.items():
        yield f"| {name} | {str(value).replace('|', chr(92) + '|')} |"


def _plain(value: object) -> str:
    """A setting as JSON, without the folders of this machine."""
    if isinstance(value, str):
        value = _public_name(value)
    return f"`{orjson.dumps(value, default=str).decode()}`"


def _public_name(where: str) -> str:
    """A model or data set without the folders that lead to it on this machine."""
    path = Path(where).expanduser()
    return path.name if path.exists() or path.is_absolute() else where
