"""Reward functions and the adaptive KL in whole runs of ``rl_loop``."""

from __future__ import annotations

import asyncio
import threading

import pytest
from tests.integration.conftest import config
from tests.integration.rollouts import make_rollouts, spread
from tests.integration.runs import Trial

from hearth.errors import ConfigError
from training.quickstart import HELDOUT_ROWS
from training.recipes.rl_loop import main
from training.rewards import RewardEnsemble, RewardTimeoutError, Score, guarded
from training.run.checkpoints import read_manifest


async def spread_later(text, row):
    await asyncio.sleep(0)
    return spread(text, row)


@pytest.fixture
def unspied(tmp_path):
    """A run whose reward function is handed on as it is."""

    def run(reward_fn, **changes) -> Trial:
        folder = tmp_path / "unspied"
        return Trial(folder, main(config(folder, **changes), reward_fn=reward_fn))

    return run


def test_however_a_reward_is_called_the_run_has_the_same_numbers(trial):
    common = {"max_rows": 4, "eval_dataset": str(HELDOUT_ROWS), "eval_rows": 4}
    plain = trial(reward_fn=spread, **common)
    others = [
        trial(reward_fn=spread, reward_timeout_s=60.0, reward_errors="drop", **common),
        trial(reward_fn=spread_later, **common),
        trial(reward_fn=spread_later, reward_timeout_s=60.0, **common),
    ]

    assert len(plain.records()) == 2
    for other in others:
        assert other.records() == plain.records()
        assert other.records("eval") == plain.records("eval")
        assert other.has_weights_of(plain)


def test_a_completion_whose_reward_is_late_is_dropped_and_its_group_trains(trial):
    is_over = threading.Event()
    calls = 0

    def reward(text, row):
        nonlocal calls
        calls += 1
        if calls in (2, 3):
            is_over.wait(60)
        return spread(text, row)

    run = trial(reward_fn=reward, max_rows=4, reward_timeout_s=0.5, reward_errors="drop")
    is_over.set()

    first, second = run.records()
    assert (first["rollout/reward_fail_count"], second["rollout/reward_fail_count"]) == (2.0, 0.0)
    assert first["rollout/valid_prompt_groups"] == second["rollout/valid_prompt_groups"] == 2.0
    assert run.summary.steps == 2


def test_by_default_a_reward_that_is_late_ends_the_run(trial):
    is_over = threading.Event()

    with pytest.raises(RewardTimeoutError, match=r"within 0\.2 s.*reward_timeout_s"):
        trial(reward_fn=lambda text, row: float(is_over.wait(60)), reward_timeout_s=0.2)
    is_over.set()


def test_rows_that_all_lose_their_rewards_end_the_run_with_the_error(trial):
    def reward(text, row):
        raise OSError("no judge")

    with pytest.raises(OSError, match="no judge"):
        trial(reward_fn=reward, reward_errors="drop")


def test_a_guard_of_the_callers_own_is_kept_and_not_doubled(unspied):
    def some(text, row):
        if len(text) % 3 == 0:
            raise OSError("no judge")
        return spread(text, row)

    with pytest.raises(ConfigError, match="must not be given with a guarded reward_fn"):
        unspied(guarded(some), reward_errors="drop")
    run = unspied(guarded(some, on_error="drop"), max_rows=4)

    assert sum(record["rollout/reward_fail_count"] for record in run.records()) > 0


def without_truth(text, row):
    return float(text == row["solution"])


def test_a_reward_that_fails_on_the_first_row_is_found_before_anything_is_started(
    unspied, tmp_path
):
    with pytest.raises(ConfigError, match="reward_fn must score any text, got KeyError"):
        unspied(without_truth)

    assert list(tmp_path.iterdir()) == []


def test_an_ensemble_logs_how_far_its_members_disagree(unspied):
    ensemble = RewardEnsemble([spread, lambda text, row: 1.0 - spread(text, row), spread])

    run = unspied(ensemble, max_rows=2)

    (record,) = run.records()
    assert (
        0 < record["rollout/reward_disagreement/mean"] < record["rollout/reward_disagreement/max"]
    )


