import os
import re
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import orjson
import pytest
from tests.integration.runs import count_steps
from tests.waiting import wait_until

from training.quickstart import MODEL, TRAIN_ROWS
from training.recipes.rl_loop import Config

GOOD_ROW = '{"messages": [{"role": "user", "content": "1 + 1?"}], "ground_truth": "2"}\n'


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--policy-loss", "ppo2"], "policy_loss must be one of"),
        (["--completions-per-prompt", "1"], "completions_per_prompt must be >= 2, got 1"),
        (["--deployment.tokenizer-model", ""], "deployment.tokenizer_model must be"),
        (["--dataset", "nowhere.jsonl"], "dataset must be a JSONL, Parquet or CSV file"),
        (["--dataset", "rows.jsonl"], "rows.jsonl:17 must be a JSON object"),
        (["--base-model", "accounts/x/models/y"], "registered are"),
    ],
    ids=["loss", "group", "tokenizer", "dataset", "line 17", "model"],
)
def test_a_users_mistake_is_one_message_on_stderr(recipes, tmp_path, flags, message):
    (tmp_path / "rows.jsonl").write_text(GOOD_ROW * 16 + "{oops\n")
    (tmp_path / "good.jsonl").write_text(GOOD_ROW)
    usual = ["--deployment.tokenizer-model", str(MODEL), "--dataset", "good.jsonl"]

    done = recipes.run("rl_loop", [*usual, *flags], tmp_path)

    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs" / "rl_loop" / "metrics.jsonl").exists()


def test_help_lists_every_field_with_its_docstring(tmp_path):
    command = [sys.executable, "-m", "training.recipes.rl_loop", "--help-all"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    text = " ".join(done.stdout.replace("│", " ").split())
    assert done.returncode == 0
    for field in fields(Config):
        name = field.name.replace("_", "-")
        is_shown = re.search(rf"--(no-)?{name}[ .,]", text) is not None
        assert is_shown == (not field.type.startswith("Suppress")), field.name
    assert "document" not in text
    assert "the group that rewards are centered in" in text
    assert "with which the client tokenizes prompts" in text


def test_help_shows_first_what_most_runs_give_and_how_to_see_the_rest(tmp_path):
    command = [sys.executable, "-m", "hearth", "train", "async", "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)

    flags = re.findall(r"^  --([a-z-]+)", done.stdout, re.MULTILINE)
    assert {"base-model", "dataset", "rollout", "learning-rate", "help-all"} <= set(flags)
    assert 20 <= len(flags) <= 25
    assert max(map(len, done.stdout.splitlines())) <= 88


REWARDS = """
from training.rewards import exact_match


def reward(completion, row):
    return len(set(completion)) / 100
"""
ROLLOUTS = """
from tests.integration.rollouts import make_rollouts

make_rollout_fn = make_rollouts()
"""


@pytest.mark.parametrize(
    ("name", "own"),
    [("rl", "reward = 'mine:reward'"), ("async", "rollout = 'mine:make_rollout_fn'")],
)
def test_a_settings_file_is_a_whole_run_and_its_record_another(recipes, tmp_path, name, own):
    (tmp_path / "mine.py").write_text(REWARDS + ROLLOUTS)
    settings = f"""
        base_model = "{MODEL}"
        dataset = "{TRAIN_ROWS}"
        max_rows = 2
        max_completion_tokens = 4
        max_seq_len = 128
        kl_beta = 0.0
        truncated_completions = "score"
        log_path = "first"
        {own}
    """
    (tmp_path / "run.toml").write_text("\n".join(map(str.strip, settings.splitlines())))

    arguments = ["train", name, "@run.toml", "--seed", "3"]
    first = subprocess.run(
        [sys.executable, "-m", "hearth", *arguments],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
    )
    arguments = ["train", name, "@first/config.json", "--log-path", "again"]
    again = recipes.run("hearth", arguments, tmp_path)

    assert (first.returncode, again.returncode) == (0, 0), first.stderr + again.stderr
    one, other = (
        [
            orjson.loads(line)
            for line in (tmp_path / run / "metrics.jsonl").read_bytes().splitlines()
        ]
        for run in ("first", "again")
    )
    assert one[0]["rollout/raw_reward"] > 0
    assert [record["train/grad_norm"] for record in one] == [
        record["train/grad_norm"] for record in other
    ]
    config = orjson.loads((tmp_path / "again" / "config.json").read_bytes())
    assert (config["seed"], config["max_rows"]) == (3, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rl", "--reward", "nowhere:reward"], "reward must name a function, got 'nowhere:reward'"),
        (["rl", "--reward", "reward"], "reward must be MODULE:FUNCTION, got 'reward'"),
        (["async"], "rollout must be MODULE:FUNCTION, got None"),
        (["rl", "@missing.toml"], "the settings file must be readable, got 'missing.toml'"),
    ],
)
def test_a_name_that_leads_nowhere_is_one_message(recipes, tmp_path, arguments, message):
    (tmp_path / "good.jsonl").write_text(GOOD_ROW)
    usual = ["--base-model", str(MODEL), "--dataset", "good.jsonl"]
    recipe, *rest = arguments
    files = [argument for argument in rest if argument.startswith("@")]
    rest = [argument for argument in rest if not argument.startswith("@")]

    done = recipes.run("hearth", ["train", recipe, *files, *usual, *rest], tmp_path)

    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "sigterm"]
)
def test_a_signal_ends_the_run_cleanly_and_keeps_what_was_trained(recipes, tmp_path, number, code):
    arguments = ["--log-path", "run", "--base-model", str(MODEL)]
    arguments += ["--deployment.tokenizer-model", str(MODEL)]
    arguments += ["--dataset", str(TRAIN_ROWS), "--max-rows", "512", "--epochs", "50"]
    arguments += ["--max-completion-tokens", "16", "--max-seq-len", "128", "--kl-beta", "0"]
    recipe = recipes.begin("rl_loop", arguments, tmp_path, {})
    wait_until(lambda: recipe.code() is not None or count_steps(tmp_path / "run") >= 2, 90)
    assert recipe.code() is None, recipe.errors

    recipe.send(number)

    assert recipe.wait() == code
    assert "Traceback" not in recipe.errors
    told = "interrupted: finished steps and metrics are in run"
    assert (told in recipe.errors) == (number == signal.SIGINT)
    metrics = tmp_path / "run" / "metrics.jsonl"
    assert all(orjson.loads(line)["step"] for line in metrics.read_bytes().splitlines())
