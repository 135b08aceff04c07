"""``hearth doctor``: each line says how it is and what to do, and the exit code whether it goes."""

import fcntl
import json
import socket
import sys

import pytest

from hearth.cli.doctor import doctor
from hearth.cli.doctor_checks import (
    CHECKS,
    Place,
    check_database,
    check_disk,
    check_gpu,
    check_kernels,
    check_locks,
    check_port,
    check_ray,
    check_training,
    check_vllm,
)

LEVELS = {"ok", "warning", "error"}


@pytest.fixture
def place(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return Place(tmp_path / "data", port, "")


def test_every_check_is_one_line_of_80_columns_and_an_error_fails_it(
    place, capsys, monkeypatch, tmp_path
):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("HEARTH_VLLM_PYTHON", raising=False)
    monkeypatch.chdir(tmp_path)
    flags = ["--data-dir", str(place.data_dir), "--port", str(place.port), "--no-self-test"]

    assert doctor(flags) == 0
    *lines, _, counts = capsys.readouterr().out.splitlines()
    assert doctor([*flags, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    monkeypatch.setenv("HEARTH_VLLM_PYTHON", str(tmp_path / "none"))
    assert doctor(flags) == 1
    assert "errors: 1" in capsys.readouterr().out

    assert counts.startswith("errors: 0")
    assert len([line for line in lines if line.split(" ")[0] in LEVELS]) == len(CHECKS)
    paths = (str(tmp_path), sys.prefix)
    assert all(len(line) <= 80 for line in lines if not any(path in line for path in paths))
    assert [finding["level"] in LEVELS for finding in told["findings"]] == [True] * len(CHECKS)
    assert told["level"] in ("ok", "warning")


def test_a_port_that_another_program_has_is_a_warning(place):
    assert check_port(place).text == f"{place.port} is free"
    with socket.socket() as other:
        other.bind(("127.0.0.1", place.port))
        found = check_port(place)

    assert found.level == "warning"
    assert "hearth serve --port 0" in found.advice


def test_folders_that_are_in_use_are_named(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "first"
    run.mkdir(parents=True)
    with (run / ".lock").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert check_locks(place).text == "in use: runs/first"

    assert check_locks(place).text == "no folder is in use"


def test_a_database_that_does_not_answer_is_an_error(place, tmp_path):
    assert check_database(place).level == "ok"
    nowhere = Place(place.data_dir, place.port, f"sqlite:///{tmp_path}/none/control.db")
    assert check_database(nowhere).level == "error"
    (tmp_path / "db").touch()
    there = check_database(Place(place.data_dir, place.port, f"sqlite:///{tmp_path}/db"))
    assert there.level == "ok"
    assert there.text.endswith("answers, 0 tables")


def test_what_is_missing_says_how_to_get_it(place, monkeypatch, tmp_path):
    monkeypatch.setenv("HEARTH_KERNELS", "0")
    assert check_kernels(place).advice == "unset HEARTH_KERNELS"
    monkeypatch.delenv("HEARTH_KERNELS")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "install gcc" in check_kernels(place).advice
    monkeypatch.setenv("HEARTH_VLLM_PYTHON", sys.executable)
    assert check_vllm(place).level in ("ok", "error")
    assert check_ray(place).level == "ok"
    assert check_disk(place).level in ("ok", "warning")


def test_a_driver_without_a_torch_that_uses_it_is_a_warning(place, monkeypatch, tmp_path):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'NVIDIA H100, 580.65.06'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU that torch uses")

    found = check_gpu(place)

    assert found.level == "warning"
    assert found.text == "NVIDIA H100, 580.65.06, unused"


@pytest.mark.slow
def test_the_self_test_trains_and_compares_sampler_and_trainer(place):
    found = check_training(place)

    assert found.level == "ok", found
    assert found.text.startswith("2 steps in ")
