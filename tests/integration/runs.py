"""What a run leaves behind: its metrics, its checkpoints and its model."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch
from safetensors.torch import load_file

from hearth.records.reading import iterate_tables, to_records
from training.quickstart import MODEL
from training.run.checkpoints import Checkpoint, read_manifest
from training.run.metric_table import find_unexplained
from training.run.state import RunSummary


@dataclass
class Trial:
    """A finished run with what it left behind."""

    folder: Path
    summary: RunSummary
    rewarded: list[str] = field(default_factory=list)

    def records(self, kind: str = "train") -> list[dict[str, Any]]:
        """Metrics of one type, without wall times."""
        return [record for record in read_records(self.folder) if record["type"] == kind]

    def weights(self) -> dict[str, torch.Tensor]:
        """The exported model."""
        return load_file(self.folder / "models" / "out" / "model.safetensors")

    def has_weights_of(self, other: Trial) -> bool:
        return same_weights(self.weights(), other.weights())


def same_weights(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Whether two models are the same to the bit."""
    assert left.keys() == right.keys()
    return all(torch.equal(weight, right[name]) for name, weight in left.items())


def find_changed(weights: dict[str, torch.Tensor]) -> list[str]:
    """Names of the weights that a run on the shipped model has changed."""
    base = load_file(MODEL / "model.safetensors")
    return [name for name, weight in weights.items() if not torch.equal(weight.float(), base[name])]


def measure_difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """Largest difference of two models, relative to the largest change of the first one."""
    base = load_file(MODEL / "model.safetensors")
    moved = max(float((left[name] - base[name]).abs().max()) for name in left)
    assert moved > 0, "the run did not train"
    return max(float((left[name] - right[name]).abs().max()) for name in left) / moved


def read_metrics(folder: Path, own: Collection[str] = ()) -> list[dict[str, Any]]:
    """All records of a run, whose names must be in the table of metrics or a test's ``own``."""
    lines = (folder / "metrics.jsonl").read_bytes().splitlines()
    records = [orjson.loads(line) for line in lines]
    names = {name for record in records for name in record}
    assert find_unexplained(names - set(own)) == [], "training/run/metric_table.py lacks them"
    return records


def read_steps(folder: Path) -> list[dict[str, Any]]:
    """The records of a run's steps."""
    return [record for record in read_metrics(folder) if record["type"] == "train"]


def read_records(folder: Path) -> list[dict[str, Any]]:
    """All records of a run, without wall times."""
    return [
        {name: value for name, value in record.items() if not name.startswith("perf/")}
        for record in read_metrics(folder)
    ]


def read_samples(folder: Path) -> list[dict[str, Any]]:
    """All recorded samples of a run, sorted, without times, versions and the run's id.

    Arrays are bytes, so that a NaN equals itself.
    """
    left_out = {"run", "started", "sample_s", "score_s", "versions", "version"}
    samples = [
        {
            name: value.tobytes() if isinstance(value, np.ndarray) else value
            for name, value in sample.items()
            if name not in left_out
        }
        for table in iterate_tables(folder)
        for sample in to_records(table)
    ]
    return sorted(samples, key=sample_id)


def sample_id(sample: dict[str, Any]) -> tuple[Any, ...]:
    """What tells a sample from all others of its run."""
    return tuple(sample[name] for name in ("kind", "step", "index", "completion", "segment"))


class FinishedRun:
    """What a run left behind: its records of steps, its last checkpoint, and the model."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.weights = load_file(model / "model.safetensors")
        self.samples = read_samples(folder)
        self.records = [line for line in read_records(folder) if line["type"] == "train"]

    @property
    def last(self) -> Checkpoint:
        """Its last checkpoint."""
        return read_manifest(self.folder)[-1]

    def has_weights_of(self, other: FinishedRun) -> bool:
        return same_weights(self.weights, other.weights)


def count_steps(folder: Path) -> int:
    """How many records a run has written that may still go on."""
    metrics = folder / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0
