"""Workers as actors: where they are placed, how their ends are told, and who finds them again."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from tests.integration.launch.conftest import RecordingWatcher, make_trainer_spec, start_worker
from tests.scale.cluster.clusters import Nodes, actors
from tests.waiting import is_running, wait_until

from hearth.errors import ConfigError
from hearth.launch.ray.launcher import RayLauncher
from hearth.launch.spec import Endpoint, ExitReport, ExportSpec, TrainerSpec
from hearth.wire.asgi import TOKEN_HEADER

SOON_S = 30.0


@pytest.fixture
def make_launcher(cluster: Nodes, tmp_path: Path) -> Iterator[Callable[..., RayLauncher]]:
    made: list[RayLauncher] = []

    def make(**options: Any) -> RayLauncher:
        made.append(RayLauncher(tmp_path / "data", **{"die_with_parent": True} | options))
        return made[-1]

    yield make
    for launcher in made:
        launcher.close()


@pytest.fixture
def spec(model_folder: Path, tmp_path: Path) -> Callable[..., TrainerSpec]:
    return partial(
        make_trainer_spec, model_folder, tmp_path / "checkpoints", "trainer-0", bucket="bucket"
    )


def wait_for_reason(launcher: RayLauncher, spec: TrainerSpec) -> str:
    """Why a worker does not start."""
    watcher = RecordingWatcher()
    launcher.start(spec, watcher)
    reason = watcher.wait_failed(SOON_S).reason
    assert reason is not None
    return reason


def connect(endpoint: Endpoint) -> httpx.Client:
    assert endpoint.url is not None
    headers = {TOKEN_HEADER.decode(): endpoint.token or ""}
    return httpx.Client(base_url=endpoint.url, headers=headers, timeout=30)


def run(http: httpx.Client, operation: str, **body: Any) -> Any:
    """The result of a trainer's operation."""
    future = http.post(f"/api/v1/{operation}", json=body).json()
    return http.post("/api/v1/retrieve_future", json=future).json()


def publish(endpoint: Endpoint, identity: str) -> None:
    with connect(endpoint) as http:
        model = run(http, "create_model", base_model="tiny", session_id="s", model_seq_id=0)
        run(http, "save_weights_for_sampler", model_id=model["model_id"], seq_id=1, path=identity)


@pytest.mark.parametrize("snapshot_store", ["folder", "ray"])
def test_a_trainer_publishes_what_the_control_plane_lists_and_exports(
    make_launcher, spec, tmp_path, snapshot_store, model_folder
):
    launcher = make_launcher(snapshot_store=snapshot_store)
    worker, _ = start_worker(launcher, spec())

    assert httpx.get(f"{worker.endpoint.url}/api/v1/healthz").status_code == 401
    publish(worker.endpoint, "v1")
    worker.stop()

    # The trainer is gone, and what it published is not.
    assert actors().keys() <= {"snapshots"}
    assert [snapshot.identity for snapshot in launcher.snapshots("bucket")] == ["v1"]
    folder = tmp_path / "exported"
    launcher.export(
        ExportSpec(
            bucket="bucket",
            identity="v1",
            base_model="tiny",
            source=str(model_folder),
            folder=str(folder),
        )
    )
    assert (folder / "model.safetensors").exists()
    assert "worker trainer-0 closes" in launcher.log_path("trainer-0").read_text()


def test_what_was_served_from_snapshots_that_ended_with_their_platform_is_forgotten(
    make_launcher, tmp_path
):
    file = tmp_path / "data/deployments/d/serving.json"
    file.parent.mkdir(parents=True)
    file.touch()

    make_launcher(snapshot_store="folder").close()
    assert file.exists()

    make_launcher(snapshot_store="ray")
    assert not file.exists()


def test_a_worker_that_is_killed_is_reported_with_its_last_lines(make_launcher, spec):
    launcher = make_launcher()
    worker, watcher = start_worker(launcher, spec())

    os.kill(worker.pid, signal.SIGKILL)
    report = watcher.wait_failed(SOON_S)

    assert report.reason is not None
    assert report.reason.startswith("its actor died: ")
    assert report.phase == "idle"
    assert any("its share" in line or "threads" in line for line in report.last_lines)
    # What was reserved is free again.
    start_worker(launcher, spec())


def test_a_worker_that_is_stopped_is_killed_and_frees_its_place(make_launcher, spec):
    launcher = make_launcher()
    worker, watcher = start_worker(launcher, spec())

    os.kill(worker.pid, signal.SIGSTOP)
    report = watcher.wait_failed(SOON_S)

    assert report.reason is not None
    assert report.reason.startswith("hung, and was killed: it is stopped since ")
    assert report.phase == "idle"
    wait_until(lambda: not is_running(worker.pid), SOON_S)
    start_worker(launcher, spec())


