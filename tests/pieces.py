"""Snapshots in pieces, as several ranks write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from hearth.sync.chain import Published
from hearth.sync.pieces import join_sums, name_piece, sum_pieces
from hearth.sync.snapshot import Snapshot
from hearth.sync.store import FolderSnapshotStore


def cut(weights: Mapping[str, Tensor], ranks: int) -> list[dict[str, Tensor]]:
    """The flat elements of each rank's rows, as FSDP cuts them: the last ranks may have none."""
    pieces: list[dict[str, Tensor]] = [{} for _ in range(ranks)]
    for name, tensor in weights.items():
        start = 0
        for rank, rows in enumerate(tensor.chunk(ranks) if tensor.numel() else ()):
            pieces[rank][name_piece(name, start, start + rows.numel())] = rows.reshape(-1)
            start += rows.numel()
    return pieces


class RankPublisher:
    """Ranks that publish their pieces, one after the other in this process."""

    def __init__(self, store: FolderSnapshotStore, ranks: int, base_model: str = "m") -> None:
        self.store = store
        self.base_model = base_model
        self.ranks = ranks
        self._published = [Published() for _ in range(ranks)]

    def publish(self, identity: str, weights: Mapping[str, Tensor], *, as_delta: bool) -> None:
        collectors: list[_Collector] = []
        for published, pieces in zip(self._published, cut(weights, self.ranks), strict=True):
            collectors.append(_Collector(self.store))
            published.publish(
                collectors[-1], identity, self.base_model, pieces, {}, as_delta=as_delta
            )
        self.write([collector.given for collector in collectors], weights)

    def write(self, snapshots: Sequence[Snapshot], weights: Mapping[str, Tensor]) -> None:
        sums = [sum_pieces(snapshot.weights or {}) for snapshot in snapshots]
        entries = {
            name: join_sums(
                str(tensor.dtype).removeprefix("torch."),
                list(tensor.shape),
                [span for own in sums for span in own.get(name, ())],
            )
            for name, tensor in weights.items()
        }
        with self.store.write(snapshots[0].identity) as place:
            files = {
                f"weights-{rank}": self.store.write_file(place, f"weights-{rank}", snapshot.tensors)
                for rank, snapshot in enumerate(snapshots)
            }
            whole = replace(snapshots[0], tensors={}, whole=None, entries=entries)
            self.store.finish(place, whole, files)


class _Collector:
    """A rank's view of the store: what it puts is written once all ranks have put theirs."""

    shares_tensors = False

    def __init__(self, store: FolderSnapshotStore) -> None:
        self.names = store.names
        self.get = store.get
        self.given: Snapshot

    def put(self, snapshot: Snapshot) -> None:
        self.given = snapshot
