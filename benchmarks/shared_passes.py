"""What runs on one base would gain by sharing a pass: CPU seconds of sixteen passes, and of one.

    OMP_NUM_THREADS=1 python benchmarks/shared_passes.py

Sixteen policies of rank 8 have eight datums each; the one pass has all 128, for one of the
policies. A pass that really served several would have to add an adapter's update row by row, so
this is the most that there is to gain. CPU seconds, since others may work on the machine.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from hearth.models.lora import LoraOptions
from hearth.sync.store import MemorySnapshotStore
from hearth.trainer.engine import TrainerEngine
from hearth.trainer.options import TrainerOptions
from hearth.wire.tinker import DatumRecord
from training.quickstart import MODEL

_RUNS, _EACH, _ROUNDS = 16, 8, 3


def _make_datum(generator: np.random.Generator, length: int) -> DatumRecord:
    tokens = generator.integers(5, 300, length + 1).tolist()
    inputs = {
        "target_tokens": {"data": tokens[1:], "dtype": "int64"},
        "weights": {"data": [1.0] * length, "dtype": "float32"},
    }
    given = {"model_input": {"chunks": [{"tokens": tokens[:-1]}]}, "loss_fn_inputs": inputs}
    return DatumRecord.model_validate(given)


def _measure(*works: Callable[[], object]) -> list[float]:
    """The median CPU seconds of each, in turn; the first round warms up."""
    found: list[list[float]] = [[] for _ in works]
    for _ in range(_ROUNDS + 1):
        for seconds, work in zip(found, works, strict=True):
            begin_s = time.process_time()
            work()
            seconds.append(time.process_time() - begin_s)
    return [statistics.median(seconds[1:]) for seconds in found]


def main() -> None:
    """Measure, and print a table."""
    torch.set_num_threads(1)
    generator = np.random.default_rng(0)
    sys.stdout.write(
        "| tokens of a datum | sixteen passes, CPU s | one pass, CPU s |\n|---|---:|---:|\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        options = TrainerOptions(max_policies=_RUNS)
        engine = TrainerEngine(
            MODEL, snapshots=MemorySnapshotStore(), checkpoint_dir=Path(folder), options=options
        )
        models = [
            engine.create_model(LoraOptions(rank=8), owner=str(place)) for place in range(_RUNS)
        ]
        for length in (16, 64, 256):
            data = [_make_datum(generator, length) for _ in range(_RUNS * _EACH)]

            def pass_each(data: list[DatumRecord] = data) -> None:
                for place, model in enumerate(models):
                    part = data[place * _EACH : (place + 1) * _EACH]
                    engine.forward_backward(model, part, "cross_entropy")

            def pass_once(data: list[DatumRecord] = data) -> None:
                engine.forward_backward(models[0], data, "cross_entropy")

            each, once = _measure(pass_each, pass_once)
            sys.stdout.write(f"| {length} | {each:.2f} | {once:.2f} |\n")
            sys.stdout.flush()
        engine.close()


if __name__ == "__main__":
    main()
