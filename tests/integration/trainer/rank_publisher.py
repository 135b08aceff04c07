"""Two ranks publish their parts of some weights into one folder; run by ``test_rank_saves``."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Shard, distribute_tensor

from hearth.errors import HearthError, RequestError, StorageError
from hearth.sync import delta
from hearth.sync.chain import Published, resolve
from hearth.sync.direct import Sender
from hearth.sync.manifest import fingerprints
from hearth.sync.store import FolderSnapshotStore
from hearth.trainer.ranks.group import RankGroup
from hearth.trainer.ranks.publishing import PieceStore, take_pieces

STORED = {"weight": torch.bfloat16, "whole": torch.float32}


def run(rank: int, folder: Path) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
    )
    group = RankGroup(rank, 2, torch.device("cpu"), timedelta(minutes=2))
    store, published = FolderSnapshotStore(folder / "snapshots"), Published()
    weights = {"weight": torch.arange(20.0).reshape(5, 4), "whole": torch.arange(3.0)}

    def publish(identity: str, *, as_delta: bool) -> None:
        shared = {**weights, "weight": distribute_tensor(weights["weight"], group.mesh, [Shard(0)])}
        own = take_pieces(shared, STORED, group)
        assert sum(piece.numel() for piece in own.tensors.values()) == (12 + 3 if rank == 0 else 8)
        pieces = PieceStore(store, group, own.layout)
        can_follow = as_delta and published.can_follow(pieces, identity, own.tensors)
        assert group.gather(can_follow) == [as_delta] * 2
        published.publish(pieces, identity, "m", own.tensors, {}, as_delta=can_follow)

    def check(identity: str, kind: str) -> None:
        expected = {name: tensor.to(STORED[name]) for name, tensor in weights.items()}
        assert store.open(identity).kind == kind
        assert store.open(identity).entries == fingerprints(expected)
        assert delta.is_same(resolve(store, identity).tensors, expected)

    def refuse(identity: str, error: type[HearthError]) -> None:
        try:
            publish(identity, as_delta=False)
        except error:
            return
        raise AssertionError(f"{identity} must be refused")

    publish("base", as_delta=False)
    check("base", "base")
    publish("base", as_delta=False)  # the same weights again
    weights["weight"][4, 3] = -1.0  # on rank 1 only
    publish("one", as_delta=True)
    check("one", "delta")
    weights["whole"] += 1
    publish("two", as_delta=True)
    check("two", "delta")
    send_directly(group, store, weights)
    refuse("base", RequestError)
    refuse("../up", RequestError)
    fail_together(group)
    assert group.run_on_first(store.names) == ["base", "one", "two", "sent"]
    dist.destroy_process_group()


def send_directly(
    group: RankGroup, store: FolderSnapshotStore, weights: Mapping[str, Tensor]
) -> None:
    """What both ranks send arrives, and was in no file."""
    first = Sender("127.0.0.1", None, 0, 2) if group.rank == 0 else None
    port = group.run_on_first(lambda: first.port if first else 0)
    sender = first or Sender("127.0.0.1", port, group.rank, 2)
    shared = {**weights, "weight": distribute_tensor(weights["weight"], group.mesh, [Shard(0)])}
    own = take_pieces(shared, STORED, group)
    pieces = PieceStore(store, group, own.layout, sender)
    Published().publish(pieces, "sent", "m", own.tensors, {}, as_delta=False)

    def read() -> list[str]:
        expected = {name: tensor.to(STORED[name]) for name, tensor in weights.items()}
        assert delta.is_same(store.get("sent").tensors, expected)
        return [path.name for path in store.folder("sent").iterdir()]

    assert group.run_on_first(read) == ["manifest.json"]
    sender.close()


def fail_together(group: RankGroup) -> None:
    """What fails on one rank fails on all, with the same error."""

    def write() -> None:
        if group.rank == 1:
            raise StorageError("the disk must have room, got none")

    try:
        group.run_on_all(write)
    except StorageError:
        return
    raise AssertionError("a rank has not heard of the other's error")


if __name__ == "__main__":
    torch.set_num_threads(1)
    other = os.fork()
    run(int(other == 0), Path(sys.argv[1]))
    if other:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))
