"""What the ranks of one trainer say to each other, beside the weights and gradients.

Rank 0 decides: it tells the others which operation comes, and they all run it. Every conversation
has a limit, except waiting for rank 0 itself: for the next operation, or until it has written.

Objects that go between ranks are pickled. They are made by our own code on our own ranks; what a
client sends crosses as JSON (``hearth.trainer.ranks.calls``).
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hearth.errors import EngineError, HearthError

logger = logging.getLogger(__name__)

R = TypeVar("R")

_START = timedelta(minutes=10)
"""How long ranks may take to find each other; importing what they need is most of it."""
_FOREVER = timedelta(days=365)


@dataclass(frozen=True)
class Rendezvous:
    """Where ranks find each other: rank 1 keeps the list, at an address that all can reach."""

    host: str
    port: int
    ranks: int
    timeout_s: float
    """How long a rank may keep the others waiting in an operation."""

    def join(self, rank: int, device: torch.device) -> RankGroup:
        """Wait for all ranks, and be one of them.

        Raises:
            RuntimeError: they did not come in time, as torch says it.
        """
        # A machine's own name, where gloo looks, need not resolve to an address that others reach.
        if interface := interface_to(self.host):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        limit = timedelta(seconds=self.timeout_s)
        store = dist.TCPStore(
            self.host,
            self.port,
            self.ranks,
            is_master=rank == 1,
            timeout=max(limit, _START),
            wait_for_workers=False,
        )
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=self.ranks, timeout=max(limit, _START)
        )
        return RankGroup(rank, self.ranks, device, limit)


def interface_to(host: str) -> str | None:
    """The network interface by which this machine reaches a host; None where there is none."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # chooses the way, sends nothing
            own = probe.getsockname()[0]
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.partition("%")[0] == own for address in addresses):
            return name
    return None


class RankGroup:
    """This process's place among the ranks; one conversation at a time."""

    def __init__(self, rank: int, ranks: int, device: torch.device, limit: timedelta) -> None:
        self.rank = rank
        self.ranks = ranks
        self.device = device
        self._working = _group(timeout=limit)
        self.mesh = DeviceMesh.from_group(self._working, device.type)
        self._waiting = _group(backend="gloo", timeout=_FOREVER)
        # Not the group of weights and gradients: a rank that failed must not be heard as one that
        # sends its part of them.
        self._talking = _group(backend="gloo", timeout=limit)

    def tell(self, message: bytes) -> None:
        """Rank 0: send the others a message."""
        # The length alone goes where nobody counts the time; it never fills a socket.
        dist.broadcast(torch.tensor([len(message)]), 0, group=self._waiting)
        dist.broadcast(
            torch.frombuffer(bytearray(message), dtype=torch.uint8), 0, group=self._talking
        )

    def listen(self) -> bytes:
        """Another rank: wait for the next message, however long that takes."""
        length = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(length, 0, group=self._waiting)
        message = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(message, 0, group=self._talking)
        return message.numpy().tobytes()

    def on_first(self, function: Callable[[], R]) -> R:
        """Call a function on rank 0 alone; what it returns or raises, all ranks do.

        Raises:
            HearthError: rank 0's, an EngineError for any other.
        """
        outcome: list[Any] = [None, None]
        if self.rank == 0:
            try:
                outcome[0] = function()
            except HearthError as error:
                outcome[1] = error
            except Exception as error:  # the boundary: the others wait for an answer
                logger.exception("rank 0 failed")
                outcome[1] = EngineError(f"rank 0 must go on, got {type(error).__name__}: {error}")
        # Writing a large model takes its time; that rank 0 lives is the others' guards' business.
        dist.broadcast_object_list(outcome, 0, group=self._waiting)
        result, failure = outcome
        if failure is not None:
            raise failure
        return cast("R", result)

    def collect(self, one: R) -> list[R]:
        """What every rank gives, by rank."""
        found: list[Any] = [None] * self.ranks
        dist.all_gather_object(found, one, group=self._talking)
        return found

    def most(self, count: int) -> int:
        """The largest of the ranks' counts."""
        found = torch.tensor([count])
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._talking)
        return int(found)

    def add(self, values: Tensor) -> Tensor:
        """``values`` summed over ranks, in place; in CPU memory with the limit of conversations."""
        is_here = values.device.type == "cpu"
        dist.all_reduce(values, group=self._talking if is_here else self._working)
        return values

    def leave(self) -> None:
        """Be no rank any more."""
        if dist.is_initialized():
            dist.destroy_process_group()


def _group(**options: Any) -> dist.ProcessGroup:
    """A group of all ranks, with connections of its own."""
    made = dist.new_group(**options)
    assert isinstance(made, dist.ProcessGroup), "every rank is in it"
    return made
