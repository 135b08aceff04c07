import re
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import orjson
import pytest

from training.config.parts import OLDER_SPELLINGS
from training.quickstart import MODEL, TRAIN_ROWS
from training.recipes.rl_loop import Config

GOOD_ROW = '{"messages": [{"role": "user", "content": "1 + 1?"}], "ground_truth": "2"}\n'


def rl_loop(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "training.recipes.rl_loop", *flags]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--policy-loss", "ppo2"], "policy_loss must be one of"),
        (["--completions-per-prompt", "1"], "completions_per_prompt must be >= 2, got 1"),
        (["--deployment.tokenizer-model", ""], "deployment.tokenizer_model must be"),
        (["--dataset", "nowhere.jsonl"], "dataset must be a JSONL file or an http(s) URL"),
        (["--dataset", "rows.jsonl"], "rows.jsonl:17 must be a JSON object"),
        (["--base-model", "accounts/x/models/y"], "registered are"),
    ],
    ids=["loss", "group", "tokenizer", "dataset", "line 17", "model"],
)
def test_a_users_mistake_is_one_message_on_stderr(tmp_path, flags, message):
    (tmp_path / "rows.jsonl").write_text(GOOD_ROW * 16 + "{oops\n")
    (tmp_path / "good.jsonl").write_text(GOOD_ROW)
    usual = ["--deployment.tokenizer-model", str(MODEL), "--dataset", "good.jsonl"]

    done = rl_loop(tmp_path, *usual, *flags)

    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs" / "rl_loop" / "metrics.jsonl").exists()


def test_help_lists_every_field_with_its_docstring(tmp_path):
    done = rl_loop(tmp_path, "--help")

    text = " ".join(done.stdout.replace("│", " ").split())
    assert done.returncode == 0
    for field in fields(Config):
        name = field.name.replace("_", "-")
        is_shown = re.search(rf"--(no-)?{name}[ .,]", text) is not None
        assert is_shown == (field.name not in OLDER_SPELLINGS), field.name
    assert "document" not in text
    assert "the group that rewards are centered in" in text
    assert "prompts are tokenized on the client" in text


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "sigterm"]
)
def test_a_signal_ends_the_run_cleanly_and_keeps_what_was_trained(tmp_path, number, code):
    command = [sys.executable, "-m", "training.recipes.rl_loop", "--log-path", "run"]
    command += ["--base-model", str(MODEL), "--deployment.tokenizer-model", str(MODEL)]
    command += ["--dataset", str(TRAIN_ROWS), "--max-rows", "512", "--epochs", "50"]
    command += ["--max-completion-tokens", "16", "--max-seq-len", "128", "--kl-beta", "0"]
    metrics = tmp_path / "run" / "metrics.jsonl"

    with subprocess.Popen(
        command,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Whoever runs the tests in the background has Ctrl-C ignored, and so have the children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        deadline = time.monotonic() + 90
        while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 2):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline, "no step within 90 s"
            time.sleep(0.05)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=60)

    assert process.returncode == code
    assert "Traceback" not in stderr
    assert all(orjson.loads(line)["step"] for line in metrics.read_bytes().splitlines())
