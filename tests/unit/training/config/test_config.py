import dataclasses
import math
import re

import orjson
import pytest

from hearth.errors import ConfigError
from training.config.parts import own_config, plain_config
from training.recipes.rl_loop import Config
from training.utils import (
    CISPOConfig,
    DAPOConfig,
    DeployConfig,
    DROConfig,
    GSPOConfig,
    HotloadConfig,
    InfraConfig,
    ISConfig,
    ResumeConfig,
    TISConfig,
    TrainerConfig,
    WandBConfig,
    WeightSyncConfig,
)


def config(**changes) -> Config:
    return Config(deployment=DeployConfig(tokenizer_model="Qwen/Qwen3-8B"), **changes)


DOCUMENTED_DEFAULTS = {
    "base_model": "accounts/fireworks/models/qwen3-8b",
    "learning_rate": 1e-5,
    "kl_beta": 0.001,
    "completions_per_prompt": 4,
    "max_completion_tokens": 1024,
    "temperature": 1.0,
    "epochs": 1,
    "max_rows": None,
    "max_seq_len": 4096,
    "lora_rank": 0,
    "prompt_groups_per_step": 1,
    "min_samples_per_fwd_bwd": None,
    "max_samples_per_fwd_bwd": 256,
    "max_concurrent": 32,
    "policy_loss": "grpo",
    "tis_enabled": False,
    "router_replay": False,
    "weight_sync_interval": 1,
    "dcp_save_interval": 0,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
    "weight_decay": 0.01,
}


@pytest.mark.parametrize(("name", "value"), DOCUMENTED_DEFAULTS.items())
def test_defaults_are_the_documents(name, value):
    assert getattr(Config(), name) == value


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("infra", InfraConfig),
        ("deployment", DeployConfig),
        ("hotload", HotloadConfig),
        ("weight_sync", WeightSyncConfig),
        ("wandb", WandBConfig),
        ("resume", ResumeConfig),
        ("tis", TISConfig),
        ("dapo", DAPOConfig),
        ("gspo", GSPOConfig),
        ("cispo", CISPOConfig),
        ("dro", DROConfig),
        ("trainer", TrainerConfig),
    ],
)
def test_every_config_has_its_sub_configs(name, kind):
    assert isinstance(getattr(Config(), name), kind)


def test_the_dataset_default_is_a_url():
    assert Config().dataset.startswith("https://")


def test_three_generations_of_the_interval_mean_the_same():
    generations = [
        config(weight_sync_interval=3),
        config(weight_sync=WeightSyncConfig(weight_sync_interval=3)),
        config(hotload=HotloadConfig(hot_load_interval=3)),
        config(weight_sync_interval=3, hotload=HotloadConfig(hot_load_interval=3)),
    ]

    assert [generation.sync.interval for generation in generations] == [3, 3, 3, 3]
    assert config().sync.interval == 1


@pytest.mark.parametrize("given", [1, 2], ids=["equal to the default", "not the default"])
def test_two_generations_with_different_values_are_an_error_that_names_both(given):
    both = config(weight_sync_interval=given, hotload=HotloadConfig(hot_load_interval=4))

    with pytest.raises(ConfigError, match=r"weight_sync_interval and hotload\.hot_load_interval"):
        both.validate()


def test_the_older_name_of_tis_sets_its_cap():
    assert ISConfig(clip_high=3.0).cap == 3.0
    assert ISConfig().cap == TISConfig().cap == 2.0


