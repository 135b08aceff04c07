"""Weights that go from a trainer's ranks to deployments without files, by ``torch.distributed``.

Each rank keeps its pieces of the newest snapshots in memory, and sends them to whoever asks. The
manifest has the address (``sender``) and the checksums of the whole tensors. Whoever reads such a
snapshot takes a ticket from torch's store there, and joins a process group with all ranks, of their
own for one transfer; all ranks send at the same time. Nothing else of the processes is involved:
ranks train meanwhile, and servers sample.

The store asks for no password, as torch's has none: on several machines its address belongs to a
private network (SECURITY.md).
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hearth.errors import EngineError, NotFoundError

logger = logging.getLogger(__name__)

KEPT = 2
"""Snapshots that a rank keeps: the served one, for servers that start, and the next."""
_LIMIT = timedelta(minutes=10)
_CONNECT_S = 10.0
_LOOK_S = 0.02
_END_S = 5.0
"""How long a running transfer may delay the end."""
_HERE, _GONE = "here", "gone"
_dist: Any = dist
"""Stores and gloo's options, of which a strict type checker knows a part, or no public name."""


class Sender:
    """Sends this rank's pieces of the newest snapshots, on a thread of its own.

    Rank 0 hosts the store at ``host``, which all can reach, and the others get its ``port``.
    """

    def __init__(self, host: str, port: int | None, rank: int, ranks: int) -> None:
        self._rank = rank
        self._ranks = ranks
        self._pieces: dict[str, Mapping[str, Tensor]] = {}
        self._is_closed = threading.Event()
        listener = None
        if port is None:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = socket.create_server((host, 0), family=family)
            port = int(listener.getsockname()[1])
        self.host, self.port = host, port
        self._store = _dist.TCPStore(
            host,
            port,
            is_master=listener is not None,
            timeout=_LIMIT,
            wait_for_workers=False,
            # Torch's own listener would be at all addresses of the machine.
            master_listen_fd=None if listener is None else listener.detach(),
        )
        self._thread = threading.Thread(target=self._run, name="hearth-sender", daemon=True)
        self._thread.start()

    def offer(self, identity: str, pieces: Mapping[str, Tensor]) -> None:
        """Send these tensors from now on, which must not change, and the oldest no more."""
        self._pieces = dict([*self._pieces.items(), (identity, pieces)][-KEPT:])

    def offered(self, identity: str) -> Mapping[str, Tensor]:
        """The tensors that are sent of a snapshot."""
        return self._pieces[identity]

    def describe(self, pieces: Sequence[Sequence[str]]) -> dict[str, Any]:
        """What a manifest says of the sender; ``pieces`` are the names of each rank's."""
        return {"host": self.host, "port": self.port, "pieces": [list(names) for names in pieces]}

    def close(self) -> None:
        """Send no more."""
        self._is_closed.set()
        self._thread.join(_END_S)
        self._pieces = {}

    def _run(self) -> None:
        ticket = 1
        while not self._is_closed.wait(_LOOK_S):
            try:
                # Not a wait with a limit, each end of which torch logs as a warning.
                if not self._store.check([f"ask/{ticket}"]):
                    continue
            except RuntimeError as error:
                logger.debug("rank 0 has ended, and rank %d sends no more: %s", self._rank, error)
                return
            try:
                self._answer(ticket)
            except RuntimeError as error:
                # Whoever asked has the error as well, or has ended.
                logger.warning("rank %d did not send all its weights: %s", self._rank, error)
            ticket += 1

    def _answer(self, ticket: int) -> None:
        pieces = self._pieces.get(self._store.get(f"ask/{ticket}").decode())
        if self._rank == 0:
            self._store.set(f"answer/{ticket}", _GONE if pieces is None else _HERE)
        if pieces is None:
            return
        group = _join(self._store, ticket, self._rank, self._ranks + 1, self.host)
        for piece in pieces.values():
            group.send([_as_bytes(piece)], self._ranks, 0).wait()


def receive(sender: Mapping[str, Any], identity: str, pieces: Mapping[str, Tensor]) -> None:
    """Fill ``pieces``, by their names, with what a manifest's sender has of a snapshot.

    Raises:
        NotFoundError: the sender has newer ones only.
        EngineError: it does not answer, or was lost.
    """
    host, port, ranks = sender["host"], sender["port"], len(sender["pieces"])
    try:
        # Torch's store would try again for minutes.
        socket.create_connection((host, port), _CONNECT_S).close()
        store = _dist.TCPStore(host, port, is_master=False, timeout=_LIMIT, wait_for_workers=False)
        ticket = store.add("tickets", 1)
        store.set(f"ask/{ticket}", identity)
        if store.get(f"answer/{ticket}") != _HERE.encode():
            raise NotFoundError(
                f"snapshot must be one of the newest {KEPT} of its trainer, got {identity!r}: it "
                "was sent without files, and is in no memory any more; sync again"
            )
        group = _join(store, ticket, ranks, ranks + 1, host)
        transfers = [
            group.recv([_as_bytes(pieces[name])], rank, 0)
            for rank, names in enumerate(sender["pieces"])
            for name in names
        ]
        for transfer in transfers:
            transfer.wait()
    except (OSError, RuntimeError) as error:
        raise EngineError(
            f"trainer at {host}:{port} must send snapshot {identity!r}, got {error}: it has ended, "
            "or cannot be reached from here; sync again"
        ) from None


def find_address(host: str) -> str:
    """The address of this machine by which others of the network of ``host`` reach it."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # a datagram socket: chooses the route, sends nothing
        return str(probe.getsockname()[0])


def _join(store: Any, ticket: int, rank: int, size: int, host: str) -> Any:
    """The process group of one transfer, which no other group of the process knows."""
    gloo = _dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=find_address(host))]
    options._timeout = _LIMIT
    return gloo(_dist.PrefixStore(f"group/{ticket}", store), rank, size, options)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
