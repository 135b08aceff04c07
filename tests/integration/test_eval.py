"""``hearth eval``: models on a dataset and on an environment, its table, JSON and kept answers."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hearth.cli.main import main
from hearth.records.reading import iterate_tables
from hearth.viewer.database import Database
from hearth.viewer.library import Library
from hearth.viewer.samples import Samples
from training.environments import Environment, Step
from training.quickstart import HELDOUT_ROWS, MODEL
from training.run.pass_at_k import pass_at_k

ROWS = 12


class Echo(Environment):
    """Two turns; the second answer earns 1 where the first had a digit."""

    max_turns = 2

    def reset(self, seed):
        self.seen = False
        return f"What is {seed % 10} + 1?"

    def step(self, answer):
        if not self.seen:
            self.seen = True
            self.good = any(character.isdigit() for character in answer)
            return Step("Again?")
        return Step(reward=float(self.good), done=True)


@pytest.fixture(scope="module")
def worse(tmp_path_factory):
    """The shipped model with noise in it."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("models") / "worse"
    shutil.copytree(MODEL, folder)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    noisy = {
        name: tensor + 0.02 * torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        for name, tensor in tensors.items()
    }
    save_file(noisy, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def here(tmp_path, monkeypatch):
    for name in ("HEARTH_URL", "HEARTH_API_KEY", "FIREWORKS_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_models_are_measured_on_the_same_rows_and_compared_in_pairs(here, worse, capsys):
    flags = ["--dataset", str(HELDOUT_ROWS), "--max-rows", str(ROWS), "--samples", "4"]

    assert (
        main(["eval", str(MODEL), str(worse), *flags, "--max-completion-tokens", "12", "--json"])
        == 0
    )

    told = json.loads(capsys.readouterr().out)
    first, second = told["models"]
    assert (told["rows"], told["samples"], first["answers"]) == (ROWS, 4, 4 * ROWS)
    assert (first["model"], second["model"]) == ("model", "worse")
    rewards = read_rewards(here / "runs" / "eval" / "model")
    rates = [[pass_at_k(4, sum(row), k) for row in rewards] for k in (1, 2, 4)]
    for k, of_rows in zip((1, 2, 4), rates, strict=True):
        measured = first[f"pass@{k}"]
        assert measured["mean"] == pytest.approx(sum(of_rows) / ROWS)
        assert 0.0 <= measured["low"] < measured["mean"] < measured["high"] <= 1.0
    assert first["reward"]["mean"] == pytest.approx(first["pass@1"]["mean"])
    differences = {found["measure"]: found for found in told["differences"]}
    assert set(differences) == {"pass@1", "pass@2", "pass@4", "reward"}
    found = differences["pass@1"]
    assert (found["model"], found["against"], found["rows"]) == ("worse", "model", ROWS)
    expected = second["pass@1"]["mean"] - first["pass@1"]["mean"]
    assert found["interval"]["mean"] == pytest.approx(expected)
    assert found["better"] + found["worse"] > 0
    check_the_viewer_opens(here / "runs" / "eval")


def read_rewards(folder):
    rows = {}
    for table in iterate_tables(folder, "eval", ["index", "reward"]):
        for line in table.to_pylist():
            rows.setdefault(line["index"], []).append(int(line["reward"]))
    return [rows[place] for place in sorted(rows)]


def check_the_viewer_opens(folder):
    library = Library([folder])
    assert [run.name for run in library.runs()] == ["model", "worse"]
    run = library.find("model")
    run.refresh()
    assert run.state().state == "ended"
    assert Samples(Database([folder]), run).page({})["total"] == 4 * ROWS


def test_one_model_prints_a_table_and_a_reward_of_ones_own_scores(here, capsys):
    (here / "mine.py").write_text("def short(text, row):\n    return float(len(text) < 1000)\n")
    command = ["eval", str(MODEL), "--dataset", str(HELDOUT_ROWS), "--max-rows", "3"]

    assert main([*command, "--reward", "mine:short", "--max-completion-tokens", "4"]) == 0

    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["model"]
    assert lines[1] == ["pass@1", "1.000", "[0.439,", "1.000]"]
    assert lines[2] == ["reward", "1.000", "[1.000,", "1.000]"]
    assert lines[3] == ["answers", "3"]


def test_an_environment_of_several_turns_is_played_on_its_held_out_tasks(here, capsys):
    environment = f"{__name__}:Echo" if "." not in __name__ else "echo_environment:Echo"
    shutil.copy(__file__, here / "echo_environment.py")

    flags = ["--environment", environment, "--max-rows", "3", "--samples", "2"]
    assert main(["eval", str(MODEL), *flags, "--max-completion-tokens", "6", "--json"]) == 0

    (model,) = json.loads(capsys.readouterr().out)["models"]
    assert model["answers"] + model["failed_samples"] == 6
    assert model["answers"] > 0
    lines = [
        line
        for table in iterate_tables(here / "runs" / "eval" / "model", "eval", ["turns", "index"])
        for line in table.to_pylist()
    ]
    assert {line["index"] for line in lines} == {0, 1, 2}


REFUSED = [
    ([str(MODEL)], "dataset or environment must be given, got None and None"),
    ([str(MODEL), "--dataset", "none.jsonl"], "no such file"),
    ([str(MODEL), "--dataset", str(HELDOUT_ROWS), "--samples", "0"], "samples must be >= 1, got 0"),
    (["no/such/folder", "--dataset", str(HELDOUT_ROWS)], "no/such/folder"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED, ids=[text for _, text in REFUSED])
def test_what_cannot_be_is_refused_in_a_line(arguments, message, here, capsys):
    assert main(["eval", *arguments]) == 2

    assert message in capsys.readouterr().err
    assert not (here / "runs").exists()


def test_help_is_there_at_once_without_torch():
    code = (
        "import sys; from hearth.cli.main import main\n"
        "try: main(['eval', '--help'])\n"
        "except SystemExit: pass\n"
        "print({'torch', 'transformers', 'pyarrow'} & set(sys.modules))"
    )

    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.splitlines()[-1] == "set()"
    assert time.monotonic() - began < 5.0  # half a second on an idle machine
    assert Path(sys.executable).exists()
