import asyncio
import copy
from dataclasses import asdict

import pytest
import tinker
import torch

from hearth.errors import ConfigError, EngineError, ForwardOnlyError, NotFoundError
from hearth.sdk import DeploymentSampler, TrainingShapeProfile, WeightSyncer
from training.quickstart import MODEL
from training.utils import InfraConfig, TrainerConfig, WeightSyncScope
from training.utils.rl import build_grpo_datums, make_grpo_loss_fn

BASE = str(MODEL)
ADAM = tinker.AdamParams(learning_rate=1e-5, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01)
JOBS = "/v1/accounts/me/rlorTrainerJobs"
DEPLOYMENTS = "/v1/accounts/me/deployments"
TRAINER_CALLS = "POST /training/.*/api/v1"
WHOLE = {"needs_reference": True, "needs_inference": True}
"""A run's three parts: policy, reference, deployment."""


@pytest.mark.parametrize("needs_reference", [False, True], ids=["alone", "with reference"])
@pytest.mark.parametrize("needs_inference", [False, True], ids=["no sampling", "sampling"])
def test_two_booleans_decide_what_there_is(stage, needs_reference, needs_inference, datums):
    with stage.provision(needs_reference=needs_reference, needs_inference=needs_inference) as infra:
        assert infra.policy.job_id == infra.policy_job_id
        assert (infra.reference is not None) is needs_reference
        assert (infra.reference_job_id is not None) is needs_reference
        assert (infra.inference_model is not None) is needs_inference
        assert (infra.deployment_id is not None) is needs_inference
        assert len(stage.states()) == 1 + needs_reference
        assert len(stage.replicas()) == needs_inference
        clients = [infra.policy, *([infra.reference] if infra.reference else [])]
        rows = [client.forward(datums(2), "cross_entropy").loss_fn_outputs for client in clients]
        assert [len(row["logprobs"].data) for row in rows[0]] == [3, 4]
        assert rows[-1][0]["logprobs"].data == rows[0][0]["logprobs"].data
    assert infra.boot_metrics.keys() == {"boot/provision_time", "boot/wire_time"}


def test_everything_is_asked_for_in_order_before_anything_is_waited_for(stage):
    for resource in (f"{JOBS}/", f"{DEPLOYMENTS}/"):
        stage.wire.rule(f"GET {resource}", delay_s=0.1)

    with stage.provision(**WHOLE, role_prefix="grpo", job_suffix="1"):
        pass

    assert stage.creates() == ["grpo-policy", "grpo-reference", "grpo-deployment-1"]
    lines = [request.line for request in stage.wire.seen]
    last_create = max(i for i, line in enumerate(lines) if line.startswith("POST /v1"))
    first_wait = next(i for i, line in enumerate(lines) if line.startswith(f"GET {JOBS}/"))
    assert first_wait > lines.index(f"POST {DEPLOYMENTS}")
    assert lines.index(f"POST {DEPLOYMENTS}") <= last_create
    assert stage.wire.most_in_flight(f"GET ({JOBS}|{DEPLOYMENTS})/") == 3


@pytest.mark.parametrize("scope", WeightSyncScope)
def test_the_scope_says_who_is_asked_for_first_and_who_names_whom(stage, scope):
    config = stage.serving(weight_sync_scope=scope)
    with stage.provision(**WHOLE, deploy_cfg=config, job_suffix="1") as infra:
        syncer = stage.sync_weights(infra)
        served = syncer.save_and_hotload("step-00001")

        state = stage.deployments.replica_state("serving", BASE)
        assert state is not None
        assert state.current_snapshot_identity == served

    (asked,) = stage.wire.requests(f"POST {DEPLOYMENTS}$")
    policy, reference = stage.wire.requests(f"POST {JOBS}$")
    tied = policy.body.get("hotLoadDeploymentId")
    if scope is WeightSyncScope.PER_TRAINER:
        assert stage.creates() == ["rl-policy", "rl-reference", "rl-deployment-1"]
        assert asked.body["hotLoadTrainerJob"] == "accounts/me/rlorTrainerJobs/rl-policy-1"
        assert tied is None
    else:
        assert stage.creates() == ["rl-deployment-1", "rl-policy", "rl-reference"]
        assert "hotLoadTrainerJob" not in asked.body
        assert tied == policy.query["deploymentId"] == "serving"
    assert "hotLoadDeploymentId" not in reference.body
    assert [asked.body["forwardOnly"] for asked in (policy, reference)] == [False, True]


