import asyncio
import gc
import math
import signal
import threading
import traceback
from collections import Counter

import orjson
import pytest
import torch
from tests.integration.conftest import config
from tests.integration.rollouts import spread
from tests.integration.runs import find_changed, measure_difference

from hearth.errors import ConfigError
from hearth.losses.catalog import POLICY_LOSSES
from hearth.trainer.logprobs import TargetScorer
from training.quickstart import MODEL, TRAIN_ROWS
from training.recipes.rl_loop import main
from training.run.command import run_async, run_to_exit_code
from training.run.log_path import hold_log_path
from training.utils import DeployConfig, TISConfig, TrainerConfig


@pytest.mark.parametrize("policy_loss", POLICY_LOSSES)
def test_every_policy_loss_trains(trial, policy_loss):
    run = trial(policy_loss=policy_loss, reward_fn=spread, max_rows=4, tis_enabled=True)

    assert run.summary.steps == 2
    assert all(math.isfinite(record["train/grad_norm"]) for record in run.records())
    assert find_changed(run.weights())


def test_two_runs_with_one_seed_leave_the_same_numbers(trial):
    first, second = (trial(reward_fn=spread, seed=3, kl_beta=0.01) for _ in range(2))

    assert first.records() == second.records()
    assert first.has_weights_of(second)
    assert first.records() != trial(reward_fn=spread, seed=4, kl_beta=0.01).records()


@pytest.mark.parametrize(
    ("interval", "published", "ages"), [(0, 0, [0, 1, 2, 3]), (1, 4, [0] * 4), (3, 2, [0, 1, 2, 0])]
)
def test_weights_are_published_at_window_borders_only(trial, interval, published, ages):
    run = trial(weight_sync_interval=interval, reward_fn=spread)

    assert run.summary.steps == 4
    assert run.summary.version == published
    for name in ("mean", "max"):
        assert [record[f"version/sample_staleness_{name}"] for record in run.records()] == ages


def test_a_group_without_spread_trains_nothing_and_publishes_nothing(trial, capsys):
    runs = []
    assert run_to_exit_code(lambda: train_flat(trial, runs)) == 1

    (run,) = runs
    assert run.summary.steps == 0
    assert run.summary.rows == 8
    assert run.summary.version == 0
    assert run.records() == []
    printed = capsys.readouterr()
    assert (
        "8 rows were dropped and no optimizer step was taken: 8 whose completions all earned the "
        "same reward" in printed.out
    )
    assert "error: the run must take an optimizer step, got none in 8 rows" in printed.err


def train_flat(trial, runs):
    """The summary of a run whose answers all earn the same."""
    runs.append(trial(reward_fn=lambda text, row: 1.0))
    return runs[0].summary


def test_a_reward_that_is_not_finite_drops_its_group_and_is_counted(trial, rows):
    bad = rows[1]["messages"][0]["content"]

    def reward(text, row):
        return math.nan if row["messages"][0]["content"] == bad else spread(text, row)

    run = trial(reward_fn=reward, rows=rows[:4])

    assert [record["rollout/valid_prompt_groups"] for record in run.records()] == [2.0, 1.0]
    assert run.records()[0]["rollout/dropped/non_finite"] == 1.0


@pytest.mark.parametrize("interval", [1, 2, 0])
def test_dropped_rows_are_made_up_for_in_windows_of_every_size(trial, rows, interval):
    dropped = {row["messages"][0]["content"] for row in (rows[0], rows[3], rows[4], rows[8])}

    def reward(text, row):
        return 1.0 if row["messages"][0]["content"] in dropped else spread(text, row)

    run = trial(reward_fn=reward, rows=rows[:12], weight_sync_interval=interval)

    assert [record["rollout/valid_prompt_groups"] for record in run.records()] == [2.0] * 4
    assert len(run.rewarded) == 12 * 4
    assert run.summary.rows == 12


def test_a_row_without_truth_is_refused_by_the_default_reward_before_anything_starts(
    rows, tmp_path
):
    with pytest.raises(ConfigError, match=r"rows\[1\]\.ground_truth must be given for the default"):
        main(config(tmp_path / "run"), [rows[0], {"messages": rows[1]["messages"]}])

    assert not (tmp_path / "run").exists()


