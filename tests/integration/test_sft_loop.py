"""Supervised fine-tuning: its numbers, against float64; what it says; and the RL after it."""

import math
from pathlib import Path

import pytest
import torch
from tests.integration.runs import read_metrics, read_steps
from tests.integration.supervised import Reference, answered_rows, check_weights, exported, sha256
from tests.modules import load_module

from hearth.errors import ConfigError
from hearth.viewer.database import Database
from hearth.viewer.printed import make_console, open_runs, print_run
from training.quickstart import MODEL
from training.recipes.sft_loop import Config, main
from training.run.signal import find_problems
from training.utils import TrainerConfig


def config(folder, **changes):
    usual = {"log_path": str(folder), "base_model": str(MODEL), "batch_size": 4, "max_seq_len": 128}
    return Config(**usual | changes)


def test_loss_and_weights_of_a_step_are_those_of_float64(tmp_path):
    rows = answered_rows(6)
    rows[2]["messages"][-1]["content"] = "Let me see. <answer>7</answer>"  # answers of any length
    linear = {"learning_rate": 1.0, "eps": 1.0, "weight_decay": 0.0, "grad_clip_norm": 0.0}

    main(config(tmp_path, batch_size=6, **linear), rows)

    reference = Reference()
    spoken = [reference.logprobs(*(m["content"] for m in row["messages"])) for row in rows]
    loss = -torch.cat(spoken).mean()  # every token weighs the same, whatever its answer's length
    expected = reference.step(loss, rate=1.0, eps=1.0)
    (step,) = read_steps(tmp_path)
    assert step["train/loss"] == pytest.approx(float(loss.detach()), rel=1e-6)
    assert step["train/grad_norm"] == pytest.approx(reference.grad_norm, rel=1e-5)
    assert step["train/num_loss_tokens"] == sum(map(len, spoken))
    check_weights(tmp_path, expected, tolerance=1e-4)


def test_neither_the_size_of_passes_nor_what_shares_a_batch_changes_the_numbers(tmp_path):
    rows = answered_rows(8)
    steps = {}
    for name, tokens in (("whole", 16384), ("cut", 32)):
        trainer = TrainerConfig(micro_batch_tokens=tokens)
        main(config(tmp_path / name, batch_size=8, trainer=trainer), rows, eval_rows=rows)
        (steps[name],) = read_steps(tmp_path / name)
    held_out = [
        record["eval/loss"] for record in read_metrics(tmp_path / "cut") if record["type"] == "eval"
    ]

    for name in ("train/loss", "train/grad_norm", "train/num_loss_tokens"):
        assert steps["cut"][name] == pytest.approx(steps["whole"][name], rel=1e-5)
    # The first evaluation is of the same weights and rows as the step.
    assert held_out[0] == pytest.approx(steps["whole"]["train/loss"], rel=1e-5)
    assert held_out[-1] < held_out[0]


def test_it_learns_and_says_so_and_is_shown(tmp_path, capsys):
    schedule = {"lr_schedule": "cosine", "warmup_steps": 0.1}

    main(
        config(tmp_path, batch_size=16, learning_rate=2e-3, epochs=2, eval_every=8, **schedule),
        answered_rows(128),
        eval_rows=answered_rows(32, first=128),
    )

    said = capsys.readouterr().out
    losses = [record["eval/loss"] for record in read_metrics(tmp_path) if record["type"] == "eval"]
    rates = [step["train/lr"] for step in read_steps(tmp_path)]
    assert len(losses) == 3
    assert losses[-1] < 0.9 * losses[0]
    assert rates[0] == pytest.approx(2e-3 * 16 / (0.1 * 256))
    assert rates[8] == pytest.approx(2e-3 * 0.5 * (1 + math.cos(math.pi / 2)))
    assert rates[1] > rates[0]
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert "step   16  loss " in said
    assert f"held-out loss      {losses[0]:.3f} -> {losses[-1]:.3f}" in said
    assert (tmp_path / "models" / "final" / "tokenizer.json").exists()
    assert "tags: [sft, hearth]" in (tmp_path / "models" / "final" / "README.md").read_text()
    (run,) = open_runs([tmp_path])
    print_run(run, Database([run.folder]), find_problems, make_console())
    shown = capsys.readouterr().out
    assert f"held-out loss: {losses[0]:.4f} at step 0, {losses[-1]:.4f} at step 16" in shown
    assert run.row()["rows_done"] == run.row()["rows_total"] == 256


def test_rows_that_are_too_long_are_left_out_and_said(tmp_path, caplog):
    rows = answered_rows(5)
    rows[1]["messages"][0]["content"] *= 10

    summary = main(config(tmp_path, batch_size=2, max_seq_len=48), rows)

    assert (summary.rows, summary.steps) == (4, 2)
    assert "1 of the 5 rows have more than max_seq_len=48 tokens" in caplog.text
    assert sha256(tmp_path)
    assert exported(tmp_path).keys()


def test_a_run_without_a_row_that_fits_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="rows must have one of at most max_seq_len=4 tokens"):
        main(config(tmp_path / "run", max_seq_len=4), answered_rows(2))

    assert not (tmp_path / "run").exists()


def test_two_stages_are_one_program_that_goes_on(tmp_path, capsys):
    program = load_module(Path(__file__).parents[2] / "docs" / "examples" / "sft_then_rl.py")

    taught, rewarded = program.train(tmp_path, sft_rows=64, rl_rows=32)
    again, _ = program.train(tmp_path, sft_rows=64, rl_rows=32)

    assert (taught.steps, rewarded.steps) == (2, 2)
    assert again.steps == 2
    assert capsys.readouterr().out.count("this run is finished") == 2
    assert rewarded.model_path is not None
    first, second = (step["train/lr"] for step in read_steps(tmp_path / "rl"))
    assert first == 3e-4
    assert 0 < second <= 1.5e-4  # half of the rows stand before its first one
