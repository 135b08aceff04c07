"""The commands of docs/scale.md ask for what they start."""

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "scale.md").read_text().replace("\\\n", " ")
COMMANDS = re.findall(r"^python -m training\.recipes\.\w+ --base-model.*$", PAGE, re.MULTILINE)


def read_settings(command):
    """All settings of a run that the command would begin."""
    _, *words = shlex.split(command)
    printed = subprocess.run(
        [sys.executable, *words, "--print-config"], capture_output=True, text=True, check=True
    ).stdout
    # Defaults are commented out, and None has no value.
    return tomllib.loads(re.sub(r"(?m)^# (\w+ = .*)$", r"\1", printed))


def test_an_example_of_one_gpu_sets_nothing_up():
    deployment = read_settings(COMMANDS[0])["deployment"]

    assert "replicas" not in deployment
    assert "engine" not in deployment


@pytest.mark.parametrize("command", COMMANDS[1:], ids=["machine", "cluster"])
def test_a_step_has_completions_for_all_replicas_at_once(command):
    settings = read_settings(command)
    deployment = settings["deployment"]

    sampled = settings["prompt_groups_per_step"] * settings["completions_per_prompt"]
    assert deployment["replicas"] > 1
    assert sampled >= deployment["replicas"] * deployment["max_batch_size"]
    assert settings["max_concurrent"] >= sampled
