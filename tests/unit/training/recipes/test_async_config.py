import dataclasses
import logging
import math
from pathlib import Path
from typing import Any

import orjson
import pytest
from tests.unit.tiny import write_tokenizer
from tests.unit.training.trial_rollouts import config_of

from hearth.errors import ConfigError
from hearth.losses import POLICY_LOSSES, TIS
from training.config.objective import tis_options
from training.config.parts import plain_config
from training.config.recipe import RecipeConfig
from training.data.given_rows import choose_rows
from training.recipes import rl_loop
from training.recipes.async_rl_loop import Config, main
from training.samples.rollout import RolloutFn, RolloutSetup
from training.utils import (
    DeployConfig,
    HotloadConfig,
    ResumeConfig,
    TrainerConfig,
    WandBConfig,
    WeightSyncConfig,
)

# Defaults.

DEFAULTS = {
    "dataset": "",
    "shuffle": True,
    "seed": 0,
    "max_head_offpolicy_versions": 0,
    "synchronous_training": False,
    "max_concurrency_rollout_sample": None,
    "fifo_slack": None,
    "late_row_wait_s": None,
    "in_flight_weight_updates": False,
    "min_group_size": 1,
    "rollout_timeout_s": 1800.0,
    "rollout_retries": 2,
    "rollout_extras": {},
    "stall_timeout_s": 3600.0,
    "tis_enabled": None,
    "ppo_n_minibatches": 1,
    "policy_loss": "grpo",
    "kl_beta": 0.001,
    "completions_per_prompt": 4,
    "dcp_save_interval": 0,
    "weight_sync_interval": 1,
}


@pytest.mark.parametrize(("name", "value"), DEFAULTS.items())
def test_defaults_are_the_documents(name, value):
    assert getattr(Config(), name) == value


def test_what_all_recipes_share_has_one_default_in_all_of_them():
    own = {"log_path", "dataset", "shuffle", "truncated_completions"}
    for shared in dataclasses.fields(RecipeConfig):
        if shared.name not in own:
            assert getattr(Config(), shared.name) == getattr(rl_loop.Config(), shared.name)


def test_t146_the_config_knows_no_reward_function():
    assert not [field.name for field in dataclasses.fields(Config) if "reward" in field.name]


def test_the_documents_example_is_valid():
    config = Config(
        log_path="./gsm8k_logs",
        base_model="accounts/fireworks/models/qwen3-8b",
        learning_rate=1.7e-5,
        completions_per_prompt=8,
        prompt_groups_per_step=8,
        policy_loss="grpo",
        max_head_offpolicy_versions=4,
        trainer=TrainerConfig(
            training_shape_id="accounts/fireworks/trainingShapes/qwen3-8b-128k-h200"
        ),
        deployment=DeployConfig(tokenizer_model="Qwen/Qwen3-8B"),
        wandb=WandBConfig(entity="my-team", project="gsm8k-rl"),
    )

    config.validate()
    assert config.max_concurrent == 5 * 64
    content = orjson.loads(orjson.dumps(plain_config(config)))
    given = {
        "log_path": "./gsm8k_logs",
        "base_model": "accounts/fireworks/models/qwen3-8b",
        "learning_rate": 1.7e-5,
        "completions_per_prompt": 8,
        "prompt_groups_per_step": 8,
        "policy_loss": "grpo",
        "max_head_offpolicy_versions": 4,
    }
    assert {name: content[name] for name in given} == given
    assert content["trainer"]["training_shape_id"].endswith("/qwen3-8b-128k-h200")
    assert content["deployment"]["tokenizer_model"] == "Qwen/Qwen3-8B"
    assert (content["wandb"]["entity"], content["wandb"]["project"]) == ("my-team", "gsm8k-rl")


@pytest.mark.parametrize("late", range(5))
def test_t150_raising_o_changes_one_field(late):
    dataclasses.replace(config_of(), max_head_offpolicy_versions=late).validate()


@pytest.mark.parametrize(
    ("options", "is_off_policy"),
    [
        ({}, False),
        ({"max_head_offpolicy_versions": 1}, True),
        ({"max_head_offpolicy_versions": 1, "synchronous_training": True}, False),
        ({"in_flight_weight_updates": True}, True),
    ],
)
def test_samples_are_weighted_where_they_may_be_off_policy(options, is_off_policy):
    config = config_of(**options)

    assert (config.is_off_policy, config.uses_tis) == (is_off_policy, is_off_policy)
    assert tis_options(config) == (TIS(cap=2.0) if is_off_policy else None)
    assert config_of(**options, tis_enabled=True).uses_tis
    assert not config_of(**options, tis_enabled=False).uses_tis


# Rules.