def test_rows_that_are_dropped_after_the_last_step_leave_a_record(trial, rows):
    run = trial(reward_fn=lambda text, row: 1.0, rows=rows[:4])

    lines = (run.folder / "metrics.jsonl").read_bytes().splitlines()
    (record,) = [line for line in map(orjson.loads, lines) if line["type"] == "dropped"]
    assert (record["step"], record["rollout/dropped/uniform"]) == (0, 4.0)
    assert record["rollout/raw_reward"] == 1.0


@pytest.mark.parametrize("loss_path", ["client", "builtin"])
def test_in_a_window_ratios_are_to_the_policy_that_sampled(trial, loss_path):
    options = {"reward_fn": spread, "weight_sync_interval": 0, "learning_rate": 1e-2}
    run = trial(**options, policy_loss="dapo", loss_path=loss_path)

    on_policy, *stale = run.records()
    assert on_policy["train/ppo_ratio_mean"] == 1.0
    assert on_policy["train/dapo_clip_frac"] == 0.0
    assert all(abs(record["train/ppo_ratio_mean"] - 1.0) > 1e-3 for record in stale)
    assert any(record["train/dapo_clip_frac"] > 0.0 for record in stale)


def test_off_policy_each_loss_has_a_gradient_of_its_own(trial):
    options = {"reward_fn": spread, "weight_sync_interval": 0, "learning_rate": 1e-2, "max_rows": 4}
    losses = (*POLICY_LOSSES, "cispo_mask")
    norms = {
        loss: trial(**options, policy_loss=loss).records()[1]["train/grad_norm"] for loss in losses
    }

    # Both weigh by the ratio to the sampler's policy, unbounded.
    assert norms.pop("reinforce") == pytest.approx(norms["importance_sampling"], rel=1e-3)
    # On so few tokens the bounds of grpo, dapo and cispo_mask stop the same ones.
    assert len({round(norm, 3) for norm in norms.values()}) >= len(norms) - 2


def test_stale_minibatches_need_no_logprobs_of_the_policy_before_the_step(trial):
    run = trial(reward_fn=spread, weight_sync_interval=0, ppo_n_minibatches=2, max_rows=4)

    lines = (run.folder / "metrics.jsonl").read_bytes().splitlines()
    forwards = ["perf/old_policy_forward_time" in line for line in map(orjson.loads, lines)]
    assert forwards == [True, False]


def test_tis_corrects_for_the_age_of_samples_instead_where_it_is_on(trial):
    run = trial(
        reward_fn=spread, weight_sync_interval=0, learning_rate=1e-2, tis_enabled=True, max_rows=4
    )

    for record in run.records():
        assert record["train/ppo_ratio_mean"] == 1.0
    assert abs(run.records()[1]["train/tis/weight_mean"] - 1.0) > 1e-3


def test_a_ratio_that_nothing_bounds_is_said_where_samples_may_be_older(trial, caplog):
    trial(policy_loss="importance_sampling", reward_fn=spread, weight_sync_interval=2, max_rows=4)
    assert "weighs samples of older weights by a ratio that nothing bounds" in caplog.text

    caplog.clear()
    bounded = {"policy_loss": "importance_sampling", "ratio_max": 10.0, "max_rows": 4}
    run = trial(**bounded, reward_fn=spread, weight_sync_interval=2)
    assert "nothing bounds" not in caplog.text
    assert "train/is_clip_frac" in run.records()[0]


@pytest.mark.parametrize("first", [700, 20_000, 0], ids=["usual", "rarer", "off"])
def test_the_collector_looks_at_less_during_a_run_and_at_everything_after_it(trial, first):
    usual, frozen = gc.get_threshold(), []

    def reward(text, row):
        frozen.append((gc.get_freeze_count(), gc.get_threshold()[0]))
        return spread(text, row)

    gc.set_threshold(first)
    try:
        trial(reward_fn=reward, max_rows=2)
        after = gc.get_threshold()[0]
    finally:
        gc.set_threshold(*usual)

    assert all(count > 100_000 for count, _ in frozen)
    assert {threshold for _, threshold in frozen} == {5_000 if first == 700 else first}
    assert (gc.get_freeze_count(), after) == (0, first)


