"""Rank 0 of a trainer: starts the other ranks, and ends with them when one of them is lost."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NoReturn

import torch

from hearth.errors import HearthError
from hearth.sidecars import Command, Sidecar, Sidecars
from hearth.trainer.options import TrainerWorkerOptions
from hearth.trainer.ranks.engine import RankEngine
from hearth.trainer.ranks.group import Rendezvous

logger = logging.getLogger(__name__)

_LOOK_S = 0.1
_CAUSE_S = 2.0
"""How long a broken conversation waits for the death that may have broken it."""
_LINES = 12
WAITED_IN_VAIN = 75
"""The exit code of a rank that gave up because of another one."""


def start_ranks(sidecars: Sidecars, options: TrainerWorkerOptions) -> RankEngine:
    """The engine of rank 0, once all other ranks have theirs.

    From then on this process ends when a rank is lost, or holds up an operation for more than
    ``rank_timeout_s``: its log says why, and the other ranks end with it.

    Raises:
        ConfigError: the model cannot be loaded or trained, or an option breaks its rule.
        EngineError: a rank cannot be started.
    """
    ranks, device, timeout_s = options.ranks, options.device, options.rank_timeout_s
    on_gpu = device.startswith("cuda")
    threads = min(torch.get_num_threads(), max(1, (os.cpu_count() or 1) // ranks))
    watch = _Watch()
    place = ("{host}", "{port}")
    for rank in range(1, ranks):
        # Rank 1 runs where it is told the address that all the others need.
        argv = [sys.executable, "-m", "hearth.trainer.ranks.main", str(rank), str(ranks), *place]
        started = sidecars.start(
            Command(
                name=f"rank-{rank}",
                argv=[*argv, device, str(timeout_s)],
                env={"OMP_NUM_THREADS": str(threads)},
                cpus=threads,
                gpus=1.0 if on_gpu else 0.0,
            )
        )
        if rank == 1:
            place = (started.host, str(started.port))
        watch.ranks[f"rank-{rank}"] = started
    watch.begin()
    host, port = place
    group = Rendezvous(host, int(port), ranks, timeout_s).join(0, rank_device(device, 0))
    # Each rank loads whole weights into the host's memory, and has its part on its device.
    options = replace(options, device="cpu")
    group.tell(options.dump())
    try:
        engine = RankEngine(options, group, watch.end)
    except HearthError:
        # The others fail alike, and are to end; what is wrong is told by whoever asked.
        watch.rest()
        raise
    engine.call_on_close(watch.rest)
    return engine


def rank_device(device: str, rank: int) -> torch.device:
    """Where a rank computes: on a machine of several GPUs each on one of its own."""
    if not device.startswith("cuda"):
        return torch.device(device)
    chosen = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(chosen)
    return chosen


@dataclass
class _Watch:
    """Looks after the other ranks."""

    ranks: dict[str, Sidecar] = field(default_factory=lambda: {})
    _resting: threading.Event = field(default_factory=threading.Event)
    _ending: threading.Lock = field(default_factory=threading.Lock)

    def begin(self) -> None:
        threading.Thread(target=self._look, name="hearth-ranks", daemon=True).start()

    def rest(self) -> None:
        """Ranks may end from now on."""
        self._resting.set()

    def end(self, reason: str) -> NoReturn:
        """Say why and what the rank at fault had to say, and end this process."""
        self._ending.acquire()  # for good: the first reason is the one
        end_s = time.monotonic() + _CAUSE_S
        while not (at_fault := self._lost()) and time.monotonic() < end_s:
            time.sleep(_LOOK_S)
        # Where nobody was lost, somebody hangs: whoever has not given up waiting.
        at_fault = at_fault or {
            name: "still runs, and does not answer"
            for name, one in self.ranks.items()
            if one.poll() is None
        }
        for name in at_fault:
            for line in self.ranks[name].last_lines()[-_LINES:]:
                logger.error("%s: %s", name, line)
        named = [f"{name} {how}" for name, how in at_fault.items()]
        logger.error(
            "the ranks of a trainer must go on together, got: %s", "; ".join([*named, reason])
        )
        logging.shutdown()
        os._exit(1)

    def _lost(self) -> Mapping[str, str]:
        """The ranks that have ended for reasons of their own, and how."""
        reports = {name: one.poll() for name, one in self.ranks.items()}
        return {
            name: replace(one, last_lines=(), peak_rss_mb=None).describe()
            for name, one in reports.items()
            if one is not None and one.code != WAITED_IN_VAIN
        }

    def _look(self) -> None:
        while not self._resting.wait(_LOOK_S):
            if any(rank.poll() is not None for rank in self.ranks.values()):
                self.end("the trainer ends")
