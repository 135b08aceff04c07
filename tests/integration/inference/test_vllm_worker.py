"""The worker of a deployment on vLLM, in a thread and in a process, over a scripted server."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.inference.scripted import install, python_with
from tests.unit.tiny import write_qwen

from hearth.errors import ConfigError
from hearth.inference import worker
from hearth.launch.processes import ProcessLauncher
from hearth.launch.sidecars import LocalSidecars
from hearth.launch.spec import DeploymentSpec, ExitReport
from hearth.local.inline import InlineLauncher
from hearth.settings import VLLM_PYTHON_VARIABLE

PATIENCE_S = 60.0


class Heard:
    def __init__(self) -> None:
        self.is_ready = threading.Event()
        self.has_failed = threading.Event()
        self.report = ExitReport()

    def ready(self, worker: Any) -> None:
        self.is_ready.set()

    def failed(self, worker: Any, report: ExitReport) -> None:
        self.report = report
        self.has_failed.set()


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = install(tmp_path / "servers")
    monkeypatch.setenv(VLLM_PYTHON_VARIABLE, str(python_with(folder)))
    return folder


@pytest.fixture(params=[InlineLauncher, ProcessLauncher])
def launcher(request: pytest.FixtureRequest, servers: Path, tmp_path: Path) -> Iterator[Any]:
    made = request.param(tmp_path / "data")
    yield made
    made.close()


@pytest.fixture
def spec(tmp_path: Path) -> DeploymentSpec:
    return DeploymentSpec(
        worker_id="deployment-d",
        name="d",
        base_model="tiny",
        source=str(write_qwen(tmp_path / "model")),
        bucket="b",
        state_dir=str(tmp_path / "state"),
        engine="vllm",
        replicas=2,
        engine_options={"start_timeout_s": 30.0},
        device="cpu",
    )


def until(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < end_s, "it never came to that"
        time.sleep(0.01)


def pids(servers: Path) -> list[int]:
    return [int(line) for line in (servers / "pids").read_text().split()]


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_its_servers_start_and_end_with_it(launcher: Any, servers: Path, spec: Any) -> None:
    heard = Heard()
    started = launcher.start(spec, heard)
    until(lambda: heard.is_ready.is_set() or heard.has_failed.is_set())
    assert not heard.has_failed.is_set(), heard.report
    assert len(pids(servers)) == 2

    started.stop()
    until(lambda: all(map(is_gone, pids(servers))))


def test_its_end_tells_why_its_servers_could_not_go_on(
    launcher: Any, servers: Path, spec: Any
) -> None:
    heard = Heard()
    launcher.start(spec, heard)
    until(lambda: heard.is_ready.is_set() or heard.has_failed.is_set())
    (servers / "orders" / "never-start").touch()
    os.kill(pids(servers)[0], signal.SIGKILL)
    until(heard.has_failed.is_set)

    assert "must keep its replicas running, got replica-" in heard.report.describe()
    assert "something else" in heard.report.describe()
    until(lambda: all(map(is_gone, pids(servers))))


def test_a_start_that_fails_tells_what_to_do(launcher: Any, servers: Path, spec: Any) -> None:
    (servers / "orders" / "once-no-start").touch()
    heard = Heard()
    launcher.start(spec, heard)
    until(heard.has_failed.is_set)

    assert "the model and its KV cache must fit the memory" in heard.report.describe()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"replicas": 2}, "replicas must be 1 with engine 'embedded', got 2"),
        ({"engine_options": {"drain": "abort"}}, "engine_options must be absent with engine"),
        ({"engine": "vllm", "engine_options": {"x": 1}}, "engine_options must be among"),
    ],
)
def test_what_an_engine_cannot_be_is_refused(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    given: dict[str, Any] = {
        "buckets": str(tmp_path),
        "name": "d",
        "base_model": "tiny",
        "source": "/nowhere",
        "bucket": "b",
        "state_dir": None,
        "tokenizer": None,
        "engine": "embedded",
        "replicas": 1,
        "engine_options": {},
        "dtype": "float32",
        "device": "cpu",
        "max_seq_len": None,
        "max_batch_size": 4,
        "trust_remote_code": False,
        "on_phase": lambda phase: None,
        "sidecars": LocalSidecars(tmp_path / "sidecars"),
        **fields,
    }
    with pytest.raises(ConfigError, match=message):
        worker.build(**given)
