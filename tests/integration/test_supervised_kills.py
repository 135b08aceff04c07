"""SIGKILL to the recipes around RL: their weights come out the same to the bit."""

import signal

import pytest
from tests.integration.runs import count_steps
from tests.integration.supervised import (
    answered_rows,
    preferences,
    sha256,
    shaken_model,
    without_times,
    write_rows,
)
from tests.waiting import wait_until

from training.quickstart import TRAIN_ROWS


def sft_flags(folder):
    rows = write_rows(folder / "rows.jsonl", answered_rows(40))
    return (f"--dataset={rows}", "--batch-size=4", "--lr-schedule=linear", "--warmup-steps=3")


def dpo_flags(folder):
    rows = write_rows(folder / "rows.jsonl", preferences(40))
    return (f"--dataset={rows}", "--batch-size=4", "--lora-rank=4", "--merge-adapter")


def distillation_flags(folder):
    teacher = shaken_model(folder / "teacher")
    sampling = ("--prompt-groups-per-step=4", "--completions-per-prompt=2", "--max-seq-len=64")
    rows = (f"--dataset={TRAIN_ROWS}", "--max-rows=40", "--max-completion-tokens=12")
    return (f"--teacher-model={teacher}", "--distill-loss=top_k", *sampling, *rows)


@pytest.mark.parametrize(
    ("recipe", "make_flags"),
    [("sft_loop", sft_flags), ("dpo_loop", dpo_flags), ("distillation_loop", distillation_flags)],
)
def test_a_run_that_is_killed_and_goes_on_is_one_that_was_not(
    tmp_path, recipes, recipe, make_flags
):
    flags = (*make_flags(tmp_path), "--learning-rate=1e-3", "--dcp-save-interval=2")
    whole, killed = (
        recipes.start_embedded(recipe, tmp_path / name, *flags) for name in ("whole", "killed")
    )
    wait_until(lambda: count_steps(tmp_path / "killed") >= 4, 60, "some steps")
    killed.send(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    again = recipes.start_embedded(recipe, tmp_path / "killed", *flags)

    assert (whole.wait(), again.wait()) == (0, 0), again.output
    assert "resuming from step-" in again.output
    assert sha256(tmp_path / "killed") == sha256(tmp_path / "whole")
    assert without_times(tmp_path / "killed") == without_times(tmp_path / "whole")
