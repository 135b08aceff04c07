"""Snapshots through Ray's object store: the same rules as in a folder, and no trainer needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from tests.scale.cluster.clusters import Nodes
from tests.unit.inference.conftest import AppClient

from hearth.errors import EngineError, NotFoundError, RequestError, StorageError
from hearth.inference.engine.engine import EngineOptions, InferenceEngine
from hearth.inference.service import create_app
from hearth.launch.ray.cluster import connect
from hearth.launch.ray.snapshot_actor import SnapshotActor
from hearth.launch.ray.store import RayBuckets, RaySnapshotStore
from hearth.models.loading import base_tensors, load_model
from hearth.sync.chain import Published, resolve
from hearth.sync.snapshot import Snapshot


@pytest.fixture(scope="module")
def control(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the control plane's machine."""
    return tmp_path_factory.mktemp("control")


@pytest.fixture(scope="module")
def start_actor(nodes: Nodes, control: Path) -> Iterator[Callable[[], Any]]:
    patch = pytest.MonkeyPatch()
    patch.setenv("RAY_ADDRESS", nodes.address)
    assert connect("test")
    patch.undo()
    yield lambda: ray.remote(SnapshotActor).options(num_cpus=0).remote(control)
    ray.shutdown()


@pytest.fixture(scope="module")
def snapshot_actor(start_actor: Callable[[], Any]) -> Any:
    return start_actor()


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


HOT_LOAD = "/hot_load/v1/models/hot_load"


async def test_a_deployment_that_starts_on_another_machine_serves_what_it_served_or_nothing(
    start_actor, model_folder, control, tmp_path, monkeypatch
):
    engines: list[InferenceEngine] = []

    def deploy(machine: str, actor: Any) -> AppClient:
        (tmp_path / machine).mkdir()
        monkeypatch.chdir(tmp_path / machine)
        engines.append(InferenceEngine(load_model(model_folder), options=EngineOptions()))
        buckets = RayBuckets(actor, tmp_path / machine / "mirror", 2)
        state_dir = Path("deployments/d")
        return AppClient(
            create_app(engines[-1], model_name="d", snapshots=buckets, state_dir=state_dir)
        )

    actor = start_actor()
    loaded = load_model(model_folder)
    trained = {name: weight * 2 for name, weight in base_tensors(loaded.module).items()}
    trainer = RayBuckets(actor, tmp_path / "trainer", 2).bucket("default")
    trainer.put(Snapshot("v1", "base", loaded.name, trained, {}))
    before = deploy("a", actor)
    await before.call("POST", HOT_LOAD, json={"identity": "v1"})
    await before.call("GET", HOT_LOAD, params={"wait_for": "v1", "timeout_s": "20"})

    after = deploy("b", actor)
    state = after.app.state.restored.result(20)
    lost = deploy("c", start_actor())
    error = str(lost.app.state.failed.result(20))
    answers = [await each.call("GET", "/healthz") for each in (after, lost)]
    for engine in engines:
        engine.close()

    assert (state.current_identity, state.weight_version) == ("v1", 1)
    assert [answer.status_code for answer in answers] == [200, 425]
    assert "snapshot 'v1', which this deployment served before it restarted, must load" in error
    assert [path.relative_to(control) for path in control.rglob("*.json")] == [
        Path("deployments/d/serving.json")
    ]
    assert not list(tmp_path.glob("*/deployments"))


def test_a_disk_that_refuses_what_is_served_is_named(snapshot_actor, control, tmp_path):
    (control / "file").touch()

    with pytest.raises(StorageError, match=f"{control / 'file/serving.json'} must be writable"):
        RayBuckets(snapshot_actor, tmp_path, 2).write_served(Path("file/serving.json"), b"{}")