def test_answers_that_the_reward_did_not_find_are_a_share_of_all(unspied):
    found: list[bool] = []

    def reward(text, row):
        found.append(len(text) % 2 == 0)
        return Score(spread(text, row), parsed=found[-1])

    rows = {"max_rows": 2, "eval_dataset": str(HELDOUT_ROWS), "eval_rows": 6}
    run = unspied(RewardEnsemble([spread, reward]), reward_timeout_s=60.0, **rows)

    (record,) = run.records()
    first, last = (found[:6], found[-6:])
    assert record["rollout/parse_fail_ratio"] == found[6:-6].count(False) / 8
    assert [record["eval/parse_fail_ratio"] for record in run.records("eval")] == [
        pytest.approx(part.count(False) / 6) for part in (first, last)
    ]
    assert 0 < found.count(False) < len(found)


ADAPTED = {"dcp_save_interval": 2, "kl_beta": 0.1, "kl_target": 1e-4, "learning_rate": 3e-3}


def test_the_kl_coefficient_follows_the_kl_and_survives_a_resume(trial):
    common = ADAPTED | {"max_rows": 10}
    whole = trial(reward_fn=spread, **common)
    calls = 0

    def failing(text, row):
        nonlocal calls
        calls += 1
        if calls > 30:
            raise OSError("the reward's disk is full")
        return spread(text, row)

    with pytest.raises(OSError, match="disk is full"):
        trial(reward_fn=failing, folder="crashed", **common)
    (*_, point) = read_manifest(whole.folder.parent / "crashed")
    resumed = trial(reward_fn=spread, folder="crashed", **common)

    records = whole.records()
    coefficients = [record["train/kl_beta"] for record in records]
    # The first step's KL is 0, later ones are far above the target.
    assert coefficients[0] == 0.1
    assert coefficients[1] == pytest.approx(0.098)
    assert coefficients[-1] > coefficients[1]
    assert all(
        record["train/mean_kl_penalty"]
        == pytest.approx(record["train/kl_beta"] * record["train/ref_kl"], rel=1e-4, abs=1e-9)
        for record in records
    )
    assert point.kl_beta == coefficients[2]
    assert resumed.records() == records
    assert resumed.has_weights_of(whole)


@pytest.mark.parametrize("late", [0, 1])
def test_the_kl_coefficient_survives_a_resume_in_the_async_recipe_too(async_trial, late):
    common = ADAPTED | {"max_rows": 12, "max_head_offpolicy_versions": late}
    whole = async_trial(make=make_rollouts(), **common)

    async def fail_at_row_7(row: int, _sample: int) -> None:
        if row == 7:
            raise ValueError("the tool's disk is full")

    with pytest.raises(ValueError, match="disk is full"):
        async_trial(make=make_rollouts(before=fail_at_row_7), folder="crashed", **common)
    (point,) = read_manifest(whole.folder.parent / "crashed")
    resumed = async_trial(make=make_rollouts(), folder="crashed", **common)

    before, after = whole.records(), resumed.records()
    coefficients = [record["train/kl_beta"] for record in after]
    assert len(before) == len(after) == 6
    assert coefficients[:2] == [0.1, pytest.approx(0.098)]
    assert coefficients[2] > coefficients[1]
    # The checkpoint has what the next step takes, and that is where the resumed run goes on.
    assert (point.step, point.kl_beta) == (2, coefficients[2])
    if late == 0:
        # It counts from the start of the deployment.
        for record in (*before, *after):
            del record["async/trained_against_version"]
        assert after == before
        assert resumed.has_weights_of(whole)


def test_a_fixed_coefficient_is_not_logged_as_an_adapted_one(trial):
    run = trial(reward_fn=spread, kl_beta=0.1, max_rows=2)

    assert "train/kl_beta" not in run.records()[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kl_target": 0.0, "kl_beta": 0.1}, "kl_target must be > 0 or None, got 0"),
        ({"kl_target": 0.1, "kl_beta": 0.0}, "kl_beta must be > 0 with kl_target"),
        (
            {"kl_target": 0.1, "kl_beta": 0.1, "policy_loss": "dapo"},
            r"policy_loss must be one of \['grpo', 'reinforce'\] with kl_target, got 'dapo'",
        ),
        ({"reward_timeout_s": 0.0}, "reward_timeout_s must be > 0 seconds or None, got 0"),
        ({"reward_errors": "zero"}, "reward_errors must be one of .*'drop'., got 'zero'"),
    ],
)
def test_settings_that_break_their_rule_are_named(trial, changes, message):
    with pytest.raises(ConfigError, match=message):
        trial(**changes)
