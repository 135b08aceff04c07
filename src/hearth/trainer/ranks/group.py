"""Messages between the ranks of one trainer, beside their weights and gradients.

Rank 0 sends the next operation to the others, and all run it; each gets its own datums. Every
collective has a time limit, except those that wait for rank 0: for the next operation, or until it
has written a file.

Everything between ranks is JSON or tensors; nothing is pickled. The store through which they find
each other listens at the one address that they were given. It asks for no password, as torch's has
none: on several machines that address belongs to a private network (SECURITY.md).
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import orjson
import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hearth.errors import EngineError, HearthError
from hearth.models.lora import LoraOptions
from hearth.sync.direct import find_address
from hearth.wire.tinker import AdamParams, DatumColumns, DatumRecord

logger = logging.getLogger(__name__)

R = TypeVar("R")

_START = timedelta(minutes=10)
"""How long ranks may take to connect; most of it is imports."""
_FOREVER = timedelta(days=365)


@dataclass(frozen=True)
class Rendezvous:
    """Where ranks connect: rank 1 hosts torch's store, at an address that all can reach."""

    host: str
    port: int
    ranks: int
    timeout_s: float
    """How long the ranks wait for one of them in an operation."""

    def join(self, rank: int, device: torch.device, machine: str | None = None) -> RankGroup:
        """Connect to all other ranks, as rank number ``rank``.

        Ranks with the same name of their ``machine``, the host's where it is None, share one.

        Raises:
            RuntimeError: torch's, where a rank did not connect in time.
        """
        # By default gloo resolves the host name, which others may be unable to reach.
        if interface := find_interface(self.host):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        limit = timedelta(seconds=self.timeout_s)
        store = dist.TCPStore(
            self.host,
            self.port,
            self.ranks,
            is_master=rank == 1,
            timeout=max(limit, _START),
            wait_for_workers=False,
            # Torch's own listener would be at all addresses of the machine.
            master_listen_fd=self._listen() if rank == 1 else None,
        )
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=self.ranks, timeout=max(limit, _START)
        )
        return RankGroup(rank, self.ranks, device, limit, find_address(self.host), machine)

    def _listen(self) -> int:
        """The descriptor of a socket that listens at this address, and at no other."""
        family, *_, address = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address, family=family).detach()


def find_interface(host: str) -> str | None:
    """The network interface through which this machine reaches a host; None where none does."""
    try:
        own = find_address(host)
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.partition("%")[0] == own for address in addresses):
            return name
    return None


