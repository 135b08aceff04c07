import asyncio

import pytest

from hearth.errors import ConfigError, EngineError, NotFoundError
from hearth.sdk import DeploymentConfig, DeploymentManager

BASE = "accounts/fireworks/models/tiny"
ALL = "/v1/accounts/me/deployments"
ONE = f"{ALL}/grpo-serving"
NAME = "accounts/me/deployments/grpo-serving"
TRAINER = "accounts/me/rlorTrainerJobs/policy"


@pytest.fixture
def manager(peer, quick) -> DeploymentManager:
    return DeploymentManager(api_key="key", account_id="", base_url=peer.url, **quick)


@pytest.fixture
def config():
    return DeploymentConfig(deployment_id="grpo-serving", base_model=BASE)


@pytest.fixture
def deployment(answer):
    """A deployment's record in a state."""

    def make(state: str, **fields):
        return answer({"name": NAME, "baseModel": BASE, "state": state, **fields})

    return make


def test_a_deployment_is_made_where_there_is_none(peer, answer, manager, deployment):
    peer.on("POST", ALL, deployment("CREATING"))
    config = DeploymentConfig(
        deployment_id="grpo-serving",
        base_model=BASE,
        region="LOCAL",
        hot_load_trainer_job="policy",
        tokenizer_model="Qwen/Qwen3-8B",
        max_batch_size=32,
        max_adapters=8,
        disable_speculative_decoding=True,
        skip_shape_validation=True,
        hot_load_transition_type="SYNC",
    )

    info = manager.create_or_get(config)

    (sent,) = peer.requests("POST", ALL)
    assert sent.query == {
        "deploymentId": "grpo-serving",
        "skipShapeValidation": "true",
        "disableSpeculativeDecoding": "true",
    }
    expected = {
        "baseModel": BASE,
        "minReplicaCount": 1,
        "enableHotLoad": True,
        "forTraining": True,
        "hotLoadBucketType": "FW_HOSTED",
        "hotLoadTrainerJob": TRAINER,
        "hotLoadTransitionType": "SYNC",
        "placement": {"region": "LOCAL"},
        "maxAdapters": 8,
        "extraValues": {"tokenizer": "Qwen/Qwen3-8B", "max_batch_size": 32},
    }
    assert {name: sent.body[name] for name in expected} == expected
    assert info.inference_model == NAME
    assert info.deployment_id == "grpo-serving"
    assert info.state == "CREATING"


@pytest.mark.parametrize("state", ["READY", "CREATING", "UPDATING"])
def test_a_living_deployment_is_taken_as_it_is(peer, manager, config, deployment, state):
    peer.on("GET", ONE, deployment(state, hotLoadTransitionType="TRANSITION_TYPE_UNSPECIFIED"))

    info = manager.create_or_get(config)

    assert (info.state, info.hot_load_transition_type) == (state, None)
    assert peer.log == ["GET accounts", "GET grpo-serving"]


@pytest.mark.parametrize("state", ["FAILED", "DELETED", "DELETING"])
def test_a_dead_deployment_is_deleted_and_made_anew(
    peer, answer, manager, config, deployment, state
):
    peer.on("GET", ONE, deployment(state), deployment("DELETING"), answer(status=404))
    peer.on("DELETE", ONE, answer({}))
    peer.on("POST", ALL, deployment("CREATING"))

    assert manager.create_or_get(config).state == "CREATING"
    assert peer.requests("DELETE", ONE)[0].query == {"ignoreChecks": "true", "hard": "true"}
    assert peer.log[-1] == "POST deployments"


def test_a_living_deployment_is_made_anew_when_that_is_forced(
    peer, answer, manager, config, deployment
):
    peer.on("GET", ONE, deployment("READY"), deployment("DELETED"))
    peer.on("DELETE", ONE, answer({}))
    peer.on("POST", ALL, deployment("CREATING"))

    assert manager.create_or_get(config, force_recreate=True).state == "CREATING"


def test_a_create_that_got_no_answer_is_sent_again_and_finds_its_own_deployment(
    peer, answer, manager, config, deployment
):
    peer.on("GET", ONE, answer(status=404), deployment("CREATING"))
    peer.on("POST", ALL, answer(status=500), answer(status=502), answer(status=409))

    assert manager.create_or_get(config).inference_model == NAME


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"deployment_id": "Grpo_Serving"}, "deployment_id must be 1 to 63"),
        ({"base_model": ""}, "base_model must be"),
        ({"min_replica_count": 2, "max_replica_count": 1}, "min_replica_count must be within"),
        ({"deployment_shape": "s", "accelerator_type": "a"}, "'a' and 's'"),
        ({"hot_load_transition_type": "NOW"}, "'ASYNC' or 'SYNC', got 'NOW'"),
    ],
)
def test_a_config_that_breaks_a_rule_is_refused_before_the_platform_is_asked(
    peer, manager, options, message
):
    config = DeploymentConfig(**{"deployment_id": "d", "base_model": BASE, **options})

    with pytest.raises(ConfigError, match=message):
        manager.create_or_get(config)
    assert peer.seen == []


def test_ready_is_waited_for(peer, manager, deployment):
    peer.on("GET", ONE, deployment("CREATING"), deployment("UPDATING"), deployment("READY"))

    info = manager.wait_for_ready("grpo-serving", timeout_s=5)

    assert info.state == "READY"
    assert "READY" in peer.requests("GET", ONE)[1].query["waitForState"].split(",")


