"""Snapshots through Ray's object store: the same rules as in a folder, and no trainer needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from tests.scale.cluster.clusters import Nodes

from hearth.errors import EngineError, NotFoundError, RequestError
from hearth.launch.ray.cluster import connect
from hearth.launch.ray.snapshot_actor import SnapshotActor
from hearth.launch.ray.store import RayBuckets, RaySnapshotStore
from hearth.sync.chain import Published, resolve
from hearth.sync.snapshot import Snapshot


@pytest.fixture(scope="module")
def snapshot_actor(nodes: Nodes) -> Iterator[Any]:
    patch = pytest.MonkeyPatch()
    patch.setenv("RAY_ADDRESS", nodes.address)
    assert connect("test")
    patch.undo()
    yield ray.remote(SnapshotActor).options(num_cpus=0).remote()
    ray.shutdown()


@pytest.fixture
def store(snapshot_actor: Any, tmp_path: Path, request: Any) -> Callable[[str], RaySnapshotStore]:
    """A process's store of the test's own bucket, by the process's name; keeps two snapshots."""
    bucket = request.node.name.replace("_", "-")

    def make(process: str) -> RaySnapshotStore:
        return RayBuckets(snapshot_actor, tmp_path / process, 2).bucket(bucket)

    return make


def weights(value: float) -> dict[str, torch.Tensor]:
    head = torch.arange(24, dtype=torch.bfloat16).reshape(4, 6)
    return {"head": head, "body": torch.full((300,), value)}


def test_what_one_process_puts_another_gets_bit_for_bit(store):
    put = Snapshot("v1", "base", "m", weights(1.5), {"lora": None})
    store("trainer").put(put)

    got = store("deployment").get("v1")

    assert (got.identity, got.kind, got.base_model) == ("v1", "base", "m")
    assert all(torch.equal(got.tensors[name], tensor) for name, tensor in put.tensors.items())
    assert store("any").names() == ["v1"]


def test_a_chain_of_deltas_is_made_whole_elsewhere_and_old_snapshots_go(store):
    trainer, published = store("trainer"), Published()
    for number in range(4):
        changed = weights(float(number))
        published.publish(trainer, f"v{number}", "m", changed, {}, as_delta=number > 0)

    # Two are kept, and what they are made on.
    assert store("any").names() == ["v0", "v1", "v2", "v3"]
    published.publish(trainer, "v4", "m", weights(4.0), {}, as_delta=False)
    published.publish(trainer, "v5", "m", weights(5.0), {}, as_delta=True)
    assert store("any").names() == ["v4", "v5"]

    whole = resolve(store("deployment"), "v5")
    assert all(torch.equal(whole.tensors[name], weight) for name, weight in weights(5.0).items())
    with pytest.raises(NotFoundError, match=r"must be one of \['v4', 'v5'\], got 'v1'"):
        store("deployment").get("v1")


def test_a_name_is_of_one_snapshot(store):
    store("trainer").put(Snapshot("v1", "base", "m", weights(1.0)))
    store("same again").put(Snapshot("v1", "base", "m", weights(1.0)))
    with pytest.raises(RequestError, match="identity must be new, got 'v1'"):
        store("another").put(Snapshot("v1", "base", "m", weights(2.0)))


def test_a_delta_on_nothing_is_refused(store):
    trainer, published = store("trainer"), Published()
    published.publish(trainer, "v0", "m", weights(0.0), {}, as_delta=False)
    lost = Snapshot("v2", "delta", "m", weights(1.0), parent="v1", whole=weights(1.0))
    with pytest.raises(EngineError, match=r"expected 'v1', found \['v0'\]"):
        trainer.put(lost)
