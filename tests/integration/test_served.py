"""A platform in one terminal, a recipe in another: the numbers of a run in one process."""

import os
import subprocess
import sys

from safetensors.torch import load_file
from tests.integration.runs import read_records, same_weights
from tests.integration.served import HEARTH, command_line

from training.run.checkpoints import read_manifest

SAVING = "--dcp-save-interval=1"


def in_a_terminal(url, folder):
    """The command as a person gives it."""
    folder.mkdir()
    environment = {**os.environ, "FIREWORKS_API_KEY": "x", "FIREWORKS_BASE_URL": url}
    command = [sys.executable, "-m", "training.recipes.rl_loop", *command_line(folder)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def is_same_model(first, other):
    return same_weights(*(load_file(folder / "model.safetensors") for folder in (first, other)))


def test_a_served_run_has_the_metrics_and_the_weights_of_the_embedded_one(
    served, recipes, tmp_path
):
    embedded, remote = tmp_path / "embedded", tmp_path / "served"

    assert recipes.start(None, embedded).wait(120) == 0
    said = in_a_terminal(served.url, remote)

    assert f"the platform is at {served.url}" in said
    assert len(read_records(remote)) >= 4
    assert read_records(remote) == read_records(embedded)
    assert is_same_model(served.data_dir / "models" / "served", embedded / "models" / "embedded")


def test_a_served_lora_run_with_its_reference_equals_the_embedded_one(served, recipes, tmp_path):
    embedded, remote = tmp_path / "embedded", tmp_path / "served-lora"
    flags = ["--lora-rank=4", "--kl-beta=0.1", "--merge-adapter"]

    runs = [recipes.start(None, embedded, *flags), recipes.start(served.url, remote, *flags)]
    assert [run.wait(120) for run in runs] == [0, 0]

    assert read_records(remote) == read_records(embedded)
    assert is_same_model(served.data_dir / "models" / remote.name, embedded / "models" / "embedded")


def test_the_command_of_a_finished_run_trains_nothing_and_makes_the_same_model(
    served, recipes, tmp_path
):
    folder = tmp_path / "twice"
    assert recipes.start(served.url, folder, SAVING).wait() == 0
    before = read_records(folder)
    model = served.data_dir / "models" / folder.name
    model.rename(tmp_path / "first")

    again = recipes.start(served.url, folder, SAVING)
    assert again.wait() == 0, again.output

    steps = before[-1]["step"]
    assert f"resuming from step-{steps:05d}" in again.output
    assert f"step {steps}, 16 of 16 rows done" in again.output
    assert read_records(folder) == before
    assert is_same_model(model, tmp_path / "first")
    point = read_manifest(folder)[-1]
    (line,) = [line for line in hearth_ps(served).splitlines() if point.job in line]
    assert "trainer" in line
    assert "CANCELLED" in line


def hearth_ps(served):
    command = [str(HEARTH), "ps", "--all", "--base-url", served.url, "--api-key", "x"]
    environment = {**os.environ, "COLUMNS": "250"}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=True
    ).stdout
