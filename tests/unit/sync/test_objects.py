"""Snapshots in an object store, which a server of S3's interface on this machine plays."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
import torch
from tests.objects import serve_objects
from tests.pieces import RankPublisher
from torch import Tensor

from hearth.errors import ConfigError, EngineError, NotFoundError, RequestError, StorageError
from hearth.launch.base import read_objects
from hearth.objects import ObjectFolder, check_store
from hearth.sync import delta
from hearth.sync.chain import Published, resolve
from hearth.sync.manifest import fingerprints
from hearth.sync.objects import ObjectBuckets, ObjectSnapshotStore, open_buckets
from hearth.sync.store import FolderBuckets

URL = "s3://weights/runs/7"


@pytest.fixture(scope="module")
def variables() -> Iterator[dict[str, str]]:
    with serve_objects() as variables:
        yield variables


@pytest.fixture(autouse=True)
def objects(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> ObjectFolder:
    """An empty folder of a bucket."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    boto3.client("s3", region_name="us-east-1").create_bucket(Bucket="weights")
    folder = ObjectFolder(URL)
    folder.remove("")
    return folder


def make_weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {"a": torch.randn(7, 3, generator=generator), "b": torch.randn(5, generator=generator)}


def bucket(keep: int | None = None) -> ObjectSnapshotStore:
    """A bucket as another process on another machine has it."""
    return ObjectBuckets(URL, keep).bucket("trainer-1")


def publish(store: ObjectSnapshotStore, *names: str) -> dict[str, Tensor]:
    """A base and deltas on it; the last one's weights."""
    published, weights = Published(), make_weights()
    for number, name in enumerate(names):
        weights["b"][number] += 1
        published.publish(store, name, "m", weights, {"step": number}, as_delta=number > 0)
    return weights


def test_bases_and_deltas_are_read_by_another_machine_bit_for_bit() -> None:
    weights = publish(bucket(), "base", "one", "two")
    store = bucket()

    assert store.names() == ["base", "one", "two"]
    assert [store.open(name).kind for name in store.names()] == ["base", "delta", "delta"]
    assert store.open("two").entries == fingerprints(weights)
    assert delta.is_same(resolve(store, "two").tensors, weights)
    targets = {name: torch.empty_like(tensor) for name, tensor in weights.items()}
    store.read_into("base", targets)
    assert torch.equal(targets["a"], weights["a"])


def test_ranks_upload_their_pieces() -> None:
    ranks, weights = RankPublisher(bucket(), 3), make_weights()
    ranks.publish("base", weights, as_delta=False)
    weights["a"][6, 2] = 9.0
    ranks.publish("one", weights, as_delta=True)

    store = bucket()
    assert delta.is_same(resolve(store, "one").tensors, weights)
    assert sum(path.suffix == ".safetensors" for path in store.folder("one").iterdir()) == 3


def test_a_snapshot_is_there_once_its_manifest_is(objects: ObjectFolder) -> None:
    store, weights = bucket(), make_weights()
    with contextlib.suppress(KeyError), store.write("base") as place:
        store.write_file(place, "weights", weights)
        assert list(objects.list()) == ["trainer-1/base/weights.safetensors"]
        assert bucket().names() == []
        assert not bucket().has("base")
        raise KeyError
    assert objects.list() == {}


def test_what_a_killed_upload_left_is_no_snapshot_and_the_next_takes_its_name(
    objects: ObjectFolder,
) -> None:
    objects.write("trainer-1/base/weights-3.safetensors", b"half")
    assert bucket().names() == []
    with pytest.raises(NotFoundError, match="snapshot must be one of"):
        bucket().get("base")

    weights = publish(bucket(), "base")

    assert delta.is_same(bucket().get("base").tensors, weights)
    assert "trainer-1/base/weights-3.safetensors" not in objects.list()


