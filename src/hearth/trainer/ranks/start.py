"""Rank 0 of a trainer: starts the other ranks, and ends the trainer when a rank is lost."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import NoReturn

import orjson
import torch

from hearth.errors import HearthError
from hearth.sidecars import Command, Sidecar, Sidecars
from hearth.trainer.options import TrainerWorkerOptions
from hearth.trainer.ranks.engine import RankEngine
from hearth.trainer.ranks.group import Rendezvous

logger = logging.getLogger(__name__)

_LOOK_S = 0.1
_CAUSE_S = 2.0
"""How long rank 0 waits, after a failed collective, for the lost rank that caused it."""
_LINES = 12
EXIT_GAVE_UP = 75
"""The exit code of a rank that ended because another rank was lost or hung."""


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
        # Rank 1 gets its own address for {host} and {port}; all others get that of rank 1.
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
    watch.start()
    host, port = place
    group = Rendezvous(host, int(port), ranks, timeout_s).join(0, choose_device(device, 0))
    # Each rank reads its part of the weights into the host's memory, and moves it to its device.
    options = replace(options, device="cpu")
    group.broadcast(orjson.dumps(asdict(options)))
    try:
        engine = RankEngine(options, group, watch.fail)
    except HearthError:
        # The other ranks fail in the same way and end; the caller reports the error.
        watch.stop()
        raise
    engine.call_on_close(watch.stop)
    return engine


def choose_device(device: str, rank: int) -> torch.device:
    """The device of a rank: where a machine has several GPUs, ranks take one each."""
    if not device.startswith("cuda"):
        return torch.device(device)
    chosen = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(chosen)
    return chosen


@dataclass
class _Watch:
    """Watches the other ranks."""

    ranks: dict[str, Sidecar] = field(default_factory=lambda: {})
    _is_stopped: threading.Event = field(default_factory=threading.Event)
    _failing: threading.Lock = field(default_factory=threading.Lock)

    def start(self) -> None:
        threading.Thread(target=self._poll, name="hearth-ranks", daemon=True).start()

    def stop(self) -> None:
        """Stop watching: ranks may end from now on."""
        self._is_stopped.set()

    def fail(self, reason: str) -> NoReturn:
        """Log the reason and the last lines of the lost rank's log, and end this process."""
        self._failing.acquire()  # never released: only the first reason is logged
        end_s = time.monotonic() + _CAUSE_S
        while not (at_fault := self._find_lost()) and time.monotonic() < end_s:
            time.sleep(_LOOK_S)
        # If no rank was lost, the one that has not ended hangs.
        at_fault = at_fault or {
            name: "still runs, and does not answer"
            for name, rank in self.ranks.items()
            if rank.poll() is None
        }
        for name in at_fault:
            for line in self.ranks[name].last_lines()[-_LINES:]:
                logger.error("%s: %s", name, line)
        named = [f"{name} {how}" for name, how in at_fault.items()]
        logger.error(
            "the ranks of a trainer must all keep running, got: %s", "; ".join([*named, reason])
        )
        logging.shutdown()
        os._exit(1)

    def _find_lost(self) -> Mapping[str, str]:
        """How ranks have ended, other than because of another rank."""
        reports = {name: rank.poll() for name, rank in self.ranks.items()}
        return {
            name: replace(report, last_lines=(), peak_rss_mb=None).describe()
            for name, report in reports.items()
            if report is not None and report.code != EXIT_GAVE_UP
        }

    def _poll(self) -> None:
        while not self._is_stopped.wait(_LOOK_S):
            if any(rank.poll() is not None for rank in self.ranks.values()):
                self.fail("the trainer ends")