@pytest.mark.parametrize(
    ("scope", "source", "rule"),
    [
        ("per_deployment", "other", "with weight_sync_scope PER_DEPLOYMENT the trainer is tied"),
        ("per_trainer", "other", "the deployment is attached to the policy trainer by itself"),
    ],
)
def test_two_places_for_snapshots_are_refused_before_anything_is_asked_for(
    stage, scope, source, rule
):
    config = stage.serving(weight_sync_scope=WeightSyncScope(scope), hot_load_trainer_job=source)

    with pytest.raises(
        ConfigError, match=f"hot_load_trainer_job must be unset, got 'other': {rule}"
    ):
        stage.setup(needs_inference=True, deploy_cfg=config)
    assert stage.creates() == []


@pytest.mark.parametrize(
    ("tied", "scope", "message"),
    [
        ("serving", "per_trainer", "must be PER_DEPLOYMENT .* into that of deployment 'serving'"),
        ("elsewhere", "per_deployment", "into that of deployment 'elsewhere'"),
        (None, "per_deployment", "must be PER_TRAINER .* publishes into its own"),
    ],
)
def test_a_job_that_publishes_elsewhere_than_the_deployment_reads_is_refused(
    stage, tied, scope, message
):
    stage.create_job("mine", hot_load_deployment_id=tied)
    config = stage.serving(weight_sync_scope=WeightSyncScope(scope))

    with pytest.raises(ConfigError, match=message):
        stage.setup(needs_inference=True, deploy_cfg=config, policy_job_id="mine")
    assert stage.replicas() == {}


def test_a_deployment_that_reads_a_trainers_snapshots_is_no_place_of_its_own(stage):
    stage.create_job("mine")
    stage.create_deployment(hot_load_trainer_job="mine")
    config = stage.serving(weight_sync_scope=WeightSyncScope.PER_DEPLOYMENT)

    with pytest.raises(ConfigError, match=r"must be PER_TRAINER .*snapshots of .*/mine'"):
        stage.setup(needs_inference=True, deploy_cfg=config)
    assert list(stage.states()) == ["mine"]


def test_a_lora_policy_shares_its_base_as_the_reference(stage, datums):
    with stage.provision(lora_rank=4, needs_reference=True, seed=1) as infra:
        policy, reference = infra.policy, infra.reference

        def score(client):
            outputs = client.forward(datums(2), "cross_entropy").loss_fn_outputs
            return torch.cat([torch.tensor(output["logprobs"].data) for output in outputs])

        base = score(reference)
        policy.forward_backward(datums(2), "cross_entropy")
        policy.optim_step(ADAM.model_copy(update={"learning_rate": 0.1}))

        assert infra.reference_job_id is None
        assert list(stage.states().values()) == ["JOB_STATE_RUNNING"]
        assert torch.equal(score(reference), base)
        assert not torch.equal(score(policy), base)
        assert reference.job_id == policy.job_id


@pytest.mark.parametrize("lora_rank", [0, 4], ids=["trainer of its own", "shared"])
def test_a_reference_scores_and_refuses_to_train(stage, datums, lora_rank):
    with stage.provision(lora_rank=lora_rank, needs_reference=True) as infra:
        reference, data = infra.reference, datums(1)

        assert len(reference.forward(data, "cross_entropy").loss_fn_outputs) == 1
        for train in (
            lambda: reference.forward_backward(data, "cross_entropy"),
            lambda: reference.forward_backward_custom(data, lambda *_: None),
            lambda: reference.optim_step(ADAM),
        ):
            with pytest.raises(ForwardOnlyError, match="a reference only runs forward"):
                train()