def test_ready_may_be_awaited(peer, manager, deployment):
    peer.on("GET", ONE, deployment("CREATING"), deployment("READY"))

    async def wait():
        return await manager.wait_for_ready_async("grpo-serving")

    assert asyncio.run(wait()).state == "READY"


@pytest.mark.parametrize("state", ["FAILED", "DELETING", "DELETED"])
def test_a_deployment_that_will_not_come_is_an_error_with_the_platforms_reason(
    peer, manager, deployment, state
):
    peer.on("GET", ONE, deployment("CREATING"), deployment(state, statusMessage="no such model"))

    with pytest.raises(EngineError, match=f"{state}: no such model"):
        manager.wait_for_ready("grpo-serving")


def test_a_deployment_that_starts_too_long_says_where_it_stands(peer, manager, deployment):
    peer.on("GET", ONE, deployment("CREATING"))

    with pytest.raises(EngineError, match=r"must be READY within 0\.05 s, still CREATING"):
        manager.wait_for_ready("grpo-serving", timeout_s=0.05)


def test_an_unknown_deployment_is_not_found_when_waited_for_and_none_when_asked_for(manager):
    with pytest.raises(NotFoundError):
        manager.wait_for_ready("grpo-serving")
    assert manager.get("grpo-serving") is None


def test_attaching_a_trainer_waits_until_the_deployment_is_ready_and_attached(
    peer, answer, manager, deployment
):
    peer.on(
        "GET",
        ONE,
        deployment("CREATING"),
        deployment("READY", hotLoadTrainerJob="old"),
        deployment("READY", hotLoadTrainerJob="old"),
        deployment("UPDATING"),
        deployment("READY", hotLoadTrainerJob=TRAINER),
    )
    peer.on("PATCH", ONE, deployment("READY", hotLoadTrainerJob="old"))

    info = manager.reattach_trainer("grpo-serving", "policy", timeout_s=5)

    (sent,) = peer.requests("PATCH", ONE)
    assert sent.query == {"updateMask": "hot_load_trainer_job"}
    assert sent.body == {"hotLoadTrainerJob": TRAINER}
    assert info.hot_load_trainer_job == TRAINER
    assert len(peer.requests("GET", ONE)) == 5


def test_a_trainer_that_is_attached_already_is_left_so(peer, manager, deployment):
    peer.on("GET", ONE, deployment("READY", hotLoadTrainerJob=TRAINER))

    manager.reattach_trainer("grpo-serving", TRAINER)

    assert peer.requests("PATCH", ONE) == []


def test_an_attachment_that_does_not_happen_names_both_trainers(peer, manager, deployment):
    peer.on("GET", ONE, deployment("READY", hotLoadTrainerJob="accounts/me/rlorTrainerJobs/old"))
    peer.on("PATCH", ONE, deployment("READY"))

    with pytest.raises(EngineError, match=r"attached to .*/policy within .* with .*/old"):
        manager.reattach_trainer("grpo-serving", "policy", timeout_s=0.05)


def test_an_update_changes_what_is_given(peer, manager, deployment):
    peer.on("PATCH", ONE, deployment("READY"))

    manager.update("grpo-serving", max_replica_count=2, hot_load_transition_type="ASYNC")

    (sent,) = peer.requests("PATCH", ONE)
    assert sent.query["updateMask"] == "max_replica_count,hot_load_transition_type"
    assert sent.body == {"maxReplicaCount": 2, "hotLoadTransitionType": "ASYNC"}


def test_scaling_to_zero_sends_both_counts_without_a_mask(peer, manager, deployment):
    peer.on("PATCH", ONE, deployment("READY"))

    manager.scale_to_zero("grpo-serving")

    (sent,) = peer.requests("PATCH", ONE)
    assert sent.query == {}
    assert sent.body == {"minReplicaCount": 0, "maxReplicaCount": 0}


def test_deleting_is_safe_to_repeat(peer, answer, manager):
    peer.on("DELETE", ONE, answer({}), answer(status=404))

    manager.delete("grpo-serving")
    manager.delete(NAME)

    assert len(peer.requests("DELETE", ONE)) == 2


def test_the_list_has_all_pages(peer, answer, manager):
    def row(name):
        return {"name": f"accounts/me/deployments/{name}", "baseModel": BASE, "state": "READY"}

    first = {"deployments": [row("a")], "nextPageToken": "b"}
    peer.on("GET", ALL, answer(first), answer({"deployments": [row("b")]}))

    assert [info.deployment_id for info in manager.list()] == ["a", "b"]


def test_warming_up_samples_until_the_deployment_answers(peer, answer, manager):
    completions = ("POST", "/inference/v1/completions")
    peer.on(*completions, answer(status=425), answer(status=503), answer({}))

    assert manager.warmup("grpo-serving") is True
    sent = peer.requests(*completions)
    assert len(sent) == 3
    assert sent[0].body["model"] == NAME
    assert sent[0].body["prompt"] == [1, 2]


def test_warming_up_may_fail_without_harm(peer, answer, manager):
    peer.on("POST", "/inference/v1/completions", answer(status=425))

    assert manager.warmup("grpo-serving", attempts=3) is False


def test_the_inference_url_is_the_base_url_unless_it_is_given(peer):
    assert DeploymentManager("key", f"{peer.url}/").inference_url == peer.url
    other = DeploymentManager("key", peer.url, inference_url="http://inference.test/")
    assert other.inference_url == "http://inference.test"