def test_the_first_step_is_on_policy_and_the_kl_to_the_reference_grows_from_then_on(trial):
    first, *_, last = trial(reward_fn=spread, kl_beta=0.1, learning_rate=5e-3).records()

    assert first["train/mean_kl"] == pytest.approx(0.0, abs=1e-6)
    assert first["train/inference_diff"] < 1e-5
    assert first["train/ppo_clip_frac"] == 0.0
    assert last["train/ref_kl"] > 1e-4


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_a_run_without_a_name_for_its_model_leaves_a_whole_one_and_says_where(
    trial, capsys, lora_rank
):
    run = trial(
        output_model_id=None,
        reward_fn=spread,
        lora_rank=lora_rank,
        lora_alpha=16.0,
        lora_targets=["attn"],
        eval_dataset=str(TRAIN_ROWS),
        eval_rows=4,
    )

    model = run.folder / "models" / "final"
    assert run.summary.model_path == model
    first, last = (run.records("eval")[place]["eval/reward"] for place in (0, -1))
    lines = capsys.readouterr().out.splitlines()
    assert f"  model              {model}" in lines
    assert f"  held-out reward    {first:.3f} -> {last:.3f}" in lines
    assert (f"  talk to it         hearth chat {run.folder}" in lines) == (lora_rank == 0)
    assert lines[-1] == f"  look at it         hearth view {run.folder}"
    card = (model / "README.md").read_text()
    assert f"held-out reward | {first:.3f} -> {last:.3f} |" in card
    assert "| steps | 4 |" in card
    assert str(run.folder.parent) not in card
    if lora_rank:
        adapter = orjson.loads((model / "adapter_config.json").read_bytes())
        assert adapter["lora_alpha"] == 16
        assert {name.rsplit(".", 1)[-1] for name in adapter["target_modules"]} == {
            *("q_proj", "k_proj", "v_proj", "o_proj")
        }
    files = {path.name for path in model.iterdir()}
    own = {"adapter_config.json"} if lora_rank else {"config.json", "generation_config.json"}
    assert files >= own | {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}


def test_a_lora_policy_trains_and_exports_a_merged_model(trial):
    run = trial(lora_rank=4, reward_fn=spread, kl_beta=0.01, learning_rate=1e-2, merge_adapter=True)

    changed = find_changed(run.weights())
    assert run.summary.reference_job_id is None
    assert any("q_proj" in name for name in changed)
    assert not any("norm" in name for name in changed)
    assert run.records()[1]["train/inference_diff"] < 1e-5


@pytest.mark.parametrize("policy_loss", [name for name in POLICY_LOSSES if name != "reinforce"])
def test_the_trainers_own_loss_and_the_clients_closure_take_the_same_step(trial, policy_loss):
    common = {"policy_loss": policy_loss, "reward_fn": spread, "max_rows": 4}
    common |= {"tis_enabled": True, "tis": TISConfig(cap=1.0), "eps": 1e-2}

    client = trial(loss_path="client", **common)
    builtin = trial(loss_path="builtin", **common)

    assert measure_difference(client.weights(), builtin.weights()) < 1e-3


def test_the_trainers_own_loss_goes_backward_through_the_pass_that_scored_the_policy(
    trial, monkeypatch
):
    passes = []
    states = TargetScorer.states
    # Counts passes through the layers, which no result shows; the pass itself runs.
    monkeypatch.setattr(
        TargetScorer, "states", lambda self, batch: passes.append(batch) or states(self, batch)
    )

    run = trial(loss_path="builtin", reward_fn=spread, max_rows=4)

    assert run.summary.steps == 2
    assert len(passes) == 2


def test_training_in_pieces_takes_the_same_step_as_in_one(trial):
    # A large eps keeps Adam from blowing rounding in a near-zero gradient up to a whole step.
    common = {"reward_fn": spread, "max_rows": 4, "prompt_groups_per_step": 4, "eps": 1e-2}

    whole = trial(**common)
    pieces = trial(min_samples_per_fwd_bwd=4, max_samples_per_fwd_bwd=4, **common)

    assert pieces.records()[0]["rollout/fwd_bwd_count"] == 4.0
    assert measure_difference(whole.weights(), pieces.weights()) < 1e-3


