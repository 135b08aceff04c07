"""Direct preference optimization: ln 2 at the start, gradients of float64, kills, and learning."""

import math
import shutil

import pytest
import torch
from tests.integration.runs import read_metrics, read_steps
from tests.integration.supervised import Reference, check_weights, preferences

from hearth.errors import ConfigError
from training.quickstart import MODEL
from training.recipes.dpo_loop import Config, dpo_loss, main
from training.run.reference import REFERENCE
from training.utils import TrainerConfig


def config(folder, **changes):
    usual = {"log_path": str(folder), "base_model": str(MODEL), "batch_size": 4, "max_seq_len": 128}
    return Config(**usual | changes)


def reference_loss(reference, rows, held, beta):
    """The mean loss by the paper's formula, in float64."""
    losses = []
    for row, (chosen, rejected) in zip(rows, held, strict=True):
        question = row["messages"][0]["content"]
        ratios = [
            reference.logprobs(question, row[name]).sum() - before
            for name, before in (("chosen", chosen), ("rejected", rejected))
        ]
        losses.append(-torch.log(1 / (1 + torch.exp(-beta * (ratios[0] - ratios[1])))))
    return torch.stack(losses).mean()


def test_the_first_loss_is_ln_2_and_the_first_step_is_that_of_float64(tmp_path):
    rows = preferences(5)
    linear = {"learning_rate": 1.0, "eps": 1.0, "weight_decay": 0.0, "grad_clip_norm": 0.0}
    trainer = TrainerConfig(micro_batch_tokens=64)  # pairs and answers in passes of their own

    main(config(tmp_path, batch_size=5, dpo_beta=0.3, trainer=trainer, **linear), rows)

    reference = Reference()
    with torch.no_grad():
        held = [
            [
                float(reference.logprobs(row["messages"][0]["content"], row[name]).sum())
                for name in ("chosen", "rejected")
            ]
            for row in rows
        ]
    expected = reference.step(reference_loss(reference, rows, held, 0.3), rate=1.0, eps=1.0)
    (step,) = read_steps(tmp_path)
    assert step["train/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert step["train/margin"] == pytest.approx(0.0, abs=1e-5)
    assert step["train/denominator"] == 10
    assert step["train/grad_norm"] == pytest.approx(reference.grad_norm, rel=1e-4)
    check_weights(tmp_path, expected, tolerance=1e-3)


def test_the_loss_is_that_of_the_paper_at_any_margin():
    policy = torch.tensor([[-1.0, -4.0], [-7.0, -2.0]], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([[-2.0, -3.0], [-5.0, -5.5]], dtype=torch.float64)

    losses, metrics = dpo_loss(policy, reference, 0.5)
    losses.sum().backward()

    margins = [0.5 * (1.0 + 1.0), 0.5 * (-2.0 - 3.5)]
    assert losses.tolist() == pytest.approx([math.log1p(math.exp(-m)) for m in margins])
    pull = [0.5 / (1 + math.exp(m)) for m in margins]
    assert policy.grad is not None
    assert policy.grad.tolist() == [
        pytest.approx([-pull[0], pull[0]]),
        pytest.approx([-pull[1], pull[1]]),
    ]
    assert metrics["accuracy"] == 0.5
    assert metrics["margin"] == pytest.approx(sum(margins) / 2)
    assert metrics["chosen_reward"] == pytest.approx(0.5 * (1.0 - 2.0) / 2)


def test_held_out_pairs_are_told_apart_after_training(tmp_path, capsys):
    main(
        config(tmp_path, batch_size=16, learning_rate=2e-4),
        preferences(96),
        eval_rows=preferences(32, first=96),
    )

    first, last = (record for record in read_metrics(tmp_path) if record["type"] == "eval")
    assert first["eval/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert last["eval/loss"] < 0.65
    assert last["eval/accuracy"] > 0.7
    assert last["eval/margin"] > 0
    assert f"held-out accuracy  {first['eval/accuracy']:.3f} -> " in capsys.readouterr().out


def test_a_run_does_not_go_on_without_its_reference(tmp_path):
    rows = preferences(8)
    saving = {"dcp_save_interval": 1}
    main(config(tmp_path / "run", **saving), rows)
    more = {"epochs": 2, "resume": "force"} | saving
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    (tmp_path / "run" / REFERENCE).unlink()

    with pytest.raises(ConfigError, match="must hold the logprobs of the run's reference"):
        main(config(tmp_path / "run", **more), rows)
    with pytest.raises(ConfigError, match="rows and eval_rows must be those that"):
        main(config(tmp_path / "other", **more), rows, eval_rows=rows)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"messages": []}, r"rows\[0\]\.messages must be the prompt"),
        ({"chosen": None}, r"rows\[0\]\.chosen must be an answer, a text or a list"),
        ({"rejected": []}, r"rows\[0\]\.rejected must be an answer"),
        ({"chosen": "a", "rejected": "a"}, r"rows\[0\] must have two answers that differ"),
        ({"chosen": [{"role": "user", "content": "a"}]}, r"chosen must be the assistant's in its"),
    ],
)
def test_rows_that_are_no_preferences_are_refused(tmp_path, change, message):
    with pytest.raises(ConfigError, match=message):
        main(config(tmp_path / "run"), [preferences(1)[0] | change])

    assert not (tmp_path / "run").exists()


def test_settings_of_preferences_are_judged():
    with pytest.raises(ConfigError, match=r"dpo_beta must be > 0, got 0"):
        Config(base_model="m", dpo_beta=0.0).validate()
