from __future__ import annotations

import zlib
from pathlib import Path

import pytest
import torch
from tests.pieces import RankPublisher, cut
from torch import Tensor

from hearth.errors import EngineError, RequestError
from hearth.sync import delta, manifest
from hearth.sync.chain import resolve
from hearth.sync.manifest import fingerprints
from hearth.sync.pieces import (
    combine_crc32,
    join_sums,
    name_piece,
    place_pieces,
    split_name,
    sum_pieces,
)
from hearth.sync.snapshot import Snapshot
from hearth.sync.store import FolderSnapshotStore

SHAPES = {"a.weight": (7, 3), "b": (5,), "none": (0, 4), "one": (1,)}


def make_weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(shape, generator=generator).bfloat16() for name, shape in SHAPES.items()
    }


@pytest.fixture
def store(tmp_path: Path) -> FolderSnapshotStore:
    return FolderSnapshotStore(tmp_path)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 9])
def test_a_base_and_deltas_of_ranks_are_the_weights_bit_for_bit(
    store: FolderSnapshotStore, ranks: int
) -> None:
    publisher, weights = RankPublisher(store, ranks), make_weights()
    publisher.publish("base", weights, as_delta=False)
    publisher.publish("same", weights, as_delta=True)
    weights["a.weight"][2, 1] = float("nan")
    weights["b"][4] = -0.0
    publisher.publish("one", weights, as_delta=True)
    weights["a.weight"] += 1
    publisher.publish("all", weights, as_delta=True)

    assert [store.get(name).kind for name in store.names()] == ["base", *["delta"] * 3]
    found = resolve(store, "all").tensors
    assert delta.is_same(found, weights)
    assert store.get("all").entries == fingerprints(weights)
    assert delta.list_changed(store.open("same").tensors) == set()
    assert delta.list_changed(store.open("one").tensors) == {"a.weight", "b"}


def test_ranks_write_the_entries_that_one_process_writes(
    store: FolderSnapshotStore, tmp_path: Path
) -> None:
    weights = make_weights()
    RankPublisher(store, 3).publish("pieces", weights, as_delta=False)
    store.put(Snapshot.capture("whole", "base", "m", weights))

    assert store.get("pieces").entries == store.get("whole").entries
    targets = {name: torch.empty_like(tensor) for name, tensor in weights.items()}
    store.read_into("pieces", targets)
    assert delta.is_same(targets, weights)


def test_sums_of_pieces_are_those_of_whole_leaves() -> None:
    weights = {"large": torch.arange(2**23 + 77, dtype=torch.int32)}
    assert weights["large"].nbytes > 2 * manifest.LEAF
    sums = [sum_pieces(pieces) for pieces in cut(weights, 5)]
    spans = [span for each in sums for span in each["large"]]

    joined = join_sums("int32", list(weights["large"].shape), spans)

    assert joined == fingerprints(weights)["large"]


@pytest.mark.parametrize("texts", [(b"", b"x"), (b"x", b""), (b"weights", bytes(70_001))])
def test_the_sum_of_two_texts_is_that_of_the_joined_one(texts: tuple[bytes, bytes]) -> None:
    first, second = texts
    combined = combine_crc32(zlib.crc32(first), zlib.crc32(second), len(second))
    assert combined == zlib.crc32(first + second)


def test_a_piece_that_is_damaged_or_missing_is_refused(store: FolderSnapshotStore) -> None:
    RankPublisher(store, 2).publish("base", make_weights(), as_delta=False)
    file = store.folder("base") / "weights-1.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(EngineError, match="must match its manifest"):
        store.get("base")
    file.unlink()
    with pytest.raises(EngineError, match="no file"):
        store.get("base")


@pytest.mark.parametrize(
    "names",
    [
        [],
        ["b"],
        ["a[0:2]"],
        ["a[0:2]", "a[3:4]"],
        ["a[0:3]", "a[2:4]"],
        ["a[0:5]"],
        ["a", "a[0:4]"],
    ],
)
def test_pieces_that_are_not_the_whole_are_refused(names: list[str]) -> None:
    entries = fingerprints({"a": torch.zeros(4)})
    with pytest.raises(EngineError, match="must"):
        place_pieces(entries, names)


def test_a_killed_writer_leaves_no_snapshot_and_a_name_is_taken_once(
    store: FolderSnapshotStore,
) -> None:
    with pytest.raises(KeyError), store.write("base"):
        raise KeyError
    assert store.names() == []
    RankPublisher(store, 2).publish("base", make_weights(), as_delta=False)
    with pytest.raises(RequestError, match="name must be new"), store.write("base"):
        pass


def test_names_of_pieces_are_read_back() -> None:
    assert split_name(name_piece("model.layers.0[1].w", 3, 17)) == ("model.layers.0[1].w", (3, 17))
    assert split_name("model.layers.0[1].w") == ("model.layers.0[1].w", None)