def test_bfloat16_trains_on_float32_master_weights(trial):
    run = trial(trainer=TrainerConfig(dtype="bfloat16"), reward_fn=spread, learning_rate=1e-4)

    assert run.summary.steps == 4
    assert find_changed(run.weights())
    assert {weight.dtype for weight in run.weights().values()} == {torch.bfloat16}
    # Trainer and sampler round the same way, so they agree far below bfloat16's own precision.
    assert run.records()[0]["train/inference_diff"] < 1e-2


def test_temperature_scales_policy_and_sampler_alike(trial):
    run = trial(temperature=0.7, reward_fn=spread)

    assert run.records()[0]["train/inference_diff"] < 1e-5


@pytest.mark.parametrize("interval", [1, 3, 0])
def test_every_row_is_trained_exactly_once(trial, rows, interval):
    run = trial(weight_sync_interval=interval, reward_fn=spread, rows=rows[:7], epochs=2)

    assert run.summary.rows == 14
    assert set(Counter(run.rewarded).values()) == {4 * 2}
    assert run.summary.steps == {1: 7, 3: 7, 0: 7}[interval]


async def test_a_notebooks_loop_is_held_up_by_a_run_until_its_stop_button_ends_it(trial, tmp_path):
    assert trial(reward_fn=spread, max_rows=2).summary.steps == 1

    def press_stop(text, row):
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        return spread(text, row)

    with pytest.raises(KeyboardInterrupt):
        trial(reward_fn=press_stop, folder="stopped", epochs=10_000)
    with hold_log_path(tmp_path / "stopped"):
        pass


async def test_a_cancelled_task_ends_its_run_and_frees_the_folder(tmp_path):
    loop, begun = asyncio.get_running_loop(), asyncio.Event()

    def reward(text, row):
        loop.call_soon_threadsafe(begun.set)
        return spread(text, row)

    run = asyncio.create_task(
        run_async(main, config(tmp_path, epochs=10_000, try_reward=False), reward_fn=reward)
    )
    await begun.wait()
    run.cancel()

    with pytest.raises(asyncio.CancelledError):
        await run
    with hold_log_path(tmp_path):
        pass


def test_an_error_of_a_reward_shows_the_users_lines_and_what_it_was_called_for(tmp_path, rows):
    def reward(text, row):
        return float(row["truth"])

    with pytest.raises(KeyError) as failed:
        main(config(tmp_path, try_reward=False), [*rows[:2]], reward_fn=reward)

    frames = [frame.f_code.co_name for frame, _ in traceback.walk_tb(failed.value.__traceback__)]
    assert frames == [failed.traceback[0].name, "run", "reward"]
    assert "in reward_fn reward, called for the completion" in failed.value.__notes__[0]
    assert "and rows[0], {'messages': [" in failed.value.__notes__[0]


def test_a_users_mistake_has_no_frames_of_the_recipe(tmp_path):
    with pytest.raises(
        ConfigError, match=r"rows\[0\]: messages must be a non-empty list"
    ) as refused:
        main(config(tmp_path / "run"), rows=[{"prompt": "hi"}])

    assert len(refused.traceback) == 2
    assert not (tmp_path / "run").exists()


def test_a_missing_tokenizer_folder_is_named_before_anything_is_lost(trial, tmp_path):
    with pytest.raises(ConfigError, match=r"deployment\.tokenizer_model must be"):
        trial(deployment=DeployConfig(tokenizer_model="./no-such-folder"), folder="refused")
    assert not (tmp_path / "refused").exists()


def test_a_missing_model_folder_is_named(trial):
    with pytest.raises(ConfigError, match="base_model must be an existing folder"):
        trial(base_model="./no-such-folder")


def test_a_prompt_that_is_too_long_is_dropped_and_counted(trial, rows):
    long = {"messages": [{"role": "user", "content": "1 + " * 200}], "ground_truth": "1"}

    run = trial(rows=[rows[0], long], reward_fn=spread)

    assert run.records()[0]["rollout/dropped/overlong_prompt"] == 1.0


def test_the_run_leaves_its_config(trial):
    run = trial(reward_fn=spread, max_rows=2)

    saved = orjson.loads((run.folder / "config.json").read_bytes())
    assert saved["policy_loss"] == "grpo"
    assert saved["deployment"]["tokenizer_model"] == str(MODEL)
