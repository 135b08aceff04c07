import json
import tomllib
from pathlib import Path

import pytest
from tests.unit.planning.families import PUBLISHED

from hearth.cli.plan import PlanFlags, plan
from training.recipes.rl_loop import Config


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a config and no weights."""
    path = tmp_path / "qwen3-8b"
    PUBLISHED["qwen3-8b"]().save_pretrained(path)
    return path


def make_arguments(folder: Path, *more: str) -> list[str]:
    return ["--model", str(folder), "--gpus", "8", "--context", "8192", *more]


def test_a_plan_says_who_gets_which_gpus_and_gives_the_shape(folder, capsys):
    assert plan(make_arguments(folder)) == 0

    shown = capsys.readouterr().out
    assert "8,190,735,360 parameters, 8,190,735,360 trained" in shown
    assert "fits 8 x 80 GiB at 8,192 tokens" in shown
    shape = tomllib.loads(shown[shown.index("# shapes.toml") :].rsplit("# in a shell", 1)[0])
    values, reference = shape["shapes"].values()
    assert reference["trainer_mode"] == "FORWARD_ONLY"
    assert values["base_model"] == str(folder)
    assert values["ranks"] >= 2
    assert values["ranks"] + values["replicas"] == 8


def test_a_registered_models_prompts_are_tokenized_with_its_source(folder, capsys, monkeypatch):
    catalog = folder.with_name("catalog.toml")
    name = "accounts/mine/models/m"
    catalog.write_text(f'[models."{name}"]\nsource = {str(folder)!r}\n')
    monkeypatch.setenv("HEARTH_CATALOG", str(catalog))

    assert plan(["--model", name, "--gpus", "8", "--context", "8192", "--json"]) == 0

    *_, train = json.loads(capsys.readouterr().out)["commands"]
    assert f"--base-model {name} --deployment.tokenizer-model {folder} " in train


def test_the_reference_and_the_learning_rate_are_those_of_a_recipe_without_settings(folder, capsys):
    assert plan(make_arguments(folder, "--json")) == 0
    usual = json.loads(capsys.readouterr().out)
    assert plan(make_arguments(folder, "--json", "--no-reference")) == 0
    without = json.loads(capsys.readouterr().out)
    assert plan(make_arguments(folder, "--json", "--lora-rank", "8")) == 0
    adapter = json.loads(capsys.readouterr().out)

    assert Config.kl_beta > 0
    assert PlanFlags.learning_rate == Config.learning_rate
    assert usual["layout"]["trainer_bytes"]["reference"] > 0
    assert "reference" not in without["layout"]["trainer_bytes"]
    assert "reference" not in adapter["layout"]["trainer_bytes"]


def test_the_hosts_memory_is_shown_and_compared(folder, capsys):
    assert plan(make_arguments(folder, "--host-memory-gib", "50")) == 0

    shown = capsys.readouterr().out
    assert "memory of the fullest machine: " in shown
    assert "; it has 50 GiB" in shown
    assert "short: memory of a machine in its sync, by " in shown


def test_a_plan_as_json_has_bytes(folder, capsys):
    assert plan(make_arguments(folder, "--lora-rank", "8", "--json")) == 0

    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is True
    assert found["parameters"] == 8_190_735_360
    assert found["layout"]["trainer"]["lora_rank"] == 8
    assert sum(found["layout"]["trainer_bytes"].values()) <= found["usable_bytes"]


def test_what_does_not_fit_is_said_with_what_would(folder, capsys):
    assert (
        plan(["--model", str(folder), "--gpus", "1", "--context", "4096", "--concurrent", "16"])
        == 0
    )

    shown = capsys.readouterr().out
    assert "does not fit 1 x 80 GiB" in shown
    assert "short: GPU memory of the trainer and deployment, by" in shown
    assert "an adapter fits: --lora-rank 32" in shown


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("/no/such", "base_model must be an existing folder, got '/no/such'"),
        ("accounts/x/models/y", "base_model must be a registered name, a folder or a hub id"),
    ],
)
def test_a_model_that_is_not_there_is_one_line(model, message, capsys):
    assert plan(["--model", model, "--gpus", "1", "--context", "64"]) == 2

    error = capsys.readouterr().err.splitlines()
    assert len(error) == 1
    assert message in error[0]
