"""Gradients that ranks add up whole or in parts: the numbers of one process, and fewer bytes."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.scale.ranks.gradients import MICRO_BATCH_TOKENS, Setup, train
from tests.scale.ranks.trainers import assert_close, checkpoint_tensors, write_model

from hearth.sync.chain import resolve
from hearth.sync.store import FolderBuckets, MemorySnapshotStore
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
    log: str = ""
    written: int = 0
    """Bytes of the files of the checkpoint."""


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
    return Trained(metrics, checkpoint_tensors(folder, "trained"), [])


@pytest.fixture(scope="module")
def train_on_ranks(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Trained]]:
    """What so many ranks with so much memory train."""
    command = [sys.executable, "-m", "tests.scale.ranks.gradients"]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def run(ranks: int, memory: int, machines: int = 1) -> Trained:
            setup = Setup(
                str(model), str(tmp_path_factory.mktemp("ranks")), ranks, memory, machines
            )
            process.stdin.write(json.dumps(asdict(setup)) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
            log = Path(setup.folder, "log").read_text()
            assert answer == f"{[0] * ranks}\n", log[-3000:]
            return read_trained(Path(setup.folder), ranks, log)

        yield run


@pytest.fixture(scope="module")
def trained_on_ranks(train_on_ranks: Callable[..., Trained]) -> Callable[..., Trained]:
    """The same, once for each setup."""
    return functools.cache(train_on_ranks)


def read_trained(folder: Path, ranks: int, log: str) -> Trained:
    found = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
    state = checkpoint_tensors(folder / "checkpoints", "trained")
    again = checkpoint_tensors(folder / "checkpoints", "again")
    assert again.keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in again.items())
    published = resolve(FolderBuckets(folder / "buckets").bucket("bucket"), "step-1").tensors
    weights = {f"weights/{name}": tensor for name, tensor in published.items()}
    assert all(torch.equal(tensor, state[name]) for name, tensor in weights.items())
    assert len(weights) == sum(name.startswith("weights/") for name in state)
    written = sum(path.stat().st_size for path in folder.rglob("trained/**/*.safetensors"))
    return Trained(found[0], state, [rank["peak"] for rank in found], log, written)


def assert_same(found: Trained, alone: Trained) -> None:
    """The numbers of one process, to 1e-5."""
    assert found.metrics["norms"] == pytest.approx(alone.metrics["norms"], rel=1e-5)
    # A loss is a sum of terms of either sign.
    largest = max(map(abs, alone.metrics["losses"]))
    assert found.metrics["losses"] == pytest.approx(alone.metrics["losses"], abs=1e-5 * largest)
    assert_close(found.state, alone.state)


@pytest.mark.parametrize("ranks", [2, 4])
def test_gradients_in_parts_have_the_numbers_of_whole_ones_in_a_fraction_of_the_bytes(
    trained_on_ranks, alone, ranks
):
    whole = trained_on_ranks(ranks, AMPLE)
    parts = trained_on_ranks(ranks, NONE)

    for found in (whole, parts):
        assert_same(found, alone)
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


def test_the_same_memory_leaves_the_same_bits(trained_on_ranks, train_on_ranks):
    first = trained_on_ranks(2, NONE)
    again = train_on_ranks(2, NONE)

    assert first.metrics["norms"] == again.metrics["norms"]
    assert all(torch.equal(value, again.state[name]) for name, value in first.state.items())


def test_machines_that_hold_copies_have_the_numbers_of_one_process(train_on_ranks, alone):
    """Four ranks as two on each of two machines; a checkpoint has every part once."""
    total = 4 * sum(
        value.numel() for name, value in alone.state.items() if name.startswith("weights/")
    )
    copies = train_on_ranks(4, AMPLE, machines=2)
    # Parts of half a model, with their gradients and moments, and no whole gradient.
    tight = train_on_ranks(4, 5 * total, machines=2)
    divided = train_on_ranks(4, 3 * total, machines=2)

    for found in (copies, tight, divided):
        assert_same(found, alone)
    says = "trained weights are divided over the 2 ranks of each of 2 machines, which hold copies"
    assert says in copies.log
    assert says in tight.log
    assert says not in divided.log
    assert "are added up whole" in copies.log
    assert "are added up in parts" in tight.log
    # Weights and two moments once, and headers.
    assert 3 * total < copies.written < 4 * total
