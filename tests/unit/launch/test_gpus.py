"""Which GPUs there are, and that each process of a worker has its own while others share."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hearth.errors import ConfigError, EngineError
from hearth.launch.gpus import (
    VISIBLE_VARIABLE,
    GpuBoard,
    WorkerGpus,
    device_of,
    own_gpu,
    visible_gpus,
)
from hearth.launch.sidecars import LocalSidecar, LocalSidecars, wait_for_end
from hearth.launch.spec import DeploymentSpec, TrainerSpec
from hearth.sidecars import Command

PATIENCE_S = 20.0
SLEEP = "import time; time.sleep(600)"


@pytest.mark.parametrize(
    ("environment", "gpus"),
    [
        ({}, ("0", "1")),
        ({VISIBLE_VARIABLE: "3, 1"}, ("3", "1")),
        ({VISIBLE_VARIABLE: "GPU-8f2a,MIG-1c"}, ("GPU-8f2a", "MIG-1c")),
        ({VISIBLE_VARIABLE: ""}, ()),
        ({VISIBLE_VARIABLE: "2,-1,0"}, ("2",)),
    ],
    ids=str,
)
def test_the_environment_says_which_gpus_there_are_or_else_the_devices(
    tmp_path: Path, environment: Mapping[str, str], gpus: tuple[str, ...]
) -> None:
    for name in ("nvidia0", "nvidia3", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert visible_gpus(environment, tmp_path) == gpus


def test_a_machine_without_gpus_has_none(tmp_path: Path) -> None:
    assert visible_gpus({}, tmp_path) == ()


@pytest.fixture
def board(tmp_path: Path) -> GpuBoard:
    return GpuBoard(tmp_path / "board", ["0", "1", "2", "3"])


def test_the_least_used_are_given_in_the_machines_order(board: GpuBoard) -> None:
    assert board.take(2) == ["0", "1"]
    assert board.take(1) == ["2"]
    assert board.take(2) == ["0", "3"]
    board.give_back(["1"])
    assert board.take(2, apart_from=["2"]) == ["1", "3"]
    assert board.take(3, apart_from=["0", "1"]) is None


def test_processes_see_each_others_and_the_dead_use_none(tmp_path: Path) -> None:
    board = GpuBoard(tmp_path / "board", ["0", "1"])
    code = (
        "import sys; from pathlib import Path; from hearth.launch.gpus import GpuBoard; "
        "print(*GpuBoard(Path(sys.argv[1]), ['0', '1']).take(1))"
    )
    assert board.take(1) == ["0"]
    other = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "board")],
        capture_output=True,
        check=True,
        timeout=60,
    )
    assert other.stdout.split() == [b"1"]
    assert board.take(1) == ["1"]


def test_half_a_board_is_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "board").write_text('[["0", 1')
    assert GpuBoard(tmp_path / "board", ["0", "1"]).take(1) == ["0"]


def python(name: str, code: str, gpus: float) -> Command:
    return Command(name=name, argv=[sys.executable, "-c", code], gpus=gpus)


def seen(sidecars: LocalSidecars, name: str, gpus: float) -> str:
    """What a sidecar says that it sees."""
    code = f"import os; print('sees', os.environ.get({VISIBLE_VARIABLE!r}))"
    started = sidecars.start(python(name, code, gpus))
    report = wait_for_end(started, PATIENCE_S)
    assert report is not None
    return report.last_lines[-1]


def running(sidecars: LocalSidecars, name: str, gpus: float) -> LocalSidecar:
    return sidecars.start(python(name, SLEEP, gpus))


def test_sidecars_see_gpus_of_their_own_until_they_end(board: GpuBoard, tmp_path: Path) -> None:
    own = own_gpu(board, "cuda", alone=False)
    ranks = LocalSidecars(tmp_path / "trainer", gpus=WorkerGpus(board, own))
    servers = LocalSidecars(tmp_path / "deployment", gpus=WorkerGpus(board))
    try:
        assert running(ranks, "rank-1", 1).gpus == ["1"]
        first = running(servers, "replica-0", 2)
        assert first.gpus == ["2", "3"]
        # Of another worker's there is none free; the first are shared.
        assert running(servers, "replica-1", 1).gpus == ["0"]
        first.stop()
        assert seen(servers, "replica-0", 2) == "sees 2,3"
        ranks.close()
        assert seen(servers, "replica-2", 3) == "sees 1,2,3"
    finally:
        ranks.close()
        servers.close()
    assert board.take(4) == ["0", "1", "2", "3"]


def test_a_worker_that_needs_more_than_the_machine_has_is_told(
    board: GpuBoard, tmp_path: Path
) -> None:
    sidecars = LocalSidecars(tmp_path / "deployment", gpus=WorkerGpus(board))
    try:
        for name in ("replica-0", "replica-1"):
            running(sidecars, name, 2)
        with pytest.raises(
            EngineError,
            match=r"replica-2 must have 2 GPUs that no other process of its worker has, got 0 left "
            r"of 4 on this machine: lower replicas, tensor_parallel_size or ranks",
        ):
            running(sidecars, "replica-2", 2)
    finally:
        sidecars.close()


def test_without_gpus_the_environment_stays_as_it_is(tmp_path: Path) -> None:
    sidecars = LocalSidecars(tmp_path / "own", gpus=WorkerGpus(GpuBoard(tmp_path / "board", [])))
    said = os.environ.get(VISIBLE_VARIABLE)
    assert seen(sidecars, "replica-0", 1) == f"sees {said}"
    sidecars.close()


def test_a_process_alone_sees_its_own_gpu_and_a_number_is_taken_at_its_word(
    board: GpuBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VISIBLE_VARIABLE, "0,1,2,3")
    assert own_gpu(board, None, alone=True) == []
    assert own_gpu(board, "cuda:2", alone=True) == ["2"]
    assert os.environ[VISIBLE_VARIABLE] == "0,1,2,3"
    assert own_gpu(board, "cuda", alone=True) == ["0"]
    assert os.environ[VISIBLE_VARIABLE] == "0"
    assert board.take(2) == ["1", "3"]
    with pytest.raises(ConfigError, match=r"'cuda:N' with N below 4, .* got 'cuda:4'"):
        own_gpu(board, "cuda:4", alone=True)


def trainer(**options: Any) -> TrainerSpec:
    return TrainerSpec(
        worker_id="t", base_model="m", source="m", bucket="b", checkpoint_dir="c", **options
    )


def deployment(**options: Any) -> DeploymentSpec:
    return DeploymentSpec(
        worker_id="d", name="d", base_model="m", source="m", bucket="b", state_dir="s", **options
    )


@pytest.mark.parametrize(
    ("spec", "device"),
    [
        (trainer(), "cuda"),
        (trainer(device="cpu"), None),
        (trainer(device="cuda:1"), "cuda:1"),
        (trainer(device="cuda:1", ranks=2), "cuda"),
        (deployment(), "cuda"),
        (deployment(engine="vllm"), None),
    ],
)
def test_a_worker_computes_on_a_gpu_unless_others_do_it_for_it(
    spec: TrainerSpec | DeploymentSpec, device: str | None
) -> None:
    assert device_of(spec) == device
