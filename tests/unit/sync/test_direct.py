from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hearth.errors import EngineError, NotFoundError
from hearth.sync import delta
from hearth.sync.chain import Published, resolve
from hearth.sync.direct import KEPT, Sender
from hearth.sync.manifest import fingerprints
from hearth.sync.store import FolderSnapshotStore
from hearth.trainer.ranks.publishing import Alone, PieceStore, take_pieces

WEIGHTS = {
    "a": torch.arange(12.0).reshape(3, 4).bfloat16(),
    "large": torch.arange(2**23 + 77, dtype=torch.int32),
    "none": torch.zeros(0, 4),
    "one": torch.tensor(3.0),
}


@pytest.fixture
def sender() -> Iterator[Sender]:
    sender = Sender("127.0.0.1", None, 0, 1)
    yield sender
    sender.close()


def publish(folder: Path, sender: Sender, identity: str) -> FolderSnapshotStore:
    """A snapshot that is sent, and the store of a reader."""
    own = take_pieces(WEIGHTS, {}, Alone())
    store = PieceStore(FolderSnapshotStore(folder), Alone(), own.layout, sender)
    Published().publish(store, identity, "m", own.tensors, {}, as_delta=False)
    return FolderSnapshotStore(folder)


def test_weights_arrive_bit_for_bit_and_no_file_has_them(tmp_path: Path, sender: Sender) -> None:
    store = publish(tmp_path, sender, "first")

    assert [path.name for path in (tmp_path / "first").iterdir()] == ["manifest.json"]
    snapshot = store.open("first")
    assert snapshot.kind == "base"
    assert snapshot.entries == fingerprints(WEIGHTS)
    assert delta.is_same(resolve(store, "first").tensors, WEIGHTS)
    targets = {name: torch.empty_like(tensor) for name, tensor in WEIGHTS.items()}
    store.read_into("first", targets)
    assert delta.is_same(targets, WEIGHTS)


def test_only_the_newest_are_sent(tmp_path: Path, sender: Sender) -> None:
    names = [f"step-{number}" for number in range(KEPT + 1)]
    for name in names:
        store = publish(tmp_path, sender, name)

    for name in names[1:]:
        assert delta.is_same(store.get(name).tensors, WEIGHTS)
    with pytest.raises(NotFoundError, match="one of the newest 2 of its trainer, got 'step-0'"):
        store.get(names[0])


def test_what_arrives_otherwise_than_it_was_sent_is_refused(tmp_path: Path, sender: Sender) -> None:
    store = publish(tmp_path, sender, "first")
    changed = {name: tensor.clone() for name, tensor in sender.offered("first").items()}
    changed["a[0:12]"][5] += 1
    sender.offer("first", changed)

    with pytest.raises(EngineError, match="tensor 'a' of 'first' must arrive as it was sent"):
        store.get("first")


def test_a_trainer_that_has_ended_is_named(tmp_path: Path) -> None:
    sender = Sender("127.0.0.1", None, 0, 1)
    store = publish(tmp_path, sender, "first")
    port = sender.port
    sender.close()
    del sender

    with pytest.raises(EngineError, match=f"trainer at 127.0.0.1:{port} must send"):
        store.get("first")
