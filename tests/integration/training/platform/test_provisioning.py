import itertools
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from tinker import AdamParams

from hearth.errors import ConfigError, EngineError, RequestFailedError
from hearth.sdk import DeploymentConfig, FiretitanServiceClient, TrainerJobConfig
from training.platform.provisioning import (
    deployment_config,
    request_deployment,
    request_trainer_job,
)
from training.platform.run_infra import check_platform, load_tokenizer
from training.platform.spec import InfraSpec, make_up_id
from training.quickstart import MODEL
from training.recipes.rl_loop import Config
from training.utils import (
    DeployConfig,
    InfraConfig,
    TrainerConfig,
    create_trainer_job,
    setup_deployment,
)

BASE = str(MODEL)
JOBS = "/v1/accounts/me/rlorTrainerJobs"
DEPLOYMENTS = "/v1/accounts/me/deployments"


def test_three_threads_provision_side_by_side_as_document_003_does(stage, datums):
    stage.wire.rule(f"POST ({JOBS}|{DEPLOYMENTS})$", delay_s=0.1)
    infra, deploy_cfg = InfraConfig(), stage.serving()
    before = asdict(infra), asdict(deploy_cfg)

    with ThreadPoolExecutor(max_workers=3) as pool:
        dep_fut = pool.submit(setup_deployment, stage.deployments, deploy_cfg, BASE, infra)
        pol_fut = pool.submit(
            create_trainer_job,
            stage.trainers,
            base_model=BASE,
            infra=infra,
            lora_rank=0,
            display_name="grpo-policy",
            hot_load_deployment_id="serving",
        )
        ref_fut = pool.submit(
            create_trainer_job,
            stage.trainers,
            base_model=BASE,
            infra=infra,
            lora_rank=0,
            display_name="grpo-reference",
            extra_args=["--forward-only", "--no-compile"],
        )
        deployment, policy, reference = dep_fut.result(), pol_fut.result(), ref_fut.result()

    assert stage.wire.most_in_flight("POST /v1") == 3
    assert (asdict(infra), asdict(deploy_cfg)) == before
    assert deployment.inference_model == "accounts/me/deployments/serving"
    asked = {
        request.body["displayName"]: request for request in stage.wire.requests(f"POST {JOBS}$")
    }
    assert asked["grpo-policy"].body["hotLoadDeploymentId"] == "serving"
    assert asked["grpo-policy"].body["forwardOnly"] is False
    assert asked["grpo-policy"].body["trainingConfig"]["learningRate"] > 0
    frozen = asked["grpo-reference"].body
    assert frozen["forwardOnly"] is True
    assert frozen["trainingConfig"]["extraArgs"] == ["--forward-only", "--no-compile"]
    assert list(stage.states().values()) == ["JOB_STATE_RUNNING"] * 2
    clients = [
        FiretitanServiceClient(endpoint.base_url, "key").create_training_client(
            base_model=BASE, lora_rank=0
        )
        for endpoint in (policy, reference)
    ]

    def score() -> list[list[float]]:
        outputs = [client.forward(datums(2), "cross_entropy").result() for client in clients]
        return [[row["logprobs"].data for row in output.loss_fn_outputs] for output in outputs]

    before, frozen_before = score()
    assert [len(row) for row in before] == [3, 4]
    assert before == frozen_before
    policy_client, reference_client = clients
    policy_client.forward_backward(datums(2), "cross_entropy").result()
    policy_client.optim_step(AdamParams(learning_rate=1e-3)).result()
    with pytest.raises(RequestFailedError, match="it only runs forward"):
        reference_client.optim_step(AdamParams(learning_rate=1e-3)).result()
    after, frozen_after = score()
    assert after != before
    assert frozen_after == frozen_before


def test_a_deployments_id_is_made_up_where_none_is_given(stage):
    info = setup_deployment(stage.deployments, stage.serving(None), BASE)

    assert info.deployment_id.startswith("model-")
    assert info.state == "READY"


