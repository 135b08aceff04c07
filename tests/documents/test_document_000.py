"""Document 000 has no code: the names that it gives exist, and what it promises of them holds."""

from __future__ import annotations

import asyncio
import importlib
import json
import re
from pathlib import Path

import httpx
import pytest
import tinker

from hearth.errors import HearthError
from hearth.sdk import (
    DeploymentManager,
    DeploymentSampler,
    FixedConcurrencyController,
    TrainerJobManager,
)
from training.quickstart import MODEL
from training.recipes.rl_loop import Config, main
from training.utils import DeployConfig, InfraConfig, ResourceCleanup, WeightSyncConfig
from training.utils.rl import build_grpo_datums, setup_infra

BASE = "accounts/fireworks/models/qwen3-8b"
REFERENCE_SHAPE = "accounts/fireworks/trainingShapes/qwen3-8b-128k-h200-forward"
KEY = "a-key"


def config(**changes) -> Config:
    return Config(**{"deployment": DeployConfig(tokenizer_model=str(MODEL))} | changes)


def test_it_has_no_code(document):
    assert document("000").snippets == ()


def test_the_modules_and_names_it_gives_exist(document):
    text = document("000").text
    dotted = set(re.findall(r"\btraining(?:\.\w+)+", text))
    files = set(re.findall(r"\btraining/[\w/]+\.py\b", text))
    assert (len(dotted), len(files)) == (1, 1)
    for path in dotted | {file.removesuffix(".py").replace("/", ".") for file in files}:
        module, _, name = path.rpartition(".")
        parent = importlib.import_module(module)
        assert hasattr(parent, name) or importlib.import_module(module)
    assert {"make_grpo_loss_fn", "build_grpo_datums"} <= set(
        dir(importlib.import_module("training.utils.rl"))
    )


def test_every_policy_loss_of_its_table_is_a_setting(document):
    names = re.findall(r'^"(\w+)" \|', document("000").text, re.MULTILINE)

    assert len(names) == 7
    for name in names:
        config(policy_loss=name).validate()
    assert Config().policy_loss == names[0]
    with pytest.raises(ValueError, match=re.escape(str(sorted(names)[0]))):
        config(policy_loss="ppg").validate()


def test_its_intervals_are_settings_and_one_is_the_default(document):
    table = document("000").text.split("weight_sync_interval | Behavior")[1]
    rows = re.findall(r"^(1 \(default\)|N > 1|0) \|", table, re.MULTILINE)

    assert len(rows) == 3
    assert Config().sync.interval == WeightSyncConfig().weight_sync_interval == 1
    for interval in (0, 1, 3):
        given = config(weight_sync=WeightSyncConfig(weight_sync_interval=interval))
        given.validate()
        assert given.sync.interval == interval


def test_dcp_checkpoints_are_off_where_a_config_says_so():
    assert WeightSyncConfig().dcp_save_interval == Config().sync.dcp_save_interval == 0
    given = config(weight_sync=WeightSyncConfig(dcp_save_interval=2))
    assert given.sync.dcp_save_interval == 2


def test_a_missing_tokenizer_is_a_value_error_before_anything_is_asked_for(platform):
    with pytest.raises(ValueError, match=r"deployment\.tokenizer_model"):
        main(Config(base_model=BASE))
    assert platform.states() == ([], [])


def test_a_reference_exists_when_its_shape_is_set_and_it_is_frozen():
    assert not config(kl_beta=0.0).needs_reference
    shape = InfraConfig(ref_training_shape_id=REFERENCE_SHAPE)
    assert config(kl_beta=0.0, infra=shape).needs_reference


@pytest.fixture(scope="module")
def wired(platform):
    """A LoRA policy, which shares its reference, and a deployment, inside their block."""
    trainers = TrainerJobManager(KEY, base_url=platform.url)
    deployments = DeploymentManager(KEY, base_url=platform.url)
    with ResourceCleanup(trainers, deployments) as cleanup:
        infra = setup_infra(
            rlor_mgr=trainers,
            deploy_mgr=deployments,
            base_model=BASE,
            lora_rank=4,
            deploy_cfg=DeployConfig(deployment_id="promises", tokenizer_model=str(MODEL)),
            needs_reference=True,
            api_key=KEY,
            cleanup=cleanup,
        )
        import transformers

        controller = FixedConcurrencyController(8)
        sampler = DeploymentSampler(
            deployments.inference_url,
            infra.inference_model,
            KEY,
            transformers.AutoTokenizer.from_pretrained(MODEL),
            concurrency_controller=controller,
        )
        yield infra, sampler, platform
        sampler.close()
    trainers.close()
    deployments.close()


def sample(sampler, n=3):
    messages = [{"role": "user", "content": "What is 20 + 22?"}]
    return sampler.sample_with_tokens(messages=messages, n=n, max_tokens=16, seed=1)


def test_synchronous_scripts_wrap_sampling_with_asyncio_run(wired):
    _, sampler, _ = wired

    first, second = (asyncio.run(sample(sampler)) for _ in range(2))

    assert [completion.full_tokens for completion in first] == [
        completion.full_tokens for completion in second
    ]
    assert len(first) == 3


def test_the_trainer_gives_one_logprob_less_than_tokens_and_inference_a_leading_none(wired):
    infra, sampler, platform = wired
    (completion,) = asyncio.run(sample(sampler, n=1))

    scored = infra.policy.forward(build_grpo_datums([completion]), "cross_entropy")
    answer = httpx.post(
        f"{platform.url}/inference/v1/completions",
        headers={"Authorization": f"Bearer {KEY}"},
        json={
            "model": infra.inference_model,
            "prompt": completion.full_tokens,
            "max_tokens": 0,
            "echo": True,
            "logprobs": 1,
        },
    )

    trainer = list(scored.loss_fn_outputs[0]["logprobs"].data)
    inference = answer.json()["choices"][0]["logprobs"]["token_logprobs"]
    assert len(trainer) == len(completion.full_tokens) - 1
    assert len(inference) == len(completion.full_tokens)
    assert inference[0] is None
    assert inference[1:] == pytest.approx(trainer, abs=1e-4)


def test_the_reference_is_shared_with_a_lora_policy_and_refuses_to_train(wired):
    infra, sampler, platform = wired
    datums = build_grpo_datums(asyncio.run(sample(sampler)))

    before = infra.reference.forward(datums, "cross_entropy").loss_fn_outputs
    infra.policy.forward_backward(datums, "cross_entropy")
    infra.policy.optim_step(tinker.AdamParams(learning_rate=1e-2))
    policy, reference = (
        [list(output["logprobs"].data) for output in client.forward(datums).loss_fn_outputs]
        for client in (infra.policy, infra.reference)
    )

    assert infra.reference_job_id is None
    assert len(platform.states()[0]) == 1
    assert reference == [list(value["logprobs"].data) for value in before]
    assert policy != reference
    with pytest.raises(HearthError, match="frozen"):
        infra.reference.optim_step(tinker.AdamParams(learning_rate=1e-2))


def test_the_catalog_maps_the_documents_names(platform):
    listed = httpx.get(f"{platform.url}/v1/{BASE}").json()
    assert listed["name"] == BASE
    assert json.loads((Path(MODEL) / "config.json").read_text())["model_type"] == "qwen3"
