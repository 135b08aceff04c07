"""Ranks with so many bytes of memory each train a model, for each line of the standard input.

A line is a ``Setup``, the answer are the exit codes of its ranks, which are forked from this
process: it has imported what they need. Each rank writes how many bytes of gradients it held at
most, rank 0 the metrics of the steps too.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers.models.qwen3.modeling_qwen3  # noqa: F401 - once for all ranks
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


@dataclass(frozen=True)
class Setup:
    """What ranks train, where they write, and how many bytes of memory each has."""

    source: str
    folder: str
    ranks: int
    memory: int
    machines: int = 1


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
        # A forward pass has no new gradients, and to look costs more than most operations.
        if torch.is_grad_enabled():
            return result
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
    """Measures while it computes gradients; what follows makes none."""

    def __init__(self, *args: Any, meter: GradientMeter, **kwargs: Any) -> None:
        self._meter = meter
        super().__init__(*args, **kwargs)

    def forward_backward(self, *args: Any, **kwargs: Any) -> Any:
        with self._meter:
            return super().forward_backward(*args, **kwargs)

    def _make_pass(self, **fields: Any) -> Pass:
        self._meter.watch(fields["scorer"].model.root)
        return super()._make_pass(**fields)


def run_rank(rank: int, port: int, setup: Setup) -> None:
    """Train as one of the ranks, and write what was found."""
    setup_logging()
    ranks, folder = setup.ranks, Path(setup.folder)
    rendezvous = Rendezvous("127.0.0.1", port, ranks, 120.0)
    group = rendezvous.join(rank, torch.device("cpu"), f"machine-{rank % setup.machines}")
    options = TrainerWorkerOptions(
        buckets=str(folder / "buckets"),
        bucket="bucket",
        base_model="tiny",
        source=setup.source,
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
    engine = MeteredEngine(options, group, logging.error, memory=setup.memory, meter=meter)
    found: dict[str, Any] = {}
    if rank == 0:
        found = train(engine)
        engine.close()
    else:
        engine.follow()
    (folder / f"rank-{rank}.json").write_text(json.dumps(found | {"peak": meter.peak}))


def fork_rank(rank: int, port: int, setup: Setup) -> int:
    """The process of a rank, which logs into the setup's folder."""
    if child := os.fork():
        return child
    code = 1
    try:
        with Path(setup.folder, "log").open("a") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        run_rank(rank, port, setup)
        code = 0
    except Exception:
        logging.exception("rank %d", rank)
    finally:
        os._exit(code)


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        setup = Setup(**json.loads(line))
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        children = [fork_rank(rank, port, setup) for rank in range(setup.ranks)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        sys.stdout.write(json.dumps(codes) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
