"""The worker of a deployment on vLLM, in a thread and in a process, over a scripted server."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.inference.scripted import install, python_with
from tests.integration.launch.conftest import RecordingWatcher, start_worker
from tests.unit.architectures import make_config
from tests.unit.tiny import write_qwen
from tests.waiting import wait_until

from hearth.errors import ConfigError
from hearth.inference import worker
from hearth.launch.processes import ProcessLauncher
from hearth.launch.sidecars import LocalSidecars
from hearth.launch.spec import DeploymentSpec
from hearth.local.inline import InlineLauncher
from hearth.settings import VLLM_PYTHON_VARIABLE

PATIENCE_S = 60.0


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


def pids(servers: Path) -> list[int]:
    return [int(line) for line in (servers / "pids").read_text().split()]


def wait_for_ends(servers: Path) -> None:
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids(servers)))


def test_its_servers_start_and_end_with_it(launcher, servers, spec):
    started, _ = start_worker(launcher, spec)
    assert len(pids(servers)) == 2

    started.stop()
    wait_for_ends(servers)


def test_its_end_tells_why_its_servers_could_not_go_on(launcher, servers, spec):
    _, watcher = start_worker(launcher, spec)
    (servers / "orders" / "never-start").touch()
    os.kill(pids(servers)[0], signal.SIGKILL)

    message = watcher.wait_failed(PATIENCE_S).describe()
    assert "must keep its replicas running, got replica-" in message
    assert "something else" in message
    wait_for_ends(servers)


def test_a_start_that_fails_tells_what_to_do(launcher, servers, spec):
    (servers / "orders" / "once-no-start").touch()
    watcher = RecordingWatcher()
    launcher.start(spec, watcher)

    message = watcher.wait_failed(PATIENCE_S).describe()
    assert "the model and its KV cache must fit the memory" in message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"replicas": 2}, "replicas must be 1 with engine 'embedded', got 2"),
        ({"engine_options": {"drain": "abort"}}, "engine_options must be absent with engine"),
        ({"engine": "vllm", "engine_options": {"x": 1}}, "engine_options must be among"),
        (
            {"engine": "vllm", "engine_options": {"lora_rank": 4, "train_mlp": True}},
            "lora_targets must leave out 'mlp' for a mixture of experts",
        ),
    ],
)
def test_what_an_engine_cannot_be_is_refused(tmp_path, fields, message):
    make_config("qwen3_moe").save_pretrained(tmp_path / "mixture")
    given: dict[str, Any] = {
        "buckets": str(tmp_path),
        "name": "d",
        "base_model": "tiny",
        "source": str(tmp_path / "mixture"),
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
        "max_adapters": 0,
        "trust_remote_code": False,
        "on_phase": lambda phase: None,
        "sidecars": LocalSidecars(tmp_path / "sidecars"),
        **fields,
    }
    with pytest.raises(ConfigError, match=message):
        worker.build(**given)