PROBLEMS = [
    ({"policy_loss": "ppo2"}, "policy_loss must be one of .*'grpo'.*'cispo'.*got 'ppo2'"),
    ({"completions_per_prompt": 1}, "completions_per_prompt must be >= 2, got 1"),
    ({"deployment": DeployConfig()}, "deployment.tokenizer_model must be"),
    ({"learning_rate": 0.0}, "learning_rate must be > 0"),
    ({"learning_rate": -1.0}, "learning_rate must be > 0"),
    ({"learning_rate": math.nan}, "learning_rate must be > 0"),
    ({"temperature": 0.0}, "temperature must be > 0"),
    ({"kl_beta": -1.0}, "kl_beta must be >= 0"),
    ({"weight_sync_interval": -1}, "weight_sync_interval must be >= 0"),
    ({"max_samples_per_fwd_bwd": 0}, "max_samples_per_fwd_bwd must be >= 1, got 0"),
    ({"min_samples_per_fwd_bwd": 300}, "min_samples_per_fwd_bwd must lie between 1 and"),
    ({"loss_path": "server"}, r"loss_path must be one of \['client', 'builtin'\], got 'server'"),
    ({"grad_accumulation_normalization": "tokens"}, "grad_accumulation_normalization must be one"),
    (
        {
            "first_checkpoint_type": "direct",
            "weight_sync": WeightSyncConfig(first_checkpoint_type="delta"),
        },
        "first_checkpoint_type and weight_sync.first_checkpoint_type must agree",
    ),
    ({"placement": "cloud"}, r"placement must be one of .*'ray'\], got 'cloud'"),
    (
        {"weight_sync": WeightSyncConfig(first_checkpoint_type="full")},
        r"weight_sync.first_checkpoint_type must be one of .*'direct', 'merged_base'\], got 'full'",
    ),
    (
        {"first_checkpoint_type": "merged_base"},
        "lora_rank must be > 0 where first_checkpoint_type is 'merged_base', got 0",
    ),
    (
        {"lora_rank": 4, "weight_sync": WeightSyncConfig(first_checkpoint_type="direct")},
        "first_checkpoint_type must be 'base' or 'merged_base' for an adapter, got 'direct'",
    ),
    (
        {"deployment": DeployConfig(tokenizer_model="t", weight_sync_scope="PER_DEPLOYMENT")},
        r"deployment.weight_sync_scope must be one of \['per_trainer', 'per_deployment'\], got "
        "'PER_DEPLOYMENT'",
    ),
    (
        {"deployment": DeployConfig(tokenizer_model="t", engine="sglang")},
        r"deployment.engine must be one of \['embedded', 'vllm', None\], got 'sglang'",
    ),
    ({"trainer": TrainerConfig(dtype="fp8")}, "trainer.dtype must be one of .*, got 'fp8'"),
    ({"tis": TISConfig(level="word"), "tis_enabled": True}, "^tis.level must be one of .*'word'$"),
    ({"completions_per_prompt": "4"}, "^completions_per_prompt must be a whole number, got '4'$"),
    ({"max_concurrent": True}, "^max_concurrent must be a whole number, got True$"),
    ({"weight_sync_interval": 1.5}, "^weight_sync_interval must be a whole number, got 1.5$"),
    ({"learning_rate": None}, "^learning_rate must be a number, got None$"),
    ({"kl_target": "low"}, "^kl_target must be a number or None, got 'low'$"),
    ({"shuffle": 1}, "^shuffle must be True or False, got 1$"),
    ({"dataset": None}, "^dataset must be a text, got None$"),
    ({"infra": InfraConfig}, "^infra must be of type InfraConfig, got <class"),
    (
        {"deployment": {"tokenizer_model": "t"}},
        "^deployment must be of type DeployConfig, got {'tokenizer_model': 't'}$",
    ),
    (
        {"weight_sync": WeightSyncConfig(weight_sync_timeout="600")},
        "^weight_sync.weight_sync_timeout must be a number, got '600'$",
    ),
    (
        {"deployment": DeployConfig(tokenizer_model="t", sample_timeout=0)},
        "^deployment.sample_timeout must be > 0 seconds, got 0$",
    ),
    (
        {"deployment": DeployConfig(tokenizer_model="t", max_batch_size=0)},
        "^deployment.max_batch_size must be >= 1, got 0$",
    ),
    ({"infra": InfraConfig(node_count=2)}, "infra.node_count must be 1 or None, got 2"),
    (
        {"infra": InfraConfig(accelerator_count=8)},
        "infra.accelerator_count must be 1 or None, got 8: .* trainer.ranks",
    ),
    (
        {"infra": InfraConfig(trainer_replica_count=0)},
        "infra.trainer_replica_count must be 1 or None, got 0",
    ),
    ({"min_samples_per_fwd_bwd": 0}, "min_samples_per_fwd_bwd must lie between 1 and"),
    (
        {"min_samples_per_fwd_bwd": 4, "ppo_n_minibatches": 2},
        "min_samples_per_fwd_bwd must be None with ppo_n_minibatches",
    ),
    ({"loss_path": "builtin"}, "kl_beta must be 0 with loss_path='builtin'"),
    ({"output_model_id": "A" * 64}, "output_model_id must be 1 to 63 characters"),
    ({"policy_loss": "dapo", "dapo": DAPOConfig(eps_clip_c=0.5)}, "eps_clip_c"),
    ({"tis_enabled": True, "tis": TISConfig(cap=-1.0)}, "cap"),
    ({"epochs": 0}, "epochs must be >= 1"),
    ({"base_model": ""}, "base_model must be"),
]


