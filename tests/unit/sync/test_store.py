from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.unit.tiny import checksum

from hearth.errors import ConfigError, EngineError, NotFoundError, RequestError
from hearth.sync.manifest import fingerprints, folder_names
from hearth.sync.store import (
    Buckets,
    FolderBuckets,
    FolderSnapshotStore,
    MemoryBuckets,
    MemorySnapshotStore,
    Snapshot,
    SnapshotStore,
)

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
    assert {name: tensor.dtype for name, tensor in found.tensors.items()} == {
        name: tensor.dtype for name, tensor in TENSORS.items()
    }
    assert all(
        checksum(found.tensors[name]) == checksum(tensor) for name, tensor in TENSORS.items()
    )


def test_a_snapshot_is_a_copy() -> None:
    live = torch.zeros(2)
    taken = Snapshot.capture("s", "base", "tiny", {"w": live})

    live.add_(1)

    assert taken.tensors["w"].tolist() == [0, 0]


def test_names_are_in_the_order_of_saving(store: SnapshotStore) -> None:
    for identity in ("c", "a", "b"):
        store.put(snapshot(identity))

    assert store.names() == ["c", "a", "b"]


def test_an_opened_snapshot_is_read_when_a_tensor_is_used(tmp_path: Path) -> None:
    store = FolderSnapshotStore(tmp_path)
    store.put(snapshot())
    file = tmp_path / "step-1-ab12" / "weights.safetensors"
    content = file.read_bytes()
    file.unlink()

    opened = store.open("step-1-ab12")

    assert set(opened.tensors) == set(TENSORS)
    assert opened.entries is not None
    with pytest.raises(EngineError, match="no file"):
        opened.tensors["a.weight"]
    file.write_bytes(content)
    assert torch.equal(opened.tensors["a.weight"], TENSORS["a.weight"])


def test_tensors_are_read_into_given_memory_and_checked_there(tmp_path: Path) -> None:
    store = FolderSnapshotStore(tmp_path)
    store.put(snapshot())
    targets = {name: torch.empty_like(tensor) for name, tensor in TENSORS.items()}

    store.read_into("step-1-ab12", targets)

    assert all(checksum(targets[name]) == checksum(tensor) for name, tensor in TENSORS.items())
    with pytest.raises(EngineError, match="must cover each tensor once"):
        store.read_into("step-1-ab12", {"c": targets["c"]})


def set_clock_back(root: Path) -> None:
    """Make every newer folder look older, as if the clock had been set back before each save."""
    for age, name in enumerate(folder_names(root)):
        moment = 2_000_000_000 - age * 3600
        os.utime(root / name / "manifest.json", (moment, moment))


def test_a_clock_set_back_removes_no_newer_snapshot(tmp_path: Path) -> None:
    store = FolderSnapshotStore(tmp_path, keep=2)
    for identity in ("a", "b", "c"):
        store.put(snapshot(identity))
        set_clock_back(tmp_path)

    assert store.names() == ["b", "c"]
    store.put(snapshot("d"))
    assert store.names() == ["c", "d"]


def test_folders_that_another_process_removes_meanwhile_are_no_error(tmp_path: Path) -> None:
    store = FolderSnapshotStore(tmp_path)
    store.put(snapshot("kept"))
    manifest = (tmp_path / "kept" / "manifest.json").read_bytes()
    is_over = threading.Event()

    def write_and_remove() -> None:
        while not is_over.is_set():
            folders = [tmp_path / f"a-{number}" for number in range(50)]
            for folder in folders:
                folder.mkdir()
                (folder / "manifest.json").write_bytes(manifest)
            for folder in folders:
                shutil.rmtree(folder)

    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(write_and_remove)
        try:
            seen = ["kept" in store.names() for _ in range(200)]
        finally:
            is_over.set()
        ended.result()

    assert all(seen)


