"""Gradients that ranks add up whole or in parts: the numbers of one process, and fewer bytes."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.scale.ranks.gradients import MICRO_BATCH_TOKENS, train
from tests.scale.ranks.trainers import assert_close, checkpoint_tensors, write_model

from hearth.sync.store import MemorySnapshotStore
from hearth.trainer.engine import TrainerEngine
from hearth.trainer.options import TrainerOptions

ROOT = Path(__file__).parents[3]
LAYERS = 6
AMPLE, NONE = 2**40, 0


@dataclass(frozen=True)
class Trained:
    metrics: dict[str, Any]
    state: dict[str, torch.Tensor]
    peaks: list[int]
    """Bytes of gradients that each rank held at most."""
    log: str


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("deep"), layers=LAYERS)


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Trained by one process."""
    folder = tmp_path_factory.mktemp("alone")
    engine = TrainerEngine(
        model,
        name="tiny",
        snapshots=MemorySnapshotStore(),
        checkpoint_dir=folder,
        options=TrainerOptions(micro_batch_tokens=MICRO_BATCH_TOKENS),
    )
    metrics = train(engine)
    engine.close()
    return Trained(metrics, checkpoint_tensors(folder, "trained"), [], "")


def train_on_ranks(model: Path, folder: Path, ranks: int, memory: int) -> Trained:
    folder.mkdir()
    command = [sys.executable, "-m", "tests.scale.ranks.gradients", str(model), str(folder)]
    ran = subprocess.run(
        [*command, str(ranks), str(memory)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
    state = checkpoint_tensors(folder / "checkpoints", "trained")
    return Trained(found[0], state, [rank["peak"] for rank in found], ran.stderr)


@pytest.mark.parametrize("ranks", [2, 4])
def test_gradients_in_parts_have_the_numbers_of_whole_ones_in_a_fraction_of_the_bytes(
    model, alone, ranks, tmp_path
):
    whole = train_on_ranks(model, tmp_path / "whole", ranks, AMPLE)
    parts = train_on_ranks(model, tmp_path / "parts", ranks, NONE)

    for found in (whole, parts):
        assert found.metrics["norms"] == pytest.approx(alone.metrics["norms"], rel=1e-5)
        # A loss is a sum of terms of either sign.
        largest = max(map(abs, alone.metrics["losses"]))
        assert found.metrics["losses"] == pytest.approx(alone.metrics["losses"], abs=1e-5 * largest)
        assert_close(found.state, alone.state)
    assert "are added up whole on each rank, and reduced once a request" in whole.log
    assert "are added up in parts, and reduced in each one" in parts.log

    weights = [value for name, value in alone.state.items() if name.startswith("weights/")]
    total = 4 * sum(weight.numel() for weight in weights)
    layer = 4 * sum(
        value.numel()
        for name, value in alone.state.items()
        if name.startswith("weights/model.layers.0.")
    )
    # A rank's part, rows that do not divide, and twice a layer: its gradient, and what is sent.
    assert max(parts.peaks) <= 1.1 * total / ranks + 2 * 1.1 * layer
    assert min(whole.peaks) >= total


def test_the_same_memory_leaves_the_same_bits(model, tmp_path):
    first = train_on_ranks(model, tmp_path / "first", 2, NONE)
    again = train_on_ranks(model, tmp_path / "again", 2, NONE)

    assert first.metrics["norms"] == again.metrics["norms"]
    assert all(torch.equal(value, again.state[name]) for name, value in first.state.items())
