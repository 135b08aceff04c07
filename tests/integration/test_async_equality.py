"""``async_rl_loop`` without staleness is ``rl_loop`` to the bit, and pieces change no gradient."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration.conftest import config
from tests.integration.rollouts import make_rollouts, spread
from tests.integration.runs import Trial

from training.data.rows import load_rows
from training.quickstart import TRAIN_ROWS
from training.recipes import async_rl_loop

EXACT_STEPS = 6


def run_async(folder: Path, **changes: Any) -> Trial:
    names = inspect.signature(async_rl_loop.Config).parameters
    plain = vars(config(folder, dataset="", shuffle=False))
    shared = {name: value for name, value in plain.items() if name in names}
    shared |= {"tis_enabled": None, "weight_sync_interval": 1, "rollout_workers": "loop"}
    rows = load_rows(str(TRAIN_ROWS), changes.pop("max_rows", 2 * EXACT_STEPS))
    fields = async_rl_loop.Config(**(shared | changes))
    return Trial(folder, async_rl_loop.main(fields, rollout_fn_factory=make_rollouts(), rows=rows))


CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "kl": {"kl_beta": 0.01},
    "minibatches": {"ppo_n_minibatches": 2, "completions_per_prompt": 6},
    "tis": {"tis_enabled": True, "temperature": 1.3},
    "pieces": {"prompt_groups_per_step": 4, "max_samples_per_fwd_bwd": 8},
    "shuffled epochs": {"shuffle": True, "epochs": 2, "max_rows": 6, "seed": 7},
    "gspo lora": {"policy_loss": "gspo", "lora_rank": 4},
}


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_on_policy_it_trains_what_rl_loop_trains(trial, tmp_path, changes):
    changes = {"max_rows": 2 * EXACT_STEPS, **changes}
    sync = trial(reward_fn=spread, merge_adapter="lora_rank" in changes, **changes)

    ours = run_async(tmp_path / "async", merge_adapter="lora_rank" in changes, **changes)

    assert len(ours.records()) == len(sync.records()) >= 3
    for mine, theirs in zip(ours.records(), sync.records(), strict=True):
        assert {name: mine[name] for name in theirs} == theirs
        assert mine["async/version_offset_max"] == 0
    assert ours.has_weights_of(sync)


@pytest.mark.parametrize(
    "changes", [{"synchronous_training": True}, {"max_concurrency_rollout_sample": 4}]
)
def test_neither_draining_nor_a_limit_changes_what_is_trained(tmp_path, changes):
    plain = run_async(tmp_path / "plain")

    changed = run_async(tmp_path / "changed", **changes)

    assert plain.has_weights_of(changed)


def test_off_policy_trains_other_numbers(tmp_path):
    """The equality above could not fail otherwise."""
    plain = run_async(tmp_path / "plain")
    late = run_async(tmp_path / "late", max_head_offpolicy_versions=2)

    assert max(record["async/version_offset_max"] for record in late.records()) == 2
    assert not plain.has_weights_of(late)


@pytest.mark.parametrize(
    "pieces",
    [
        {"min_samples_per_fwd_bwd": 4, "max_samples_per_fwd_bwd": 4},
        {"min_samples_per_fwd_bwd": 8, "max_samples_per_fwd_bwd": 12},
    ],
)
def test_a_step_in_pieces_has_the_gradient_of_one_piece(tmp_path, pieces):
    """One step each, so that the weights differ by one gradient: AdamW would hide its size, and
    SGD-like steps come from an epsilon far above the gradient."""
    common = {
        "prompt_groups_per_step": 6,
        "max_rows": 6,
        "eps": 1e3,
        "learning_rate": 1.0,
        "weight_decay": 0.0,
        "grad_clip_norm": 0.0,
    }
    whole = run_async(tmp_path / "whole", **common)
    parts = run_async(tmp_path / "parts", **common, **pieces)

    (first,), (other,) = whole.records(), parts.records()
    assert first["rollout/fwd_bwd_count"] == 1 < other["rollout/fwd_bwd_count"]
    assert first["train/grad_norm"] == pytest.approx(other["train/grad_norm"], rel=1e-5)
    left, right = whole.weights(), parts.weights()
    for name, value in left.items():
        torch.testing.assert_close(value, right[name], rtol=0, atol=1e-6 * float(value.abs().max()))
