import math
from concurrent.futures import ThreadPoolExecutor

import pytest

from hearth.errors import ClosedError, ConfigError, NotFoundError
from hearth.sdk import TrainerJobConfig, TrainerJobManager

BASE = "accounts/fireworks/models/tiny"
JOBS = "/v1/accounts/me/rlorTrainerJobs"
JOB = f"{JOBS}/policy"
SHAPE = "accounts/fireworks/trainingShapes/tiny"


def test_the_account_is_asked_for_once_when_none_is_given(peer, manager, job):
    peer.on("GET", JOB, job("RUNNING"))

    manager.get("policy")
    manager.get("policy")

    assert [request.query for request in peer.requests("GET", "/v1/accounts")] == [
        {"pageSize": "2"}
    ]
    assert manager.account_id == "me"


@pytest.mark.parametrize("names", [[], ["accounts/a", "accounts/b"]])
def test_none_or_several_accounts_are_an_error_that_lists_them(peer, answer, manager, names):
    peer.on("GET", "/v1/accounts", answer({"accounts": [{"name": name} for name in names]}))

    with pytest.raises(ConfigError, match=f"has {len(names)} accounts"):
        manager.get("policy")


def test_a_given_account_is_not_asked_for(peer, answer, quick):
    peer.on("GET", "/v1/accounts/mine/rlorTrainerJobs", answer({"rlorTrainerJobs": []}))
    manager = TrainerJobManager(api_key="key", account_id="mine", base_url=peer.url, **quick)

    assert manager.list() == []
    assert peer.requests("GET", "/v1/accounts") == []


def test_key_and_url_come_from_the_environment(peer, monkeypatch):
    monkeypatch.setenv("FIREWORKS_API_KEY", "from-env")
    monkeypatch.setenv("FIREWORKS_BASE_URL", peer.url)

    assert TrainerJobManager().account_id == "me"
    assert peer.seen[0].headers["x-api-key"] == "from-env"


@pytest.mark.parametrize(
    ("given", "message"),
    [({"base_url": "http://x.test"}, "HEARTH_API_KEY"), ({"api_key": "k"}, "HEARTH_URL")],
)
def test_a_missing_key_or_url_names_its_variable(monkeypatch, given, message):
    monkeypatch.delenv("FIREWORKS_API_KEY", raising=False)
    monkeypatch.delenv("FIREWORKS_BASE_URL", raising=False)

    with pytest.raises(ConfigError, match=message):
        TrainerJobManager(**given)


def test_a_job_is_asked_for_under_an_id_of_the_clients_own(peer, manager, job):
    peer.on("POST", JOBS, job("PENDING"))
    config = TrainerJobConfig(
        base_model=BASE,
        training_shape_id=SHAPE,
        lora_rank=8,
        display_name="grpo-policy",
        hot_load_deployment_id="serving",
        max_context_length=512,
        dtype="float32",
        micro_batch_tokens=4096,
        recompute_above=2048,
        skip_validations=True,
    )

    created = manager.create(config)

    (sent,) = peer.requests("POST", JOBS)
    assert created.job_id.startswith("training-api-service-")
    assert len(created.job_id) == len("training-api-service-") + 8
    assert sent.query == {
        "rlorTrainerJobId": created.job_id,
        "trainingShape": SHAPE,
        "deploymentId": "serving",
        "skipValidations": "true",
    }
    assert sent.body["trainingConfig"] == {
        "baseModel": BASE,
        "loraRank": 8,
        "learningRate": 1e-5,
        "maxContextLength": 512,
    }
    assert sent.body["displayName"] == "grpo-policy"
    assert sent.body["hotLoadDeploymentId"] == "serving"
    assert sent.body["extraValues"] == {
        "dtype": "float32",
        "micro_batch_tokens": 4096,
        "recompute_above": 2048,
    }
    assert sent.body["forwardOnly"] is False


def test_the_forward_only_argument_makes_a_forward_only_job(peer, manager, job):
    peer.on("POST", JOBS, job("PENDING"))

    manager.create(TrainerJobConfig(base_model=BASE, extra_args=["--forward-only", "--no-compile"]))

    assert peer.requests("POST", JOBS)[0].body["forwardOnly"] is True


def test_a_create_that_got_no_answer_is_sent_again_and_finds_its_own_job(
    peer, answer, manager, job
):
    peer.on("POST", JOBS, answer(status=503), answer(status=409))
    peer.on("GET", JOB, job("CREATING"))

    created = manager.create(TrainerJobConfig(base_model=BASE, job_id="policy"))

    assert (created.job_id, created.state) == ("policy", "JOB_STATE_CREATING")
    assert created.job_name == "accounts/me/rlorTrainerJobs/policy"
    assert peer.log == [
        "GET accounts",
        "POST rlorTrainerJobs",
        "POST rlorTrainerJobs",
        "GET policy",
    ]