def test_a_manifest_that_cannot_be_read_now_does_not_make_its_snapshot_the_oldest(
    tmp_path: Path,
) -> None:
    store = FolderSnapshotStore(tmp_path, keep=1)
    store.put(snapshot("b"))
    newest = tmp_path / "b" / "manifest.json"
    whole = newest.read_bytes()
    newest.unlink()
    newest.mkdir()  # reading it is refused, as on a disk that fails

    with pytest.raises(EngineError, match=r"b/manifest\.json must be readable"):
        store.names()
    with pytest.raises(EngineError, match=r"b/manifest\.json must be readable"):
        store.put(snapshot("c"))

    newest.rmdir()
    newest.write_bytes(whole)
    assert store.names() == ["b"]


def test_folders_from_before_there_were_numbers_come_first(tmp_path: Path) -> None:
    store = FolderSnapshotStore(tmp_path)
    for identity in ("older", "old"):
        store.put(snapshot(identity))
    for age, name in enumerate(("old", "older")):
        file = tmp_path / name / "manifest.json"
        manifest = json.loads(file.read_text())
        del manifest["number"], manifest["checksum"]
        file.write_text(json.dumps(manifest))
        os.utime(file, (4_000_000_000 - age * 60,) * 2)

    store.put(snapshot("new"))

    assert store.names() == ["older", "old", "new"]
    assert store.get("older").metadata == {"step": 3}


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


def test_the_same_weights_may_be_put_again(store: SnapshotStore) -> None:
    store.put(snapshot("same"))
    store.put(snapshot("other"))

    store.put(snapshot("same"))

    assert store.names() == ["same", "other"]


@pytest.mark.parametrize(
    "other",
    [
        Snapshot.capture("same", "base", "tiny", TENSORS | {"b.weight": TENSORS["b.weight"].abs()}),
        Snapshot.capture("same", "base", "tiny", TENSORS | {"c": torch.tensor(7.0)}),
        Snapshot.capture("same", "base", "tiny", TENSORS | {"empty": torch.zeros(4, 0)}),
        Snapshot.capture("same", "base", "huge", TENSORS),
        Snapshot.capture("same", "lora", "tiny", TENSORS),
        Snapshot.capture("same", "base", "tiny", TENSORS, {"lora": {"rank": 2}}),
    ],
    ids=["sign of zero", "dtype", "shape", "model", "kind", "adapter's options"],
)
def test_other_weights_under_the_same_identity_are_refused(
    store: SnapshotStore, other: Snapshot
) -> None:
    store.put(snapshot("same"))

    with pytest.raises(RequestError, match="must be new, got 'same': it is taken by other weights"):
        store.put(other)


def test_a_snapshot_keeps_the_time_of_its_capture(store: SnapshotStore) -> None:
    before = time.time()
    store.put(snapshot("first"))
    store.put(Snapshot.capture("second", "lora", "tiny", {"w": torch.ones(5)}))

    first, second = map(store.get, store.names())

    assert (first.kind, second.kind) == ("base", "lora")
    assert before - 1 <= first.created_s <= second.created_s <= time.time() + 1


def test_tensors_do_not_hang_on_the_file(tmp_path: Path) -> None:
    store = FolderSnapshotStore(tmp_path)
    store.put(snapshot("s"))
    found = store.get("s").tensors["a.weight"]

    path = tmp_path / "s" / "weights.safetensors"
    with path.open("r+b") as file:
        file.write(b"\xff" * path.stat().st_size)

    assert torch.equal(found, TENSORS["a.weight"])


@pytest.mark.slow
def test_a_large_tensor_is_hashed_in_pieces() -> None:
    large = torch.arange(2**24 + 7, dtype=torch.int32).view(torch.uint8)
    pieces = [large[start : start + 2**24].numpy() for start in range(0, large.numel(), 2**24)]
    hashes = b"".join(hashlib.blake2b(piece.data, digest_size=16).digest() for piece in pieces)

    found = checksum(large)

    assert len(pieces) == 5
    assert found == f"blake2b:{hashlib.blake2b(hashes, digest_size=16).hexdigest()}"
    assert checksum(TENSORS["a.weight"]) == (
        f"blake2b:{hashlib.blake2b(TENSORS['a.weight'].numpy().data, digest_size=16).hexdigest()}"
    )


