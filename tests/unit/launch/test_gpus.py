"""Which GPUs there are, and that each process of a worker has its own while others share."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hearth.errors import ConfigError
from hearth.launch.gpus import VISIBLE_VARIABLE, GpuBoard, device_of, own_gpu, visible_gpus
from hearth.launch.spec import DeploymentSpec, TrainerSpec


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


def test_half_a_board_is_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "board").write_text('[["0", 1')
    assert GpuBoard(tmp_path / "board", ["0", "1"]).take(1) == ["0"]


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