CATALOG = """
[models."accounts/me/models/tiny"]
source = {source!r}

[shapes."accounts/me/trainingShapes/long"]
base_model = "accounts/me/models/tiny"
trainer_mode = "FORWARD_ONLY"
"""
TINY = "accounts/me/models/tiny"


@pytest.fixture
def named(tmp_path, monkeypatch):
    """A catalog in which the shipped model has a name, and so training shapes."""
    path = tmp_path / "catalog.toml"
    path.write_text(CATALOG.format(source=BASE))
    monkeypatch.setenv("HEARTH_CATALOG", str(path))


def test_a_reference_shape_gives_a_lora_policy_a_reference_trainer(named, stage, datums):
    shape = "accounts/me/trainingShapes/long"
    with stage.provision(
        base_model=TINY,
        lora_rank=4,
        needs_reference=True,
        infra_cfg=InfraConfig(ref_training_shape_id=shape),
    ) as infra:
        assert len(stage.states()) == 2
        assert infra.reference_job_id != infra.policy_job_id
        assert infra.ref_training_shape_id == shape
        assert infra.training_shape_id == "accounts/me/trainingShapes/tiny-lora"
        assert isinstance(infra.policy_profile, TrainingShapeProfile)
        assert infra.policy_profile.trainer_mode == "LORA_TRAINER"
        assert len(infra.reference.forward(datums(1), "cross_entropy").loss_fn_outputs) == 1


@pytest.mark.parametrize(("is_given", "searches"), [(True, 0), (False, 1)])
def test_a_shape_is_looked_for_only_where_none_is_given(named, stage, is_given, searches):
    shape = "accounts/me/trainingShapes/tiny-lora"
    with stage.provision(
        base_model=TINY,
        lora_rank=4,
        infra_cfg=InfraConfig(training_shape_id=shape if is_given else None),
    ) as infra:
        pass

    assert len(stage.wire.requests("GET .*/trainingShapes/-/versions")) == searches
    assert infra.training_shape_id == shape
    (asked,) = stage.wire.requests(f"POST {JOBS}$")
    assert asked.query["trainingShape"].startswith(f"{shape}/versions/")


def test_a_deployment_has_the_shape_of_its_policy_and_is_asked_for_nothing_else(named, stage):
    shape = "accounts/me/trainingShapes/tiny-lora"
    with stage.provision(
        base_model=TINY,
        lora_rank=4,
        needs_inference=True,
        infra_cfg=InfraConfig(training_shape_id=shape),
        extra_values=TrainerConfig().options,
    ) as infra:
        assert infra.deployment_shape == "accounts/me/deploymentShapes/tiny-lora/versions/1"

    (job,) = stage.wire.requests(f"POST {JOBS}$")
    assert "extraValues" not in job.body
    (deployment,) = stage.wire.requests(f"POST {DEPLOYMENTS}$")
    assert "maxReplicaCount" not in deployment.body
    assert deployment.body["extraValues"].keys() == {
        "lora_rank",
        "max_batch_size",
        "max_context_length",
        "tokenizer",
    }


def test_whoever_chooses_the_hardware_has_no_shape_chosen(named, stage):
    with stage.provision(base_model=TINY, infra_cfg=InfraConfig(accelerator_count=1)) as infra:
        pass

    assert infra.training_shape_id is None
    (asked,) = stage.wire.requests(f"POST {JOBS}$")
    assert asked.body["trainingConfig"]["acceleratorCount"] == 1
    assert "trainingShape" not in asked.query


def test_an_unknown_shape_is_refused_before_anything_is_asked_for(stage):
    shape = InfraConfig(training_shape_id="accounts/me/trainingShapes/none")

    with pytest.raises(NotFoundError, match="must be a known shape"):
        stage.setup(infra_cfg=shape)
    assert stage.creates() == []


