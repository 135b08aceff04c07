"""Ranks with so many bytes of memory each train a model: MODEL FOLDER RANKS MEMORY MACHINES.

Each rank writes how many bytes of gradients it held at most, rank 0 the metrics of the steps too.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tests.scale.ranks.trainers import random_data
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from hearth.telemetry import setup_logging
from hearth.trainer.options import TrainerWorkerOptions
from hearth.trainer.passes import Pass
from hearth.trainer.ranks.engine import RankEngine
from hearth.trainer.ranks.group import Rendezvous
from hearth.wire.tinker import AdamParams

LENGTHS = ((70, 3, 41, 17, 60, 9, 33, 50, 21), (60, 62, 63, 5))
"""Two requests of a step, each of several micro-batches on every rank."""
MICRO_BATCH_TOKENS = 48
STEPS = 2
ADAM = AdamParams(learning_rate=1e-3, eps=1e-6, weight_decay=0.1, grad_clip_norm=0.01)


def train(engine: Any) -> dict[str, list[float]]:
    """Losses and gradient norms of some steps of a new policy.

    Its state is saved as "trained", loaded, and saved as "again"; its weights are "step-1".
    """
    model = engine.create_model()
    losses: list[float] = []
    norms: list[float] = []
    for step in range(STEPS):
        for request, lengths in enumerate(LENGTHS):
            data = random_data(lengths, seed=10 * step + request)
            losses.append(engine.forward_backward(model, data).metrics["loss:sum"])
        norms.append(engine.optim_step(model, ADAM, "num_loss_tokens")["grad_norm"])
        engine.save_for_sampler(model, f"step-{step}", "delta" if step else "base")
    engine.save_state(model, "trained", overwrite=True)
    engine.load_state(model, "trained", with_optimizer=True)
    engine.save_state(model, "again", overwrite=True)
    return {"losses": losses, "norms": norms}


class GradientMeter(TorchDispatchMode):
    """After every operation of torch, how many bytes of gradients this rank has in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._groups: list[Any] = []

    def watch(self, root: nn.Module) -> None:
        """Count the gradients of this model."""
        parts = [module for module in root.modules() if isinstance(module, FSDPModule)]
        states: list[Any] = [part._get_fsdp_state() for part in parts]
        self._groups = [group for state in states for group in state._fsdp_param_groups]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        storages = [gradient.untyped_storage() for gradient in self._find_gradients()]
        sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
        self.peak = max(self.peak, sum(sizes.values()))
        return result

    def _find_gradients(self) -> Iterator[Tensor]:
        """Parts, whole ones, and those that are being sent."""
        for group in self._groups:
            if group._partial_reduce_output is not None:
                yield group._partial_reduce_output
            for parameter in group.fsdp_params:
                if parameter.sharded_param.grad is not None:
                    yield parameter.sharded_param.grad._local_tensor
                whole = getattr(parameter, "_unsharded_param", None)
                if whole is not None and whole.grad is not None:
                    yield whole.grad
                if parameter.unsharded_accumulated_grad is not None:
                    yield parameter.unsharded_accumulated_grad
            for sent in group.comm_ctx.reduce_scatter_states:
                yield sent.reduce_scatter_input


class MeteredEngine(RankEngine):
    """Shows its meter which model it trains."""

    def __init__(self, *args: Any, meter: GradientMeter, **kwargs: Any) -> None:
        self._meter = meter
        super().__init__(*args, **kwargs)

    def _make_pass(self, **fields: Any) -> Pass:
        self._meter.watch(fields["scorer"].model.root)
        return super()._make_pass(**fields)


def run_rank(rank: int, port: int, source: str, folder: Path, numbers: list[int]) -> None:
    """Train as one of the ranks, and write what was found."""
    setup_logging()
    ranks, memory, machines = numbers
    rendezvous, machine = Rendezvous("127.0.0.1", port, ranks, 120.0), f"machine-{rank % machines}"
    group = rendezvous.join(rank, torch.device("cpu"), machine)
    options = TrainerWorkerOptions(
        buckets=str(folder / "buckets"),
        bucket="bucket",
        base_model="tiny",
        source=source,
        checkpoint_dir=str(folder / "checkpoints"),
        ranks=ranks,
        rank_timeout_s=120.0,
        offload_optimizer=False,
        keep_snapshots=None,
        models_dir=None,
        allow_folders=True,
        micro_batch_tokens=MICRO_BATCH_TOKENS,
    )
    meter = GradientMeter()
    engine = MeteredEngine(options, group, logging.error, memory=memory, meter=meter)
    found: dict[str, Any] = {}
    with meter:
        if rank == 0:
            found = train(engine)
            engine.close()
        else:
            engine.follow()
    (folder / f"rank-{rank}.json").write_text(json.dumps(found | {"peak": meter.peak}))


def main() -> None:
    source, folder, numbers = sys.argv[1], Path(sys.argv[2]), [*map(int, sys.argv[3:])]
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    torch.set_num_threads(1)
    children: list[int] = []
    for rank in range(1, numbers[0]):
        if (child := os.fork()) == 0:
            run_rank(rank, port, source, folder, numbers)
            os._exit(0)
        children.append(child)
    run_rank(0, port, source, folder, numbers)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert not any(codes), codes


if __name__ == "__main__":
    main()