@pytest.mark.parametrize("is_lost", [False, True])
def test_damage_is_found_where_it_is_read(objects: ObjectFolder, is_lost: bool) -> None:
    publish(bucket(), "base")
    path = "trainer-1/base/weights.safetensors"
    content = objects.read(path)
    if is_lost:
        objects.remove(path)
    else:
        objects.write(path, content[:-1] + bytes([content[-1] ^ 1]))

    with pytest.raises(EngineError, match="no file" if is_lost else "must match its manifest"):
        bucket().get("base")


def test_a_name_is_taken_once() -> None:
    publish(bucket(), "base")
    publish(bucket(), "base")  # the same weights
    with pytest.raises(RequestError, match="identity must be new"):
        Published().publish(bucket(), "base", "m", {"a": torch.zeros(2)}, {}, as_delta=False)


def test_the_newest_stay_with_what_they_build_on(objects: ObjectFolder) -> None:
    publish(bucket(), "old")
    weights = publish(bucket(keep=1), "base", "one")

    assert bucket().names() == ["base", "one"]
    assert not any("old" in path for path in objects.list())
    assert delta.is_same(resolve(bucket(), "one").tensors, weights)


def test_a_machine_keeps_what_it_read_last_and_what_that_builds_on(tmp_path: Path) -> None:
    publish(bucket(), "base", "one")
    publish(bucket(), "other")
    store = bucket()
    chain = [store.folder(name) for name in ("base", "one")]
    assert all(folder.is_dir() for folder in chain)

    last = store.folder("other")

    assert last.is_dir()
    assert not any(folder.exists() for folder in chain)


def test_a_control_plane_lists_a_bucket_as_the_store_does(objects: ObjectFolder) -> None:
    publish(bucket(), "base", "one")
    objects.write("trainer-1/draft/weights.safetensors", b"half")

    records = sorted(read_objects(objects, "trainer-1"), key=lambda record: record.number)

    assert [(record.identity, record.kind) for record in records] == [
        ("base", "base"),
        ("one", "delta"),
    ]
    assert records[0].num_bytes == sum(
        facts.num_bytes for facts in objects.list("trainer-1/base").values()
    )


def test_what_a_deployment_serves_is_read_on_another_machine() -> None:
    file = Path("/data/deployments/d-1/serving.json")
    assert ObjectBuckets(URL).read_served(file) is None
    ObjectBuckets(URL).write_served(file, b"{}")
    assert ObjectBuckets(URL).read_served(file) == b"{}"


def test_a_place_is_a_folder_or_a_url(tmp_path: Path) -> None:
    assert isinstance(open_buckets(str(tmp_path)), FolderBuckets)
    assert isinstance(open_buckets(URL), ObjectBuckets)
    for wrong in ("gs://bucket/a", "s3://", "s3:///a"):
        with pytest.raises(ConfigError, match="s3://bucket/prefix"):
            open_buckets(wrong)


@pytest.mark.parametrize(
    ("store", "placement", "message"),
    [
        ("disk", "process", r"snapshot_store must be 'folder', 'ray' or s3://"),
        (URL, "inline", "snapshot_store must be 'folder' with placement 'inline'"),
    ],
)
def test_stores_that_there_are_not_are_refused(store: str, placement: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_store(store, placement)


def test_a_bucket_that_is_not_there_is_named() -> None:
    ObjectFolder(URL).check()
    with pytest.raises(StorageError, match=r"got s3://elsewhere/a: .*AWS_ACCESS_KEY_ID"):
        ObjectFolder("s3://elsewhere/a").check()


def test_a_machine_without_credentials_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    with pytest.raises(StorageError, match="credentials: set AWS_ACCESS_KEY_ID"):
        ObjectFolder(URL).check()


def test_an_installation_without_the_extra_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['s3fs'] = None\n"
        "from hearth.objects import ObjectFolder\n"
        f"ObjectFolder({URL!r})"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], env=os.environ, capture_output=True, text=True, check=False
    )
    assert "pip install 'hearth-rl[s3]'" in ran.stderr