PROBLEMS = [
    ({"max_head_offpolicy_versions": -1}, "max_head_offpolicy_versions must be >= 0, got -1"),
    (
        {"max_head_offpolicy_versions": -1, "synchronous_training": True},
        "max_head_offpolicy_versions must be >= 0, got -1",
    ),
    (
        {"max_concurrency_rollout_sample": 1},
        r"max_concurrency_rollout_sample must be None or >= completions_per_prompt \(2\), got 1",
    ),
    ({"max_concurrency_rollout_sample": 0}, "max_concurrency_rollout_sample must be .*, got 0"),
    ({"fifo_slack": 3}, r"fifo_slack must be None or between 0 and .* \(2\), got 3"),
    ({"fifo_slack": -1}, "fifo_slack must be None or between 0 and .*, got -1"),
    ({"prompt_groups_per_step": 0}, "prompt_groups_per_step must be >= 1, got 0"),
    ({"completions_per_prompt": 1}, "completions_per_prompt must be >= 2, got 1"),
    ({"min_group_size": 0}, r"min_group_size must lie between 1 and .* \(2\), got 0"),
    ({"min_group_size": 3}, r"min_group_size must lie between 1 and .* \(2\), got 3"),
    ({"rollout_retries": -1}, "rollout_retries must be >= 0, got -1"),
    ({"rollout_timeout_s": 0.0}, r"rollout_timeout_s must be > 0 seconds, got 0\.0"),
    ({"rollout_timeout_s": math.nan}, "rollout_timeout_s must be > 0 seconds, got nan"),
    ({"stall_timeout_s": -5.0}, r"stall_timeout_s must be > 0 seconds, got -5\.0"),
    ({"late_row_wait_s": -0.5}, r"late_row_wait_s must be >= 0 seconds or None, got -0\.5"),
    ({"late_row_wait_s": math.nan}, "late_row_wait_s must be >= 0 seconds or None, got nan"),
    (
        {"rollout_extras": {"judge": int}},
        r"rollout_extras must be plain values, got \{'judge': <class .*close over anything else",
    ),
    ({"weight_sync_interval": 2}, "weight_sync_interval must be 1, got 2: versions are counted"),
    ({"weight_sync_interval": 0}, "weight_sync_interval must be 1, got 0: .*raise max_head_offp"),
    (
        {"weight_sync": WeightSyncConfig(weight_sync_interval=3)},
        "weight_sync_interval must be 1, got 3",
    ),
    ({"hotload": HotloadConfig(hot_load_interval=4)}, "weight_sync_interval must be 1, got 4"),
    # Two of those that all recipes share: test_config.py has the others.
    ({"policy_loss": "ppo2"}, "policy_loss must be one of .*, got 'ppo2'"),
    ({"ppo_n_minibatches": 0}, "ppo_n_minibatches must be >= 1, got 0"),
    (
        {"weight_sync_interval": 1, "hotload": HotloadConfig(hot_load_interval=2)},
        r"weight_sync_interval and hotload\.hot_load_interval",
    ),
]