@pytest.mark.parametrize(
    ("model", "start"),
    [
        ("accounts/fireworks/models/qwen3-0p6b", "qwen3-0p6b-"),
        ("Qwen/Qwen2.5_Coder", "qwen2-5-coder-"),
        ("/models/Übung/", "bung-"),
        ("x/" + "a" * 80, "a" * 40 + "-"),
        ("...", "model-"),
    ],
)
def test_a_made_up_id_is_a_name_that_platforms_take(model, start):
    config = DeploymentConfig(deployment_id=make_up_id(model, "0a1b2c3d"), base_model=model)

    config.validate()
    assert config.deployment_id == start + "0a1b2c3d"


def test_a_tokenizer_must_be_named_before_a_deployment_is_asked_for(stage):
    with pytest.raises(ConfigError, match=r"deployment\.tokenizer_model must be"):
        setup_deployment(stage.deployments, DeployConfig(deployment_id="d"), BASE)
    assert stage.wire.seen == []


OWN_TOKENIZER = """
from transformers import PreTrainedTokenizerFast


class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def own_tokenizer(tmp_path, monkeypatch):
    """A folder whose tokenizer comes with code of its own."""
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes((MODEL / "tokenizer.json").read_bytes())
    (folder / "tokenization_own.py").write_text(OWN_TOKENIZER)
    settings = {
        "tokenizer_class": "OwnTokenizer",
        "auto_map": {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    return str(folder)


def test_a_tokenizers_own_code_runs_only_where_it_is_trusted(own_tokenizer):
    refused = r"tokenizer_model must be .*custom code.*set deployment\.trust_remote_code=True"
    with pytest.raises(ConfigError, match=refused):
        load_tokenizer(DeployConfig(tokenizer_model=own_tokenizer))

    tokenizer = load_tokenizer(DeployConfig(tokenizer_model=own_tokenizer, trust_remote_code=True))

    assert type(tokenizer).__name__ == "OwnTokenizer"
    assert tokenizer.decode(tokenizer.encode("20 + 22")) == "20 + 22"


def test_a_deployment_at_zero_answers_again_after_setup(stage):
    setup_deployment(stage.deployments, stage.serving(), BASE)
    stage.deployments.scale_to_zero("serving")

    setup_deployment(stage.deployments, stage.serving(), BASE)

    assert stage.replicas() == {"serving": 1}
    assert stage.deployments.replica_state("serving", BASE) is not None


def test_a_failed_job_is_an_error_with_its_reason(stage, tmp_path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text('{"model_type": "qwen3"}')

    with pytest.raises(EngineError, match="JOB_STATE_FAILED: could not start"):
        create_trainer_job(stage.trainers, base_model=str(tmp_path / "broken"), infra=InfraConfig())


CONFIG = DeploymentConfig(deployment_id="serving", base_model=BASE, display_name="rl-1")
UNLABELLED = replace(CONFIG, display_name=None)
AT_ZERO = replace(CONFIG, min_replica_count=0, max_replica_count=0)
OURS = {
    "made here": (None, CONFIG, {}, True),
    "left by an earlier try of this run": (CONFIG, CONFIG, {}, True),
    "under an id of this run's own": (UNLABELLED, CONFIG, {"is_own_id": True}, True),
    "scaled to zero": (AT_ZERO, CONFIG, {}, True),
    "somebody else's": (replace(CONFIG, display_name="hers"), CONFIG, {}, False),
    "without a label": (UNLABELLED, CONFIG, {}, False),
    "both without a label": (UNLABELLED, UNLABELLED, {}, False),
}


@pytest.mark.parametrize(
    ("before", "config", "options", "is_scaled_down"), OURS.values(), ids=OURS.keys()
)
def test_a_run_scales_down_what_it_asked_for_itself(stage, before, config, options, is_scaled_down):
    if before is not None:
        stage.deployments.create_or_get(before)

    with stage.cleanup() as cleanup:
        request_deployment(stage.deployments, config, cleanup=cleanup, **options)
        assert stage.replicas() == {"serving": 1}

    assert stage.replicas() == {"serving": 0 if is_scaled_down else 1}


def test_a_job_is_known_to_the_cleanup_before_its_answer_comes(stage):
    stage.wire.rule(f"POST {JOBS}$", status=400, message="answer lost", after=True)

    with pytest.raises(ValueError, match="answer lost"), stage.cleanup() as cleanup:
        request_trainer_job(
            stage.trainers, InfraConfig(), TrainerJobConfig(base_model=BASE), cleanup
        )

    assert list(stage.states().values()) == ["JOB_STATE_CANCELLED"]


def make_config(**changes):
    return Config(base_model=BASE, deployment=DeployConfig(tokenizer_model=BASE), **changes)


def test_a_served_platform_needs_a_key(monkeypatch):
    config = make_config()
    monkeypatch.setenv("HEARTH_URL", "http://somewhere.test")
    monkeypatch.delenv("HEARTH_API_KEY", raising=False)
    monkeypatch.delenv("FIREWORKS_API_KEY", raising=False)

    with pytest.raises(ConfigError, match="HEARTH_API_KEY must be set"):
        check_platform(config)
    # The name that official clients read is read as well.
    monkeypatch.setenv("FIREWORKS_API_KEY", "x")
    check_platform(config)


def test_the_embedded_platform_has_no_jobs_to_attach_to(monkeypatch):
    monkeypatch.delenv("FIREWORKS_BASE_URL", raising=False)
    config = make_config(trainer=TrainerConfig(job_id="mine"))

    with pytest.raises(ConfigError, match="the embedded platform starts empty"):
        check_platform(config)


def test_two_generations_of_trainer_settings_must_agree():
    shape = "accounts/x/trainingShapes/y"
    for names in itertools.permutations(["a", "b"]):
        config = make_config(
            trainer=TrainerConfig(training_shape_id=f"{shape}-{names[0]}"),
            infra=InfraConfig(training_shape_id=f"{shape}-{names[1]}"),
        )
        with pytest.raises(ConfigError, match=r"trainer\.training_shape_id and infra\.training_sh"):
            InfraSpec.from_config(config)

    config = make_config(infra=InfraConfig(trainer_timeout_s=5.0, region="here"))
    merged = InfraSpec.from_config(config).infra
    assert (merged.trainer_timeout_s, merged.region) == (5.0, "here")


def test_the_same_run_gets_the_same_ids_and_another_run_others(tmp_path):
    def suffix(folder="a", **changes):
        config = make_config(log_path=str(tmp_path / folder), **changes)
        return InfraSpec.from_config(config).job_suffix

    others = [suffix("b"), suffix(lora_rank=4), suffix(max_seq_len=64), suffix(learning_rate=1.0)]
    assert suffix() == suffix(epochs=3)
    assert len({suffix(), *others}) == 5
    at_home = make_config(log_path="~/a"), make_config(log_path=str(Path.home() / "a"))
    assert len({InfraSpec.from_config(config).job_suffix for config in at_home}) == 1


def test_a_trainers_own_settings_are_asked_for_where_they_are_given():
    config = make_config(trainer=TrainerConfig(dtype="bfloat16", recompute_above=4096))

    values = InfraSpec.from_config(config).trainer_options

    assert values["dtype"] == "bfloat16"
    assert values["recompute_above"] == 4096
    assert "device" not in values


def test_a_deployment_says_its_engine_replicas_and_what_adapters_it_will_serve():
    asked = DeployConfig(
        tokenizer_model=BASE, engine="vllm", replicas=2, engine_options={"drain": "abort"}
    )
    spec = InfraSpec(
        base_model=BASE, deployment=asked, lora_rank=4, lora_options={"train_mlp": True}
    )
    config = deployment_config(spec)

    assert config.max_replica_count == 2
    assert config.extra_values == {
        "engine": "vllm",
        "engine_options": {"drain": "abort"},
        "lora_rank": 4,
        "train_mlp": True,
    }
    merged = deployment_config(replace(spec, merges_adapter=True)).extra_values
    assert merged == {"engine": "vllm", "engine_options": {"drain": "abort"}}
    plain = InfraSpec(base_model=BASE, deployment=DeployConfig(tokenizer_model=BASE))
    assert deployment_config(plain).extra_values is None


def test_a_deployment_without_replicas_is_refused():
    none = InfraSpec(base_model=BASE, deployment=DeployConfig(tokenizer_model=BASE, replicas=0))

    with pytest.raises(ConfigError, match=r"deployment.replicas must be >= 1, got 0"):
        deployment_config(none)