def test_the_id_of_a_deleted_job_cannot_be_used_again(peer, answer, manager, job):
    peer.on("POST", JOBS, answer(status=409))
    peer.on("GET", JOB, job("DELETED"))

    with pytest.raises(NotFoundError, match="it was deleted"):
        manager.create(TrainerJobConfig(base_model=BASE, job_id="policy"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base_model": ""}, "base_model must be"),
        ({"lora_rank": -1}, "lora_rank must be >= 0"),
        *[
            ({"learning_rate": rate}, "learning_rate must be finite and > 0 in a job")
            for rate in (0.0, -1e-5, math.nan, math.inf)
        ],
        ({"learning_rate": -1.0, "forward_only": True}, "learning_rate must be finite and >= 0"),
        ({"max_context_length": 0}, "max_context_length must be >= 1"),
        ({"job_id": "Policy_1"}, "job_id must be 1 to 63"),
        ({"training_shape_ref": "b"}, "training_shape_id must equal training_shape_ref"),
        ({"accelerator_type": "NVIDIA_H200_141GB"}, "accelerator_type must be absent .*'shape'"),
        ({"accelerator_count": 8}, "accelerator_count must be absent"),
        ({"node_count": 2}, "node_count must be absent"),
        ({"custom_image_tag": "x"}, "custom_image_tag must be absent"),
    ],
)
def test_a_config_that_breaks_a_rule_is_refused_before_the_platform_is_asked(
    peer, manager, options, message
):
    config = TrainerJobConfig(**{"base_model": BASE, "training_shape_id": "shape", **options})

    with pytest.raises(ConfigError, match=message):
        manager.create(config)
    assert peer.seen == []


def test_hardware_may_be_chosen_where_no_shape_does(peer, manager, job):
    peer.on("POST", JOBS, job("PENDING"))

    manager.create(TrainerJobConfig(base_model=BASE, accelerator_count=1, node_count=1))

    sent = peer.requests("POST", JOBS)[0].body
    assert (sent["trainingConfig"]["acceleratorCount"], sent["nodeCount"]) == (1, 1)


def test_jobs_are_created_side_by_side_from_three_threads(peer, answer, quick, job):
    peer.on("POST", JOBS, job("PENDING", delay_s=0.05))
    manager = TrainerJobManager("key", "me", peer.url, **quick)

    with ThreadPoolExecutor(max_workers=3) as pool:
        list(pool.map(manager.create, [TrainerJobConfig(base_model=BASE)] * 3))

    assert peer.most_in_flight == 3
    assert len({request.query["rlorTrainerJobId"] for request in peer.seen}) == 3


def test_cancelling_and_deleting_are_safe_to_repeat(peer, answer, manager):
    peer.on("POST", f"{JOB}:cancel", answer({}), answer(status=409), answer(status=404))
    peer.on("DELETE", JOB, answer({}), answer(status=404))

    for _ in range(3):
        manager.cancel("policy")
    for _ in range(2):
        manager.delete("policy")

    assert len(peer.requests("POST", f"{JOB}:cancel")) == 3


def test_a_job_may_be_resumed_by_itself_and_looked_at(peer, answer, manager, job):
    peer.on("POST", f"{JOB}:resume", answer({}))
    peer.on("GET", JOB, job("PENDING"))

    manager.resume("policy")

    record = manager.get("accounts/me/rlorTrainerJobs/policy")
    assert record.state == "JOB_STATE_PENDING"
    assert manager.get("nope") is None


def test_lists_have_the_rows_of_all_pages(peer, answer, manager):
    def row(name):
        return {
            "name": f"{JOB.removeprefix('/v1/')}/checkpoints/{name}",
            "createTime": "t",
            "updateTime": "t",
            "checkpointType": "CHECKPOINT_TYPE_TRAINING",
            "promotable": False,
        }

    first = {"checkpoints": [row("step-1"), row("step-2")], "nextPageToken": "2"}
    peer.on("GET", f"{JOB}/checkpoints", answer(first), answer({"checkpoints": [row("step-3")]}))
    record = {"name": "accounts/me/rlorTrainerJobs/a", "trainingConfig": {"baseModel": BASE}}
    peer.on("GET", JOBS, answer({"rlorTrainerJobs": [record]}))

    rows = manager.list_checkpoints("policy")

    assert [row.name.rsplit("/", 1)[-1] for row in rows] == ["step-1", "step-2", "step-3"]
    pages = [request.query for request in peer.requests("GET", f"{JOB}/checkpoints")]
    assert pages == [{"pageSize": "200"}, {"pageSize": "200", "pageToken": "2"}]
    assert [job.name for job in manager.list()] == ["accounts/me/rlorTrainerJobs/a"]


def test_a_job_that_was_ended_on_purpose_is_not_resumed_where_that_is_asked(peer, manager, job):
    peer.on("GET", JOB, job("CANCELLED", "cancelled by request"))

    with pytest.raises(ClosedError, match="got JOB_STATE_CANCELLED: cancelled by request"):
        manager.reconnect_and_wait_async("policy", unless=["JOB_STATE_CANCELLED"]).result(10)
    assert peer.requests("POST", f"{JOB}:resume") == []