@pytest.mark.parametrize(("changes", "message"), PROBLEMS, ids=[str(case) for case, _ in PROBLEMS])
def test_a_wrong_value_is_named_once_with_its_rule(changes, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        config_of(**changes).validate()


def test_all_problems_are_reported_at_once():
    config = config_of(zero_gradient_steps="never", ratio_max=2.0, rollout_retries=-1, epochs=0)

    with pytest.raises(ConfigError, match="the config has 4 problems") as failure:
        config.validate()

    assert str(failure.value).count("\n  - ") == 4


@pytest.mark.parametrize(
    "changes",
    [
        {"max_concurrency_rollout_sample": 2},
        {"fifo_slack": 0},
        {"fifo_slack": 2},
        {"min_group_size": 2},
        {"rollout_timeout_s": None},
        {"late_row_wait_s": 0.0},
        {"rollout_extras": {"url": "http://judge", "weights": [0.5, None]}},
        {"weight_sync": WeightSyncConfig(weight_sync_interval=1)},
        {"ppo_n_minibatches": 4},
        {"rollout_retries": 0},
        {"synchronous_training": True},
    ],
    ids=str,
)
def test_what_lies_on_the_edge_is_allowed(changes):
    config_of(**changes).validate()


OFF_POLICY = [{"max_head_offpolicy_versions": 2}, {"in_flight_weight_updates": True}]


@pytest.mark.parametrize("options", OFF_POLICY, ids=str)
@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_tis_corrects_off_policy_where_a_loss_has_no_ratio_to_the_sampler(options, loss):
    has_ratio = loss in ("importance_sampling", "reinforce")

    assert config_of(policy_loss=loss, **options).uses_tis == (not has_ratio)
    assert config_of(policy_loss=loss, tis_enabled=True, **options).uses_tis
    assert not config_of(policy_loss=loss, tis_enabled=False, **options).uses_tis
    assert not config_of(policy_loss=loss).uses_tis
    for config in (config_of(policy_loss=loss, **options), config_of(policy_loss=loss)):
        config.validate()


# Rows.


def test_t156_rows_come_from_main_or_from_the_dataset(tmp_path):
    dataset = tmp_path / "rows.jsonl"
    dataset.write_text('{"n": 0}\n\n{"n": 1}\n{"n": 2}\n')
    given = [{"prompt_token_ids": [1, 2]}] * 200

    assert choose_rows(config_of(dataset=str(dataset), max_rows=2), None) == [{"n": 0}, {"n": 1}]
    # Given rows come first, and max_rows does not cut them.
    assert choose_rows(config_of(dataset=str(dataset), max_rows=2), given) == given


BAD_ROWS = [
    (None, "rows must be given where config.dataset is empty, got neither"),
    ([], r"rows must hold at least one row, got \[\]"),
    ([{"n": 0}, ["n", 1]], r"rows\[1\] must be a JSON object, got \['n', 1\]"),
    (["one", "two"], r"rows\[0\] must be a JSON object, got 'one'"),
    ([{"n": 0}, None], r"rows\[1\] must be a JSON object, got None"),
]


@pytest.mark.parametrize(("rows", "message"), BAD_ROWS, ids=[str(case) for case, _ in BAD_ROWS])
def test_t156_rows_that_cannot_be_trained_on_are_refused(rows, message):
    with pytest.raises(ValueError, match=message):
        choose_rows(config_of(), rows)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1]\n", r"rows\.jsonl:1 must be a JSON object, got \[1\]"),
        ('{"n": 0}\n{"n"\n', r"rows\.jsonl:2 must be a JSON object"),
        ("\n", "dataset must hold at least one row"),
    ],
)
def test_a_dataset_that_holds_no_rows_names_its_line(tmp_path, content, message):
    dataset = tmp_path / "rows.jsonl"
    dataset.write_text(content)

    with pytest.raises(ConfigError, match=message):
        choose_rows(config_of(dataset=str(dataset)), None)


def test_rows_are_copied_and_need_no_messages():
    row = {"anything": 1}

    (checked,) = choose_rows(config_of(), [row])

    assert checked == row
    assert checked is not row


# The way into a run.


def never(_setup: RolloutSetup) -> RolloutFn:
    raise AssertionError("the factory must not be called")


ERRORS: list[tuple[dict[str, Any], Any, str]] = [
    ({"completions_per_prompt": 1}, [{}], "completions_per_prompt must be >= 2"),
    ({"weight_sync_interval": 3}, [{}], "weight_sync_interval must be 1"),
    ({"truncated_completions": "keep"}, [{}], "truncated_completions must be one of"),
    ({}, None, "rows must be given"),
    ({}, ["row"], r"rows\[0\] must be a JSON object"),
    ({"dataset": "/nowhere.jsonl"}, None, "dataset must be a JSONL, Parquet or CSV file"),
]


@pytest.mark.parametrize(
    ("changes", "rows", "message"), ERRORS, ids=[str(error[0]) for error in ERRORS]
)
def test_a_mistake_is_told_before_anything_is_started(tmp_path, changes, rows, message):
    folder = tmp_path / "run"

    with pytest.raises(ConfigError, match=message):
        main(config_of(log_path=str(folder), **changes), rollout_fn_factory=never, rows=rows)

    assert not folder.exists()


@pytest.fixture
def warnings(caplog) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING)
    return caplog


def run_that_cannot_resume(folder: Path) -> None:
    """Comes as far as a run does without a platform."""
    config = config_of(
        log_path=str(folder),
        deployment=DeployConfig(tokenizer_model=str(write_tokenizer(folder))),
        resume=ResumeConfig(resume_from="step-00001"),
    )
    with pytest.raises(ConfigError, match="resume_from"):
        main(config, rollout_fn_factory=never, rows=[{}])


def test_t138_a_run_says_once_that_the_recipe_is_experimental(tmp_path, warnings):
    run_that_cannot_resume(tmp_path / "run")

    logged = [
        message for message in warnings.messages if "async_rl_loop is experimental" in message
    ]
    assert len(logged) == 1
    assert "pin the version" in logged[0]


def test_t138_a_config_that_is_wrong_is_told_nothing_else(tmp_path, warnings):
    with pytest.raises(ConfigError):
        main(
            config_of(log_path=str(tmp_path / "run"), epochs=0), rollout_fn_factory=never, rows=[{}]
        )

    assert warnings.messages == []
