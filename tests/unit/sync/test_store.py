from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hearth.errors import ConfigError, EngineError, NotFoundError, RequestError
from hearth.sync.manifest import checksum
from hearth.sync.store import FolderSnapshotStore, MemorySnapshotStore, Snapshot, SnapshotStore

TENSORS = {
    "a.weight": torch.arange(6, dtype=torch.float32).reshape(2, 3) / 7,
    "b.weight": torch.tensor([1.5, -0.0, 3e38], dtype=torch.bfloat16),
    "c": torch.tensor(7, dtype=torch.int64),
    "empty": torch.zeros(0, 4),
}


def snapshot(identity: str = "step-1-ab12") -> Snapshot:
    return Snapshot.capture(identity, "base", "tiny", TENSORS, {"step": 3})


@pytest.fixture(params=["memory", "folder"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> SnapshotStore:
    return MemorySnapshotStore() if request.param == "memory" else FolderSnapshotStore(tmp_path)


def test_a_snapshot_comes_back_with_the_same_bytes(store: SnapshotStore) -> None:
    store.put(snapshot())

    found = store.get("step-1-ab12")

    assert (found.identity, found.kind, found.base_model) == ("step-1-ab12", "base", "tiny")
    assert found.metadata == {"step": 3}
    assert {name: one.dtype for name, one in found.tensors.items()} == {
        name: one.dtype for name, one in TENSORS.items()
    }
    assert all(checksum(found.tensors[name]) == checksum(one) for name, one in TENSORS.items())


def test_a_snapshot_is_a_copy() -> None:
    live = torch.zeros(2)
    taken = Snapshot.capture("s", "base", "tiny", {"w": live})

    live.add_(1)

    assert taken.tensors["w"].tolist() == [0, 0]


def test_names_are_in_the_order_of_saving(store: SnapshotStore) -> None:
    for identity in ("c", "a", "b"):
        store.put(snapshot(identity))

    assert store.names() == ["c", "a", "b"]


def test_an_unknown_identity_lists_what_is_known(store: SnapshotStore) -> None:
    store.put(snapshot("known"))

    with pytest.raises(NotFoundError, match=r"one of \['known'\], got 'other'"):
        store.get("other")


def test_an_identity_is_taken_once(store: SnapshotStore) -> None:
    store.put(snapshot("same"))
    other = Snapshot.capture("same", "base", "tiny", {"c": torch.tensor(8)})

    with pytest.raises(RequestError, match="must be new, got 'same'"):
        store.put(other)
    assert store.get("same").tensors["c"] == 7


@pytest.mark.parametrize(
    "identity", ["", "..", "../up", "a/b", "-a", ".a", "Step", "a\n", "a" * 129, "a b", "\x00"]
)
def test_no_identity_can_leave_the_store(store: SnapshotStore, identity: str) -> None:
    with pytest.raises(RequestError, match="identity must be 1 to 128 of a-z"):
        store.put(snapshot(identity))
    if isinstance(store, FolderSnapshotStore):
        with pytest.raises(RequestError, match="identity must be"):
            store.get(identity)


def test_memory_keeps_the_newest() -> None:
    store = MemorySnapshotStore(keep=2)
    for identity in ("a", "b", "c"):
        store.put(snapshot(identity))

    assert store.names() == ["b", "c"]
    with pytest.raises(NotFoundError):
        store.get("a")


def test_memory_keeps_at_least_one() -> None:
    with pytest.raises(ConfigError, match="keep must be >= 1, got 0"):
        MemorySnapshotStore(keep=0)


def test_the_manifest_states_dtype_shape_and_checksum(tmp_path: Path) -> None:
    FolderSnapshotStore(tmp_path).put(snapshot("s"))

    manifest = json.loads((tmp_path / "s" / "manifest.json").read_text())

    entry = manifest["files"]["weights"]["b.weight"]
    assert (entry["dtype"], entry["shape"]) == ("bfloat16", [3])
    assert entry["checksum"] == checksum(TENSORS["b.weight"])
    assert manifest["kind"] == "base"


def test_a_changed_tensor_is_found_and_named(tmp_path: Path) -> None:
    store = FolderSnapshotStore(tmp_path)
    store.put(snapshot("s"))
    tensors = load_file(tmp_path / "s" / "weights.safetensors")
    tensors["a.weight"][1, 2] += 1e-6
    save_file(tensors, tmp_path / "s" / "weights.safetensors")

    with pytest.raises(EngineError, match=r"tensor 'a.weight' must match its manifest"):
        store.get("s")


def test_a_missing_tensor_is_found_and_named(tmp_path: Path) -> None:
    store = FolderSnapshotStore(tmp_path)
    store.put(snapshot("s"))
    tensors = load_file(tmp_path / "s" / "weights.safetensors")
    save_file({name: one for name, one in tensors.items() if name != "c"},
              tmp_path / "s" / "weights.safetensors")  # fmt: skip

    with pytest.raises(EngineError, match=r"\['c'\]"):
        store.get("s")


def test_a_save_that_fails_leaves_nothing(tmp_path: Path) -> None:
    store = FolderSnapshotStore(tmp_path)
    unserializable = Snapshot("s", "base", "tiny", TENSORS, {"oops": object()})

    with pytest.raises(TypeError):
        store.put(unserializable)

    assert list(tmp_path.iterdir()) == []
    assert store.names() == []


def test_an_unfinished_folder_is_no_snapshot(tmp_path: Path) -> None:
    store = FolderSnapshotStore(tmp_path)
    store.put(snapshot("done"))
    (tmp_path / ".draft-next-00").mkdir()
    (tmp_path / ".draft-next-00" / "manifest.json").write_text("{}")

    assert store.names() == ["done"]
