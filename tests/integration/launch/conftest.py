"""A tiny model on disk, launchers that leave nothing behind, and a watcher to wait on."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.tiny import write_qwen
from tests.waiting import wait_until

from hearth.launch.processes import ProcessLauncher
from hearth.launch.records import read_json
from hearth.launch.spec import DeploymentSpec, ExitReport, Launcher, TrainerSpec, Worker, WorkerSpec

CLIENT_KEY = "a-clients-key"
"""What the environment of the launcher of many tests has."""


class RecordingWatcher:
    """A watcher that keeps what it is told."""

    def __init__(self) -> None:
        self.is_ready = threading.Event()
        self.has_failed = threading.Event()
        self.report: ExitReport | None = None
        self.news: list[tuple[Worker, str]] = []

    def ready(self, worker: Worker) -> None:
        self.news.append((worker, "ready"))
        self.is_ready.set()

    def failed(self, worker: Worker, report: ExitReport) -> None:
        self.news.append((worker, report.describe()))
        self.report = report
        self.has_failed.set()

    def wait_ready(self, timeout_s: float = 240.0) -> None:
        wait_until(lambda: self.is_ready.is_set() or self.has_failed.is_set(), timeout_s, "a start")
        assert not self.has_failed.is_set(), str(self.report)

    def wait_failed(self, timeout_s: float) -> ExitReport:
        assert self.has_failed.wait(timeout_s), f"no news of an end after {timeout_s} s"
        assert self.report is not None
        return self.report


def start_worker(launcher: Launcher, spec: WorkerSpec) -> tuple[Any, RecordingWatcher]:
    """A worker that answers, and its watcher."""
    watcher = RecordingWatcher()
    worker = launcher.start(spec, watcher)
    watcher.wait_ready()
    return worker, watcher


def make_deployment_spec(model_folder: Path, state_dir: Path, **options: Any) -> DeploymentSpec:
    """The deployment ``d`` of a model; ``options`` are fields of its spec."""
    return DeploymentSpec(
        worker_id="deployment-d",
        name="accounts/me/deployments/d",
        base_model="tiny",
        source=str(model_folder),
        state_dir=str(state_dir),
        device="cpu",
        **options,
    )


def make_trainer_spec(
    model_folder: Path, checkpoints: Path, worker_id: str, **options: Any
) -> TrainerSpec:
    """The spec of a trainer of the tiny model on the CPU."""
    values: dict[str, Any] = {
        "worker_id": worker_id,
        "base_model": "tiny",
        "source": str(model_folder),
        "device": "cpu",
        "checkpoint_dir": str(checkpoints),
        "threads": 1,
    }
    return TrainerSpec(**values | options)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One data folder for a module's tests."""
    return tmp_path_factory.mktemp("data")


def end_workers(data_dir: Path) -> None:
    """SIGKILL to all workers of a folder."""
    for path in (data_dir / "workers").glob("*/process.json"):
        content = read_json(path)
        assert content is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(content["pid"], signal.SIGKILL)
        path.unlink()


@pytest.fixture
def make_launcher(data_dir: Path) -> Iterator[Callable[..., ProcessLauncher]]:
    """Launchers on the module's folder; their workers end with the test, their forkservers too."""
    launchers: list[ProcessLauncher] = []

    def make(**options: Any) -> ProcessLauncher:
        launchers.append(ProcessLauncher(data_dir, **options))
        return launchers[-1]

    yield make
    for launcher in launchers:
        launcher.release()
    end_workers(data_dir)


@pytest.fixture(scope="module")
def shared_launcher(data_dir: Path) -> Iterator[ProcessLauncher]:
    launcher = ProcessLauncher(data_dir)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEARTH_API_KEYS", CLIENT_KEY)
        yield launcher
        launcher.close()


@pytest.fixture
def launcher(shared_launcher: ProcessLauncher, data_dir: Path) -> Iterator[ProcessLauncher]:
    """A module's launcher, so that one forkserver serves many tests; workers end with the test."""
    yield shared_launcher
    end_workers(data_dir)


@pytest.fixture
def trainer_spec(
    model_folder: Path, data_dir: Path, request: pytest.FixtureRequest
) -> Callable[..., TrainerSpec]:
    """A trainer's spec; its id names the test."""
    test = request.node.name[:80].replace("[", "-").replace("]", "")

    def make(number: int = 0, **options: Any) -> TrainerSpec:
        values = {"worker_id": f"trainer-{test}-{number}", "bucket": f"bucket-{number}"} | options
        return make_trainer_spec(model_folder, data_dir / "checkpoints", **values)

    return make


@pytest.fixture
def deployment_spec(model_folder: Path, data_dir: Path) -> DeploymentSpec:
    return make_deployment_spec(model_folder, data_dir / "state", bucket="bucket-0", threads=1)
