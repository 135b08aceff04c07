"""The benchmark of one device runs on any: here with a tiny model on the CPU."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import orjson
import pytest
import torch
from tests.modules import load_module

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
PARTS = [
    "rollouts 4",
    "rollouts 8",
    "training 32",
    "training 64",
    "weight sync",
    "decode 4",
    "decode 8",
    "generate 4",
    "generate 8",
    "step",
]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return load_module(SCRIPT, "gpu_benchmark")


def run(*options: str) -> dict[str, Any]:
    quiet = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--model", "tiny", "--device", "cpu", "--json", *options],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | quiet,
    )
    assert done.returncode == 0, done.stderr
    return orjson.loads(done.stdout)


def test_every_part_runs_on_a_cpu() -> None:
    report = run()

    assert list(report["parts"]) == PARTS
    for name, figures in report["parts"].items():
        assert "failed" not in figures, (name, figures)
        assert all(value > 0 for value in figures.values() if isinstance(value, float)), name
    assert report["parts"]["step"]["step_s"] == pytest.approx(
        sum(
            report["parts"]["step"][f"{phase}_s"]
            for phase in ("rollout", "forward_backward", "optim", "sync")
        )
    )
    assert set(report["against_generate"]) == {"4", "8"}


def test_a_part_that_finds_no_memory_says_so_and_the_others_go_on(gpu: ModuleType) -> None:
    def fails() -> dict[str, Any]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nmore")

    device = torch.device("cpu")
    failed = gpu.measured(fails, device)
    fine = gpu.measured(lambda: {"tokens_per_s": 7.0}, device)

    assert failed["failed"] == (
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB."
    )
    assert fine["tokens_per_s"] == 7.0
    setting = gpu.SETTINGS["tiny"]
    parts = {f"{part} {rows}": fine for part in ("rollouts", "generate") for rows in setting.rows}
    assert gpu.against_generate(parts | {"generate 8": failed}, setting) == {"4": 1.0}


def test_parts_that_find_no_time_are_said(gpu: ModuleType) -> None:
    report = run("--budget-s", "0")

    assert {part["failed"] for part in report["parts"].values()} == {"not begun within 0 s"}


def test_sizes_are_those_of_the_published_models(gpu: ModuleType) -> None:
    small, large = gpu.SETTINGS["0.6b"], gpu.SETTINGS["8b"]

    # 0.44 billion without its embedding and 0.596 with; 6.95 and 8.19.
    assert small.layer_parameters == pytest.approx(0.4404e9, rel=1e-3)
    assert small.num_bytes == pytest.approx(2 * 0.596e9, rel=1e-3)
    assert large.layer_parameters == pytest.approx(6.946e9, rel=1e-3)
    assert large.num_bytes == pytest.approx(2 * 8.19e9, rel=1e-3)


def test_operations_and_bytes_are_counted_by_hand(gpu: ModuleType) -> None:
    tiny = gpu.SETTINGS["tiny"]

    layer = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 128
    assert tiny.layer_parameters == 2 * layer
    assert tiny.operations_per_token(32) == 6 * (2 * layer + 512 * 64) + 6 * 2 * 4 * 16 * 32
    # Two layers of two key heads of 16, keys and values, at 16 + 4 tokens of 4 rows.
    cached = 2 * 2 * 16 * 2 * 4 * 20
    assert tiny.bytes_of_a_step(4) == 2 * (2 * layer + 512 * 64 + cached)