def test_a_fingerprint_is_the_crc_of_the_bytes() -> None:
    large = torch.arange(2**24 + 7, dtype=torch.int32).view(torch.uint8)
    pieces = [large[start : start + 2**24].numpy() for start in range(0, large.numel(), 2**24)]
    sums = b"".join(zlib.crc32(piece.data).to_bytes(4, "big") for piece in pieces)

    found = fingerprints({"large": large, "a": TENSORS["a.weight"]})

    assert (
        found["large"]["checksum"] == f"crc32:{hashlib.blake2b(sums, digest_size=16).hexdigest()}"
    )
    assert found["a"] == {
        "dtype": "float32",
        "shape": [2, 3],
        "checksum": f"crc32:{zlib.crc32(TENSORS['a.weight'].numpy().data):08x}",
    }


@pytest.fixture(params=["memory", "folder"])
def buckets(request: pytest.FixtureRequest, tmp_path: Path) -> Buckets[SnapshotStore]:
    return MemoryBuckets(keep=2) if request.param == "memory" else FolderBuckets(tmp_path, keep=2)


def test_buckets_know_nothing_of_each_other(buckets: Buckets[SnapshotStore]) -> None:
    first, other = buckets.bucket("job-1"), buckets.bucket("job-2")
    first.put(snapshot("s"))

    assert buckets.bucket("job-1").names() == ["s"]
    assert other.names() == []
    with pytest.raises(NotFoundError):
        other.get("s")


def test_a_bucket_keeps_the_newest(buckets: Buckets[SnapshotStore]) -> None:
    store = buckets.bucket("job-1")
    for identity in ("a", "b", "c"):
        store.put(snapshot(identity))

    assert store.names() == ["b", "c"]


@pytest.mark.parametrize("bucket_id", ["", "..", "a/b", ".draft", "A"])
def test_no_bucket_can_leave_the_root(buckets: Buckets[SnapshotStore], bucket_id: str) -> None:
    with pytest.raises(RequestError, match="bucket_id must be 1 to 128 of a-z"):
        buckets.bucket(bucket_id)


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


@pytest.mark.parametrize("make", [MemorySnapshotStore, partial(FolderSnapshotStore, Path("x"))])
def test_a_store_keeps_at_least_one(make: Callable[..., SnapshotStore]) -> None:
    with pytest.raises(ConfigError, match="keep must be >= 1, got 0"):
        make(keep=0)


def test_the_manifest_states_dtype_shape_and_checksum(tmp_path: Path) -> None:
    FolderSnapshotStore(tmp_path).put(snapshot("s"))

    manifest = json.loads((tmp_path / "s" / "manifest.json").read_text())

    entry = manifest["files"]["weights"]["b.weight"]
    assert (entry["dtype"], entry["shape"]) == ("bfloat16", [3])
    assert entry["checksum"] == checksum(TENSORS["b.weight"])
    assert manifest["kind"] == "base"


def change(tensors: dict[str, torch.Tensor]) -> None:
    tensors["a.weight"][1, 2] += 1e-6


def remove(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["c"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [(change, r"tensor 'a.weight' must match its manifest"), (remove, r"\['c'\]")],
)
def test_a_damaged_tensor_is_found_and_named(
    tmp_path: Path, damage: Callable[[dict[str, torch.Tensor]], None], message: str
) -> None:
    store = FolderSnapshotStore(tmp_path)
    store.put(snapshot("s"))
    tensors = load_file(tmp_path / "s" / "weights.safetensors")
    damage(tensors)
    save_file(tensors, tmp_path / "s" / "weights.safetensors")

    with pytest.raises(EngineError, match=message):
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
