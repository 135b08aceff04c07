"""The commands of docs/scale.md ask for what they start."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest
from tests.integration.served import share_recipes

PAGE = (Path(__file__).parents[2] / "docs" / "scale.md").read_text().replace("\\\n", " ")
COMMANDS = re.findall(r"^python -m training\.recipes\.\w+ --base-model.*$", PAGE, re.MULTILINE)


def read_settings(command, folder):
    """All settings of a run that the command would begin."""
    _, _, module, *words = shlex.split(command)
    name = module.removeprefix("training.recipes.")
    done = share_recipes().run(name, [*words, "--print-config"], folder)
    assert done.returncode == 0, done.stderr
    # Defaults are commented out, and None has no value.
    return tomllib.loads(re.sub(r"(?m)^# (\w+ = .*)$", r"\1", done.stdout))


def test_an_example_of_one_gpu_sets_nothing_up(tmp_path):
    deployment = read_settings(COMMANDS[0], tmp_path)["deployment"]

    assert "replicas" not in deployment
    assert "engine" not in deployment


@pytest.mark.parametrize("command", COMMANDS[1:], ids=["machine", "cluster"])
def test_a_step_has_completions_for_all_replicas_at_once(command, tmp_path):
    settings = read_settings(command, tmp_path)
    deployment = settings["deployment"]

    sampled = settings["prompt_groups_per_step"] * settings["completions_per_prompt"]
    assert deployment["replicas"] > 1
    assert sampled >= deployment["replicas"] * deployment["max_batch_size"]
    assert settings["max_concurrent"] >= sampled
