"""Snapshots that ranks write together: each writes its pieces of the weights, and none has more."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hearth.models.parallel import is_first_copy
from hearth.sync.direct import Sender
from hearth.sync.manifest import TensorEntry, check_name
from hearth.sync.pieces import Span, join_sums, name_piece, sum_pieces
from hearth.sync.snapshot import Snapshot
from hearth.sync.store import FolderSnapshotStore

R = TypeVar("R")

Layout = Mapping[str, tuple[str, list[int]]]
"""The dtype and the shape of each whole tensor."""


@dataclass(frozen=True, eq=False)
class OwnPieces:
    """This rank's part of a model's tensors."""

    tensors: Mapping[str, Tensor]
    """Flat elements, by the names of ``sync.pieces``."""
    layout: Layout


def take_pieces(
    tensors: Mapping[str, Tensor], stored: Mapping[str, torch.dtype], group: Group
) -> OwnPieces:
    """What this rank publishes of tensors that ranks share; all ranks call it.

    Of a sharded tensor it has its rows in the ``stored`` dtype, unless an earlier rank has the same
    ones; of a whole one rank 0 has all.
    """
    parts: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        part = tensor.detach()
        if isinstance(part, DTensor):
            part = part.to_local() if is_first_copy(part) else part.to_local()[:0]
        elif group.rank > 0:
            part = part[:0]
        parts[name] = part.to(stored.get(name, part.dtype)).reshape(-1)
    counts = group.gather({name: part.numel() for name, part in parts.items()})
    pieces: dict[str, Tensor] = {}
    for name, part in parts.items():
        start = sum(count[name] for count in counts[: group.rank])
        if part.numel():
            pieces[name_piece(name, start, start + part.numel())] = part
    layout = {
        name: (str(parts[name].dtype).removeprefix("torch."), list(tensor.shape))
        for name, tensor in tensors.items()
    }
    return OwnPieces(pieces, layout)


class Group(Protocol):
    """What pieces need of the ranks (``ranks.group.RankGroup``)."""

    rank: int

    def run_on_first(self, function: Callable[[], R]) -> R:
        """What the function returns or raises on rank 0, on all ranks."""
        ...

    def run_on_all(self, function: Callable[[], R]) -> list[R]:
        """What the function returns on each rank, or raises on one of them, on all ranks."""
        ...

    def gather(self, value: R) -> list[R]:
        """The values of all ranks."""
        ...


class Alone:
    """One process, as a ``Group``."""

    rank = 0

    def run_on_first(self, function: Callable[[], R]) -> R:
        """What the function returns."""
        return function()

    def run_on_all(self, function: Callable[[], R]) -> list[R]:
        """What the function returns."""
        return [function()]

    def gather(self, value: R) -> list[R]:
        """The value."""
        return [value]


class PieceStore:
    """A folder of snapshots to which all ranks put their pieces, at the same time.

    It is a ``SnapshotStore``; errors are raised on all ranks. With a ``sender`` the pieces stay in
    memory, from which it sends them, and the folder gets the manifest alone.
    """

    shares_tensors = False

    def __init__(
        self, store: FolderSnapshotStore, group: Group, layout: Layout, sender: Sender | None = None
    ) -> None:
        self._store = store
        self._group = group
        self._layout = layout
        self._sender = sender

    def put(self, snapshot: Snapshot) -> None:
        """Store a snapshot, of which each rank has its pieces."""
        group = self._group
        with contextlib.ExitStack() as stack:
            place = group.run_on_first(lambda: self._begin(snapshot.identity, stack))
            written = group.run_on_all(lambda: self._write_own(place, snapshot))
            group.run_on_first(lambda: self._finish(place, snapshot, written, stack))

    def get(self, identity: str) -> Snapshot:
        """As the folder's; the tensors are whole."""
        return self._store.get(identity)

    def names(self) -> list[str]:
        """Identities, oldest first, as rank 0 has them."""
        return self._group.run_on_first(self._store.names)

    def _begin(self, identity: str, stack: contextlib.ExitStack) -> str | None:
        """A draft for the snapshot; None if there is one of that name."""
        if self._store.has(check_name(identity, "identity")):
            return None
        return stack.enter_context(self._store.write(identity))

    def _write_own(self, place: str | None, snapshot: Snapshot) -> dict[str, Any]:
        entries: Mapping[str, TensorEntry] = {}
        if self._sender is not None:
            self._sender.offer(snapshot.identity, snapshot.tensors)
        elif place is not None:
            name = f"weights-{self._group.rank}"
            entries = self._store.write_file(place, name, snapshot.tensors)
        return {
            "entries": entries,
            "names": list(snapshot.tensors),
            "sums": sum_pieces(snapshot.weights or {}),
        }

    def _finish(
        self,
        place: str | None,
        snapshot: Snapshot,
        written: list[dict[str, Any]],
        stack: contextlib.ExitStack,
    ) -> None:
        sums: list[dict[str, list[Span]]] = [own["sums"] for own in written]
        entries = {
            name: join_sums(dtype, shape, [span for own in sums for span in own.get(name, ())])
            for name, (dtype, shape) in self._layout.items()
        }
        whole = replace(snapshot, tensors={}, whole=None, entries=entries)
        if place is None:
            self._store.require_same(whole)
            return
        if self._sender is not None:
            sender = self._sender.describe([own["names"] for own in written])
            self._store.finish(place, whole, {}, sender)
        else:
            files = {f"weights-{rank}": own["entries"] for rank, own in enumerate(written)}
            self._store.finish(place, whole, files)
        stack.close()