def test_a_policy_on_a_shape_that_only_runs_forward_is_refused(named, stage):
    shape = "accounts/me/trainingShapes/long"

    with pytest.raises(ConfigError, match="training_shape_id must be a shape that trains, got"):
        stage.setup(base_model=TINY, infra_cfg=InfraConfig(training_shape_id=shape))
    assert stage.creates() == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"deploy_mgr": None}, "deploy_mgr must be given where needs_inference is True"),
        ({"tokenizer_model": ""}, r"tokenizer_model must be a tokenizer's folder"),
        ({"weight_sync_scope": "PER_DEPLOYMENT"}, r"weight_sync_scope must be one of \['per_tra"),
    ],
)
def test_sampling_without_its_means_is_refused_before_anything_is_asked_for(
    stage, options, message
):
    config = stage.serving()
    for name in {"tokenizer_model", "weight_sync_scope"} & options.keys():
        setattr(config, name, options.pop(name))

    with pytest.raises(ValueError, match=message):
        stage.setup(needs_inference=True, deploy_cfg=config, **options)
    assert stage.wire.seen == []


def test_what_is_given_by_id_is_attached_to_and_goes_on_running(stage, datums):
    stage.create_job("mine", max_context_length=128)
    stage.create_job("frozen", extra_args=["--forward-only"])
    stage.create_deployment(max_context_length=128)
    asked = len(stage.creates())

    with stage.provision(
        **WHOLE, policy_job_id="mine", reference_job_id="frozen", job_suffix="1"
    ) as infra:
        syncer = stage.sync_weights(infra)
        syncer.save_and_hotload("step-00001")
        assert len(infra.reference.forward(datums(1), "cross_entropy").loss_fn_outputs) == 1

    assert len(stage.creates()) == asked
    (patched,) = stage.wire.requests(f"PATCH {DEPLOYMENTS}/serving")
    assert patched.body == {"hotLoadTrainerJob": "accounts/me/rlorTrainerJobs/mine"}
    assert set(stage.states().values()) == {"JOB_STATE_RUNNING"}
    assert stage.replicas() == {"serving": 1}


def test_brought_jobs_are_waited_for_side_by_side_and_resumed_where_they_have_ended(stage):
    for name in ("mine", "frozen"):
        stage.create_job(name)
        stage.trainers.cancel(name)
    stage.wire.rule(f"POST {JOBS}/.*:resume", delay_s=0.1)

    with stage.provision(needs_reference=True, policy_job_id="mine", reference_job_id="frozen"):
        pass

    assert stage.wire.most_in_flight(":resume") == 2
    assert set(stage.states().values()) == {"JOB_STATE_RUNNING"}


def test_a_deployment_at_zero_is_scaled_up_and_attached_in_one_request(stage):
    stage.create_deployment(min_replica_count=0, max_replica_count=0)

    with stage.provision(needs_inference=True, job_suffix="1"):
        assert stage.replicas() == {"serving": 1}

    first, last = stage.wire.requests(f"PATCH {DEPLOYMENTS}/serving")
    assert first.body == {
        "minReplicaCount": 1,
        "hotLoadTrainerJob": "accounts/me/rlorTrainerJobs/rl-policy-1",
    }
    assert last.body == {"minReplicaCount": 0, "maxReplicaCount": 0}
    assert stage.replicas() == {"serving": 0}


def test_a_run_that_was_killed_finds_its_parts_again_and_takes_them_down(stage):
    options = {"needs_inference": True, "needs_reference": True, "job_suffix": "1"}
    stage.setup(**options).close()  # nobody cleans up: the process is gone
    stage.trainers.cancel("rl-reference-1")

    with stage.provision(**options):
        assert set(stage.states().values()) == {"JOB_STATE_RUNNING"}

    assert len(stage.states()) == 2
    assert set(stage.states().values()) == {"JOB_STATE_CANCELLED"}
    assert stage.replicas() == {"serving": 0}


