"""One rank of a trainer that notes what it holds, as JSON: what it was asked is in its arguments.

python -m tests.scale.ranks.measured_rank RANK HOST PORT ASKED
"""

from __future__ import annotations

import gc
import json
import logging
import re
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from hearth.models.lora import LoraOptions
from hearth.trainer.options import TrainerWorkerOptions
from hearth.trainer.ranks.engine import RankEngine
from hearth.trainer.ranks.group import Rendezvous
from hearth.trainer.residents import find_trainable
from hearth.wire.tensors import encode
from hearth.wire.tinker import AdamParams, DatumRecord

TIMEOUT_S = timedelta(minutes=5).total_seconds()


def read_status(name: str) -> int:
    """Bytes of a line of this process's status, such as ``VmRSS``."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    found = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


class Peak:
    """The most memory that the process has had since this object was made, over a first value."""

    def __init__(self, before: int) -> None:
        self._before = before
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")

    def read(self) -> int:
        return read_status("VmHWM") - self._before


class MeasuredEngine(RankEngine):
    """Notes the peaks of its operations, and the bytes of what it keeps."""

    notes: dict[str, int]
    before: int

    def forward_backward(self, *args: Any, **kwargs: Any) -> Any:
        peak = Peak(self.before)
        result = super().forward_backward(*args, **kwargs)
        self.notes["pass"] = peak.read()
        model = self._residents.get(args[0])
        trained = find_trainable(model.loaded).values()
        self.notes["weights"] = sum(map(local_bytes, model.loaded.module.parameters()))
        self.notes["gradients"] = sum(
            local_bytes(parameter.grad) for parameter in trained if parameter.grad is not None
        )
        return result

    def optim_step(self, *args: Any, **kwargs: Any) -> Any:
        result = super().optim_step(*args, **kwargs)
        optimizer: Any = self._residents.get(args[0]).optimizer
        state = optimizer.state_tensors()
        self.notes["moments"] = sum(
            local_bytes(tensor) for name, tensor in state.items() if "exp_avg" in name
        )
        return result

    def save_for_sampler(self, *args: Any, **kwargs: Any) -> Any:
        peak = Peak(self.before)
        result = super().save_for_sampler(*args, **kwargs)
        self.notes["sync"] = peak.read()
        return result


def local_bytes(tensor: torch.Tensor) -> int:
    """Of this rank's part."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes


def make_data(tokens: int, sequences: int, vocabulary: int) -> list[DatumRecord]:
    """Sequences of that many random tokens that share no prefix."""
    rng = np.random.default_rng(0)
    data: list[DatumRecord] = []
    for _ in range(sequences):
        ids = rng.integers(3, vocabulary, tokens + 1)
        inputs = {
            "target_tokens": encode(ids[1:], "int64"),
            "weights": encode(np.ones(tokens, dtype=np.float32), "float32"),
        }
        fields = {
            "model_input": {"chunks": [{"tokens": ids[:-1].tolist()}]},
            "loss_fn_inputs": {name: value.as_dict() for name, value in inputs.items()},
        }
        data.append(DatumRecord.model_validate(fields))
    return data


def main() -> None:
    rank, host, port, text = sys.argv[1:]
    asked = json.loads(text)
    torch.set_num_threads(1)
    rendezvous = Rendezvous(host, int(port), asked["ranks"], TIMEOUT_S)
    group = rendezvous.join(int(rank), torch.device("cpu"))
    import peft  # noqa: F401 - belongs to the libraries, whose memory is not counted
    import transformers.models.auto.modeling_auto  # noqa: F401

    before = read_status("VmRSS")
    MeasuredEngine.notes, MeasuredEngine.before = {}, before
    options = TrainerWorkerOptions(**asked["options"])
    engine = MeasuredEngine(options, group, logging.error, memory=asked["memory"])
    if int(rank) == 0:
        lora = asked["lora_rank"]
        model_id = engine.create_model(None if lora is None else LoraOptions(rank=lora))
        full, short = (
            make_data(tokens, asked["sequences"], asked["vocabulary"])
            for tokens in (asked["tokens"], asked["tokens"] // 16)
        )
        for step in range(2):
            # The second request adds to a gradient, and the second step has moments beside it:
            # there memory is fullest.
            engine.forward_backward(model_id, short)
            engine.forward_backward(model_id, full if step else short)
            engine.optim_step(model_id, AdamParams(learning_rate=asked["learning_rate"]))
            engine.save_for_sampler(model_id, f"step-{step}", "delta" if step else "base")
        engine.close()
    else:
        engine.follow()
    Path(asked["answers"], f"rank-{rank}.json").write_text(json.dumps(engine.notes))


if __name__ == "__main__":
    main()
