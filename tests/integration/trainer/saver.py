"""Saves one checkpoint over and over, until it is killed; run by ``test_killed_saves``.

Importing torch takes seconds, so the savers are forks of this process. It prints a JSON line per
round: the last step whose save returned, and what is there after the kill.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from hearth.trainer.checkpoint import CheckpointFacts, CheckpointFolder, TrainerState, read_rng

NAME = "last"


def state(step: int) -> TrainerState:
    facts = CheckpointFacts("tiny", None, step, time.time(), seq_id=step, metadata={"step": step})
    weights = {f"w{index}": torch.full((64, 64), float(step)) for index in range(4)}
    return TrainerState(facts, weights, {"step/w0": torch.tensor(float(step))}, read_rng(CPU))


def save_forever(checkpoints: CheckpointFolder, step: int, report: int) -> None:
    while True:
        step += 1
        checkpoints.write(NAME, state(step), overwrite=True)
        os.write(report, step.to_bytes(4, "little"))


def read_back(checkpoints: CheckpointFolder) -> int:
    """The checkpoint's step, after checking that all of it is of that step."""
    found = checkpoints.read(NAME, base_model="tiny", lora=None)
    step = found.facts.steps
    assert (found.facts.seq_id, found.facts.metadata) == (step, {"step": step})
    assert found.weights.keys() == {"w0", "w1", "w2", "w3"}
    assert all(bool((weight == step).all()) for weight in found.weights.values())
    assert found.optimizer["step/w0"] == step
    return step


def main(root: Path, rounds: int) -> None:
    chance = random.Random(0)
    checkpoints = CheckpointFolder(root)
    checkpoints.write(NAME, state(0), overwrite=True)
    last = 0
    for _ in range(rounds):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            save_forever(checkpoints, last, writing)
        os.close(writing)
        time.sleep(chance.uniform(0.01, 0.08))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with os.fdopen(reading, "rb") as reports:
            content = reports.read()
        returned = int.from_bytes(content[-4:], "little") if content else last
        left = sorted(path.name for path in root.iterdir() if path.name.startswith("."))
        last = read_back(CheckpointFolder(root))
        print(json.dumps({"returned": returned, "found": last, "left": left}), flush=True)  # noqa: T201
    checkpoints.write(NAME, state(last + 1), overwrite=True)


CPU = torch.device("cpu")

if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]))