@pytest.mark.parametrize(
    ("changes", "message"), PROBLEMS, ids=[" ".join(changes) for changes, _ in PROBLEMS]
)
def test_a_wrong_value_is_named_with_its_rule(changes, message):
    changed = dataclasses.replace(config(), **changes)

    with pytest.raises(ValueError, match=message):
        changed.validate()


def test_all_problems_are_reported_at_once():
    with pytest.raises(ConfigError, match="3 problems") as failure:
        config(completions_per_prompt=1, epochs=0, policy_loss="x").validate()

    assert str(failure.value).count("\n  - ") == 3


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({}, True),
        ({"kl_beta": 0.0}, False),
        ({"kl_beta": 0.0, "infra": InfraConfig(ref_training_shape_id="s")}, True),
        ({"kl_beta": 0.0, "trainer": TrainerConfig(reference_training_shape_id="s")}, True),
        ({"kl_beta": 0.0, "trainer": TrainerConfig(reference_job_id="j")}, True),
    ],
    ids=["kl", "no kl", "infra shape", "trainer shape", "job"],
)
def test_a_reference_exists_when_kl_or_a_shape_asks_for_it(changes, needed):
    assert config(**changes).needs_reference is needed


def test_the_documents_examples_build():
    shape = "accounts/fireworks/trainingShapes/qwen3-8b-128k-h200"

    document_001 = Config(
        log_path="./grpo_logs",
        base_model="accounts/fireworks/models/qwen3-8b",
        dataset="/path/to/gsm8k.jsonl",
        max_rows=200,
        epochs=1,
        completions_per_prompt=4,
        max_completion_tokens=1024,
        temperature=1.0,
        max_seq_len=4096,
        policy_loss="grpo",
        infra=InfraConfig(training_shape_id=shape, ref_training_shape_id=f"{shape}-forward"),
        deployment=DeployConfig(deployment_id="grpo-serving", tokenizer_model="Qwen/Qwen3-8B"),
        weight_sync=WeightSyncConfig(weight_sync_interval=1),
        wandb=WandBConfig(entity="my-team", project="grpo-experiment"),
    )
    document_004 = Config(
        log_path="./grpo_logs",
        policy_loss="grpo",
        trainer=TrainerConfig(training_shape_id=shape),
        deployment=DeployConfig(deployment_id="grpo-serving", tokenizer_model="Qwen/Qwen3-8B"),
        weight_sync_interval=1,
    )

    document_001.validate()
    document_004.validate()
    assert document_001.needs_reference


def test_a_config_becomes_json():
    content = orjson.loads(orjson.dumps(plain_config(config())))

    assert content["weight_sync_interval"] == 1
    assert content["weight_sync_timeout"] == 600.0
    assert content["hotload"]["hot_load_timeout"] == 600.0


def test_older_spellings_are_in_config_json_only_where_they_are_used():
    unused = own_config(Config())
    used = own_config(Config(hotload=HotloadConfig(hot_load_interval=2)))

    assert {"infra", "weight_sync", "hotload", "rollout_workers"}.isdisjoint(unused)
    assert used["hotload"]["hot_load_interval"] == 2
    assert "infra" not in used


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora_alpha": 0.0}, "lora_alpha must be > 0, got 0.0"),
        ({"lora_targets": []}, "lora_targets must be one or more of"),
        ({"lora_targets": ["q_proj"]}, "lora_targets must be one or more of"),
        ({"max_rows": 0}, "max_rows must be >= 1 or None, got 0"),
    ],
)
def test_adapters_and_rows_have_rules(changes, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        Config(deployment=DeployConfig(tokenizer_model="x"), **changes).validate()