BROUGHT = [
    ({"policy_job_id": "nope"}, "policy_job_id must name a trainer job of this platform"),
    ({"policy_job_id": "frozen"}, "policy_job_id must name a job that trains, got forward-only"),
    (
        {"policy_job_id": "mine", "base_model": "accounts/fireworks/models/qwen3-8b"},
        "policy_job_id must name a job of 'accounts/fireworks/models/qwen3-8b', got 'mine'",
    ),
    (
        {"reference_job_id": "nope", "needs_reference": True},
        "reference_job_id must name a trainer job of this platform",
    ),
    (
        {
            "reference_job_id": "mine",
            "base_model": "accounts/fireworks/models/qwen3-8b",
            "needs_reference": True,
        },
        "reference_job_id must name a job of 'accounts/fireworks/models/qwen3-8b', got 'mine'",
    ),
]


@pytest.mark.parametrize(("options", "message"), BROUGHT, ids=[str(case) for case, _ in BROUGHT])
def test_a_job_that_does_not_fit_is_refused_before_anything_is_asked_for(stage, options, message):
    stage.create_job("mine")
    stage.create_job("frozen", forward_only=True)

    with pytest.raises(ConfigError, match=message):
        stage.setup(needs_inference=True, **options)
    assert len(stage.creates()) == 2


def test_a_deployment_of_another_model_is_refused_and_left_alone(named, stage):
    stage.create_deployment(base_model=TINY)

    with (
        pytest.raises(ConfigError, match=r"must name a deployment of .*, which serves"),
        stage.provision(needs_inference=True),
    ):
        pass

    assert stage.replicas() == {"serving": 1}
    assert list(stage.states().values()) == ["JOB_STATE_CANCELLED"]


