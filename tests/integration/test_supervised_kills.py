"""SIGKILL to recipes that train on given answers: their weights come out the same to the bit."""

import signal

import pytest
from tests.integration.runs import count_steps
from tests.integration.supervised import (
    answered_rows,
    preferences,
    sha256,
    without_times,
    write_rows,
)
from tests.waiting import wait_until

ADAPTER = ("--lora-rank=4", "--merge-adapter")


@pytest.mark.parametrize(
    ("recipe", "make_rows", "flags"),
    [
        ("sft_loop", answered_rows, ("--lr-schedule=linear", "--warmup-steps=3")),
        ("dpo_loop", preferences, ADAPTER),
    ],
)
def test_a_run_that_is_killed_and_goes_on_is_one_that_was_not(
    tmp_path, recipes, recipe, make_rows, flags
):
    rows = write_rows(tmp_path / "rows.jsonl", make_rows(40))
    usual = (f"--dataset={rows}", "--batch-size=4", "--learning-rate=1e-3", "--dcp-save-interval=2")
    whole, killed = (
        recipes.start_embedded(recipe, tmp_path / name, *usual, *flags)
        for name in ("whole", "killed")
    )
    wait_until(lambda: count_steps(tmp_path / "killed") >= 4, 60, "some steps")
    killed.send(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    again = recipes.start_embedded(recipe, tmp_path / "killed", *usual, *flags)

    assert (whole.wait(), again.wait()) == (0, 0), again.output
    assert "resuming from step-" in again.output
    assert sha256(tmp_path / "killed") == sha256(tmp_path / "whole")
    assert without_times(tmp_path / "killed") == without_times(tmp_path / "whole")