class RankGroup:
    """This process as one of the ranks; one collective at a time."""

    def __init__(
        self,
        rank: int,
        ranks: int,
        device: torch.device,
        limit: timedelta,
        address: str = "127.0.0.1",
        machine: str | None = None,
    ) -> None:
        self.address = address
        """Of this machine, where the other ranks reach it."""
        self.rank = rank
        self.ranks = ranks
        self.device = device
        self._weights_group = _make_group(timeout=limit)
        self.mesh = DeviceMesh.from_group(self._weights_group, device.type)
        self._unlimited_group = _make_group(backend="gloo", timeout=_FOREVER)
        # Separate from weights and gradients: the message of a rank that failed must not be taken
        # for its part of them.
        self._message_group = _make_group(backend="gloo", timeout=limit)
        self._machine = machine or socket.gethostname()
        self.machines_mesh = self._make_machines_mesh(limit)
        """Ranks as [machines, ranks of each]: None on one machine, or where machines have one rank
        each or not equally many."""

    def _make_machines_mesh(self, limit: timedelta) -> DeviceMesh | None:
        machines: dict[str, list[int]] = {}
        for rank, machine in enumerate(self.gather(self._machine)):
            machines.setdefault(machine, []).append(rank)
        rows = list(machines.values())
        if len(rows) == 1 or {len(row) for row in rows} != {len(rows[0])} or len(rows[0]) == 1:
            return None
        # Every rank makes all groups, in the same order, and keeps its own two.
        copies, parts = (
            [
                group
                for members in lines
                if (group := _make_group(ranks=list(members), timeout=limit)) is not None
            ]
            for lines in (zip(*rows, strict=True), rows)
        )
        return DeviceMesh.from_group(
            [*copies, *parts], self.device.type, rows, mesh_dim_names=("machines", "ranks")
        )

    def meet(self) -> None:
        """Wait until all ranks are here, as long as a start may take."""
        dist.barrier()

    def find_memory(self) -> int:
        """Bytes of memory for each rank: of its GPU, or its share of its machine's; the least."""
        if self.device.type == "cuda":
            memory = torch.cuda.get_device_properties(self.device).total_memory
        else:
            memory = psutil.virtual_memory().total
        place = f"{self._machine} {self.device}"
        return self.reduce_min(memory // self.gather(place).count(place))

    def broadcast(self, message: bytes) -> None:
        """On rank 0: send a message to the others."""
        # Others wait without a limit for the length only, which always fits a socket's buffer.
        dist.broadcast(torch.tensor([len(message)]), 0, group=self._unlimited_group)
        dist.broadcast(
            torch.frombuffer(bytearray(message), dtype=torch.uint8), 0, group=self._message_group
        )

    def receive(self) -> bytes:
        """On other ranks: wait for the next message, without a limit."""
        length = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(length, 0, group=self._unlimited_group)
        message = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(message, 0, group=self._message_group)
        return message.numpy().tobytes()

    def send(self, rank: int, message: bytes) -> None:
        """Send a message to one rank, which calls ``receive_from``."""
        dist.send(torch.tensor([len(message)]), rank, group=self._message_group)
        if message:
            dist.send(_as_tensor(message, len(message)), rank, group=self._message_group)

    def receive_from(self, rank: int) -> bytes:
        """The message that one rank sends to this one."""
        length = torch.zeros(1, dtype=torch.int64)
        dist.recv(length, rank, group=self._message_group)
        message = torch.empty(int(length), dtype=torch.uint8)
        if len(message):
            dist.recv(message, rank, group=self._message_group)
        return message.numpy().tobytes()

    def run_on_first(self, function: Callable[[], R]) -> R:
        """Call a function on rank 0 only; all ranks return its result or raise its error.

        The result is a JSON value.

        Raises:
            HearthError: rank 0's; an EngineError in place of any other error.
        """
        message = b""
        if self.rank == 0:
            try:
                message = orjson.dumps({"result": function()})
            except HearthError as error:
                message = orjson.dumps({"error": type(error).__name__, "text": str(error)})
            except Exception as error:  # the boundary: the others wait for the outcome
                logger.exception("rank 0 failed")
                text = f"rank 0 must not fail, got {type(error).__name__}: {error}"
                message = orjson.dumps({"error": EngineError.__name__, "text": text})
        # Without a limit: large models take long to write, and sidecars end if rank 0 ends.
        length = torch.tensor([len(message)])
        dist.broadcast(length, 0, group=self._unlimited_group)
        content = _as_tensor(message, int(length))
        dist.broadcast(content, 0, group=self._unlimited_group)
        outcome = orjson.loads(content.numpy().tobytes())
        if "error" in outcome:
            raise _find_error(outcome["error"])(outcome["text"])
        return cast("R", outcome["result"])

    def run_on_all(self, function: Callable[[], R]) -> list[R]:
        """Call a function on every rank; all return the results by rank, or raise the same error.

        The results are JSON values.

        Raises:
            HearthError: that of the first rank that had one.
        """
        outcome: dict[str, Any]
        try:
            outcome = {"result": function()}
        except HearthError as error:
            outcome = {"error": type(error).__name__, "text": str(error)}
        outcomes = self.gather(outcome)
        for outcome in outcomes:
            if "error" in outcome:
                raise _find_error(outcome["error"])(outcome["text"])
        return [outcome["result"] for outcome in outcomes]

    def gather(self, value: R) -> list[R]:
        """The JSON values of all ranks, by rank."""
        own = orjson.dumps(value)
        longest = self.reduce_max(len(own))
        # Blanks after a JSON value are nothing.
        everyones = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.ranks)]
        dist.all_gather(
            everyones, _as_tensor(own.ljust(longest), longest), group=self._message_group
        )
        return [orjson.loads(content.numpy().tobytes()) for content in everyones]

    def reduce_max(self, count: int) -> int:
        """The largest of the ranks' counts."""
        largest = torch.tensor([count])
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._message_group)
        return int(largest)

    def reduce_min(self, count: int) -> int:
        """The smallest of the ranks' counts."""
        return -self.reduce_max(-count)

    def reduce_sum(self, values: Tensor) -> Tensor:
        """``values`` summed over ranks, in place."""
        is_on_cpu = values.device.type == "cpu"
        dist.all_reduce(values, group=self._message_group if is_on_cpu else self._weights_group)
        return values

    def leave(self) -> None:
        """Disconnect from the other ranks."""
        if dist.is_initialized():
            dist.destroy_process_group()


def _as_tensor(message: bytes, length: int) -> Tensor:
    """A message of this rank as bytes to send, or the room for one of ``length`` bytes."""
    if not message:
        return torch.empty(length, dtype=torch.uint8)
    return torch.frombuffer(bytearray(message), dtype=torch.uint8)


def _find_error(name: str) -> type[HearthError]:
    """The class of an error that rank 0 raised, by its name."""
    classes: list[type[HearthError]] = [HearthError]
    for known in classes:
        classes += known.__subclasses__()
    return next((known for known in classes if known.__name__ == name), EngineError)


def _make_group(**options: Any) -> Any:
    """A group of ranks with connections of its own, all by default; None on ranks outside of it."""
    group = dist.new_group(**options)
    return group if isinstance(group, dist.ProcessGroup) else None


_Tagged = tuple[str, Any]
"""The kind of an argument, and its JSON."""


def encode(operation: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """A message of an operation of the engine and its arguments.

    Example: ``encode("unload", ["policy-1"], {})``

    Raises:
        TypeError: an argument has a type that no operation takes.
    """
    named = {name: _encode_value(value) for name, value in kwargs.items()}
    return orjson.dumps([operation, [_encode_value(arg) for arg in args], named])


def decode(message: bytes) -> tuple[str, list[Any], dict[str, Any]]:
    """The reverse of ``encode``."""
    operation, args, named = orjson.loads(message)
    return (
        operation,
        [_decode_value(*arg) for arg in args],
        {name: _decode_value(*value) for name, value in named.items()},
    )


def _encode_value(value: Any) -> _Tagged:
    if isinstance(value, AdamParams):
        return "adam", value.as_dict()
    if isinstance(value, LoraOptions):
        return "lora", asdict(value)
    if isinstance(value, Path):
        return "path", str(value)
    if isinstance(value, DatumColumns):
        return "columns", value.as_dict()
    if isinstance(value, Sequence) and any(isinstance(datum, DatumRecord) for datum in value):
        return "data", [datum.as_dict() for datum in value]
    return "plain", value


def _decode_value(kind: str, content: Any) -> Any:
    if kind == "adam":
        return AdamParams.model_validate(content)
    if kind == "lora":
        return LoraOptions(**content)
    if kind == "path":
        return Path(content)
    if kind == "columns":
        return DatumColumns.model_validate(content)
    if kind == "data":
        return [DatumRecord.model_validate(datum) for datum in content]
    return content