def test_one_error_names_every_part_that_failed(stage, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text('{"model_type": "qwen3"}')
    config = stage.serving()

    with (
        pytest.raises(EngineError, match="provisioning failed, 3 of 3 parts") as failure,
        stage.provision(base_model=str(broken), deploy_cfg=config, job_suffix="1", **WHOLE),
    ):
        pass

    lines = str(failure.value).splitlines()[1:]
    parts = ["policy trainer rl-policy-1", "reference trainer rl-reference-1", "deployment serving"]
    assert [line.strip().removeprefix("- ").split(":")[0] for line in lines] == parts
    assert all("could not start" in line for line in lines)


def test_one_part_that_is_late_is_named_and_the_others_are_taken_down(stage):
    stage.wire.rule("GET /training/.*/rl-reference-1/.*/healthz", status=425)

    with (
        pytest.raises(
            EngineError,
            match=r"1 of 3 parts:\n  - reference trainer rl-reference-1: .* within 0\.2 s",
        ),
        stage.provision(job_suffix="1", infra_cfg=InfraConfig(trainer_timeout_s=0.2), **WHOLE),
    ):
        pass
    assert set(stage.states().values()) == {"JOB_STATE_CANCELLED"}
    assert stage.replicas() == {"serving": 0}


def test_without_a_cleanup_a_failure_takes_down_what_was_asked_for(stage):
    stage.wire.rule(f"POST {DEPLOYMENTS}$", status=400, message="no room")

    with pytest.raises(EngineError, match="1 of 2 parts:\n  - deployment: no room"):
        stage.setup(needs_inference=True)
    assert list(stage.states().values()) == ["JOB_STATE_CANCELLED"]


@pytest.mark.parametrize("scope", WeightSyncScope)
def test_configs_are_not_changed(stage, scope, caplog):
    infra_cfg = InfraConfig(extra_args=["--x"], purpose="test")
    deploy_cfg = stage.serving(None, weight_sync_scope=scope)
    before = copy.deepcopy((asdict(infra_cfg), asdict(deploy_cfg)))

    with stage.provision(infra_cfg=infra_cfg, deploy_cfg=deploy_cfg, **WHOLE) as infra:
        pass

    assert (asdict(infra_cfg), asdict(deploy_cfg)) == before
    assert "extra_args ['--x'] are kept with the job and change nothing" in caplog.text
    assert infra.deployment_id is not None
    assert infra.deployment_id.startswith("model-")
    assert stage.replicas() == {infra.deployment_id: 0}


def test_a_loop_of_ones_own_trains_on_what_it_was_given(stage, datums):
    """Document 001's loop: sample, score, reference, custom loss, step, weight sync."""
    with stage.provision(**WHOLE, role_prefix="grpo") as infra:
        sampler = DeploymentSampler(stage.deployments.inference_url, infra.inference_model, "key")
        syncer = WeightSyncer(
            policy_client=infra.policy.inner,
            deploy_mgr=stage.deployments,
            deployment_id="serving",
            base_model=BASE,
            hotload_timeout=600,
            first_checkpoint_type="base",
        )
        step, scripted = 0, [[0.0, 1.0, 0.5, 0.0], [1.0] * 4, [1.0, 0.0, 0.0, 0.0]]
        for rewards in scripted:
            # A loop of its own for each, as in a synchronous script.
            completions = asyncio.run(
                sampler.sample_with_prompt_tokens([5, 17, 40], n=4, max_tokens=6, seed=step)
            )
            if len(set(rewards)) == 1:
                continue
            step += 1
            data = build_grpo_datums(completions)
            scored = infra.reference.forward(data, "cross_entropy")
            ref_logprobs = [list(output["logprobs"].data) for output in scored.loss_fn_outputs]
            assert [len(logprob) for logprob in ref_logprobs] == [
                datum.model_input.length for datum in data
            ]
            loss_fn = make_grpo_loss_fn(rewards, ref_logprobs, kl_beta=0.001)
            result = infra.policy.forward_backward_custom(data, loss_fn)
            assert result.metrics.keys() >= {"grpo_loss", "mean_kl"}
            infra.policy.optim_step(ADAM)
            syncer.save_and_hotload(f"step-{step:05d}")

    saves = stage.wire.requests(f"{TRAINER_CALLS}/save_weights_for_sampler")
    assert [save.body["path"].rsplit("-", 1)[0] for save in saves] == ["step-00001", "step-00002"]
    assert [save.body["checkpoint_type"] for save in saves] == ["base", "delta"]
    adam = [
        request.body["adam_params"]
        for request in stage.wire.requests(f"{TRAINER_CALLS}/optim_step")
    ]
    assert adam == [ADAM.model_dump(exclude={"type"})] * 2
    sent = stage.wire.requests("POST /inference/v1/completions")
    assert [request.body["n"] for request in sent] == [1] * 12


def read_saved_types(stage):
    saves = stage.wire.requests(f"{TRAINER_CALLS}/save_weights_for_sampler")
    return [save.body["checkpoint_type"] for save in saves]


def test_a_weight_sync_that_fails_makes_the_next_snapshot_a_base(stage):
    with stage.provision(needs_inference=True) as infra:
        syncer = stage.sync_weights(infra)
        syncer.save_and_hotload("step-00001")
        stage.wire.rule("POST /hot_load", status=400, message="disk full", times=1)
        with pytest.raises(Exception, match="disk full"):
            syncer.save_and_hotload("step-00002")
        syncer.save_and_hotload("step-00003")
        syncer.save_and_hotload("step-00004")

    assert read_saved_types(stage) == ["base", "delta", "base", "delta"]


def test_a_lora_policy_always_publishes_its_whole_adapter(stage):
    with stage.provision(lora_rank=4, needs_inference=True) as infra:
        syncer = stage.sync_weights(infra)
        for step in (1, 2):
            syncer.save_and_hotload(f"step-{step:05d}")

    assert read_saved_types(stage) == ["base", "base"]