def test_a_worker_that_cannot_start_says_why(make_launcher, spec, tmp_path):
    reason = wait_for_reason(make_launcher(), spec(source=str(tmp_path / "none")))

    assert reason.startswith("could not start: ")
    assert str(tmp_path / "none") in reason


@pytest.mark.parametrize(
    ("options", "resource"),
    [({"threads": 2}, "CPU"), ({"device": "cuda"}, "GPU"), ({"ranks": 3}, "CPU")],
)
def test_a_placement_that_cannot_be_met_says_which_resource_is_short(
    make_launcher, spec, options, resource
):
    reason = wait_for_reason(make_launcher(placement_timeout_s=1.0), spec(**options))

    assert f"placement must be met within 1 s, got too few {resource}s: it needs" in reason
    assert f"have {0 if resource == 'GPU' else 2}" in reason


def test_a_worker_that_waits_for_room_can_be_stopped(make_launcher, spec):
    watcher = RecordingWatcher()
    worker = make_launcher().start(spec(threads=8), watcher)
    worker.stop()
    assert not watcher.has_failed.is_set()
    assert worker.pid is None


def test_a_folder_that_nodes_do_not_share_is_refused(make_launcher, spec, tmp_path):
    launcher = make_launcher()
    # As on a node where another folder is mounted under this name.
    (tmp_path / "data" / ".shared-with-every-node").write_text("another", encoding="ascii")

    reason = wait_for_reason(launcher, spec())

    assert "data_dir must be a folder that all nodes share, got" in reason
    assert "set snapshot_store='ray'" in reason


def test_a_lost_node_is_named(cluster, make_launcher, spec):
    worker, watcher = start_worker(make_launcher(), spec())
    lost = worker.facts.node_id

    cluster.add(1)
    cluster.kill(lost)

    report = watcher.wait_failed(SOON_S)
    assert report.reason is not None
    assert f"its machine was lost: node {lost[:8]}" in report.reason


def test_workers_outlive_their_launcher_and_are_adopted(make_launcher, spec):
    first = make_launcher(die_with_parent=False)
    worker, _ = start_worker(first, spec())
    record, pid = worker.record(), worker.pid
    first.release()

    second = make_launcher(die_with_parent=False)
    watcher = RecordingWatcher()
    found = second.adopt(record, watcher)
    assert not isinstance(found, ExitReport)
    watcher.wait_ready()
    assert found.pid == pid
    with connect(found.endpoint) as http:
        assert http.get("/api/v1/healthz").status_code == 200

    found.stop()
    wait_until(lambda: worker.name not in actors())
    gone = second.adopt(record, watcher)
    assert isinstance(gone, ExitReport)
    assert gone.reason == "was gone when the control plane came back"


def test_a_worker_that_nobody_asks_ends_by_itself_and_frees_its_place(make_launcher, spec):
    first = make_launcher(die_with_parent=False, orphan_timeout_s=5.0)
    worker, _ = start_worker(first, spec())
    first.release()

    make_launcher(die_with_parent=False)
    wait_until(lambda: worker.name not in actors())
    wait_until(lambda: ray.available_resources().get("CPU") == 2)


def test_a_stray_of_an_earlier_launcher_is_ended_first(make_launcher, spec):
    first = make_launcher(die_with_parent=False)
    stray, _ = start_worker(first, spec())
    first.release()

    second = make_launcher(die_with_parent=False)
    worker, _ = start_worker(second, spec())
    assert set(actors()) == {worker.name}
    assert worker.name != stray.name


def test_an_address_where_no_cluster_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "ray://127.0.0.1:10001")
    with pytest.raises(ConfigError, match="RAY_ADDRESS must be HOST:PORT of a cluster that this"):
        RayLauncher(tmp_path)


def test_without_an_address_a_cluster_of_this_machine_runs_and_ends_with_the_launcher(
    tmp_path, monkeypatch, spec
):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    before = signal.getsignal(signal.SIGTERM)
    launcher = RayLauncher(tmp_path / "data", die_with_parent=True)
    worker, _ = start_worker(launcher, spec(threads=None))
    assert signal.getsignal(signal.SIGTERM) is before
    assert is_running(worker.pid)

    launcher.close()

    assert not ray.is_initialized()
    wait_until(lambda: not is_running(worker.pid))
