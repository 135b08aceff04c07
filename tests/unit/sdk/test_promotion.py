import pytest

from hearth.errors import ConfigError, EngineError, NotReadyError

BASE = "accounts/fireworks/models/tiny"
PROMOTE = "/v1/accounts/me/checkpoints/step-1:promote"
OPERATION = {"name": "accounts/me/operations/1", "done": False}
MODEL = {"name": "accounts/me/models/mine", "kind": "HF_BASE_MODEL"}


DONE = OPERATION | {"done": True, "response": MODEL}


def test_a_promotion_is_one_snake_case_request_and_a_wait_for_its_operation(peer, answer, manager):
    peer.on("POST", PROMOTE, answer({"operation": OPERATION}))
    peer.on("GET", "/v1/accounts/me/operations/1", answer(OPERATION), answer(DONE))

    model = manager.promote_checkpoint(
        "policy", "step-1", "mine", BASE, hot_load_deployment_id="serving"
    )

    assert model.name == "accounts/me/models/mine"
    assert peer.requests("POST", PROMOTE)[0].body == {
        "output_model": "accounts/me/models/mine",
        "trainer_job_id": "accounts/me/rlorTrainerJobs/policy",
        "base_model": BASE,
        "async_promotion": True,
        "hot_load_deployment_id": "serving",
        "merge_adapter": False,
    }


def test_a_promotion_may_answer_the_model_at_once_and_take_a_checkpoints_full_name(
    peer, answer, manager
):
    peer.on("POST", PROMOTE, answer({"model": MODEL}))
    full_name = "accounts/me/rlorTrainerJobs/policy/checkpoints/step-1"

    assert manager.promote_checkpoint("policy", full_name, "mine", BASE).name == MODEL["name"]


def test_a_failed_promotion_is_an_error_with_its_reason(peer, answer, manager):
    failed = OPERATION | {"done": True, "error": {"message": "disk full"}}
    peer.on("POST", PROMOTE, answer({"operation": failed}))

    with pytest.raises(EngineError, match="'step-1' failed: disk full"):
        manager.promote_checkpoint("policy", "step-1", "mine", BASE)


def test_a_promotion_that_a_restart_of_the_platform_broke_off_is_begun_again(peer, answer, manager):
    broken = OPERATION | {"done": True, "error": {"code": 14, "message": "restarted"}}
    peer.on("POST", PROMOTE, answer({"operation": broken}), answer({"operation": DONE}))

    assert manager.promote_checkpoint("policy", "step-1", "mine", BASE).name == MODEL["name"]
    assert len(peer.requests("POST", PROMOTE)) == 2


def test_a_promotion_waits_for_the_one_that_a_killed_run_had_under_way(peer, answer, manager):
    busy = answer({"error": {"message": "is being made of step-0"}}, status=425)
    peer.on("POST", PROMOTE, busy, busy, answer({"operation": DONE}))

    assert manager.promote_checkpoint("policy", "step-1", "mine", BASE).name == MODEL["name"]
    peer.on("POST", PROMOTE, busy)
    with pytest.raises(NotReadyError, match="being made of step-0"):
        manager.promote_checkpoint("policy", "step-1", "mine", BASE, timeout=0.02)


def test_a_promotion_without_end_is_given_up_but_goes_on(peer, answer, manager):
    peer.on("POST", PROMOTE, answer({"operation": OPERATION}))
    peer.on("GET", "/v1/accounts/me/operations/1", answer(OPERATION))

    with pytest.raises(EngineError, match="it goes on"):
        manager.promote_checkpoint("policy", "step-1", "mine", BASE, timeout=0.05)


@pytest.mark.parametrize("name", ["", "My-Model", "a_b", "x" * 64])
def test_a_models_id_is_judged_before_anything_is_asked(peer, manager, name):
    with pytest.raises(ConfigError, match="output_model_id must be 1 to 63"):
        manager.promote_checkpoint("policy", "step-1", name, BASE)
    assert peer.seen == []
