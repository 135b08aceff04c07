import asyncio
import resource
import threading
import time

import pytest
from tests.unit.control.conftest import PlatformClient

from hearth.control.catalog import read_catalog
from hearth.control.deployments import MOST_RESTARTS, RESTART_WINDOW_S, Deployments
from hearth.errors import StorageError
from hearth.wire.fireworks import Deployment, DeploymentPatch

DEPLOYMENTS = "deployments"
COMPLETIONS = "/inference/v1/completions"
HOT_LOAD = "/hot_load/v1/models/hot_load"
CREATE = f"{DEPLOYMENTS}?deploymentId=d"
NO_REPLICA = {"minReplicaCount": 0, "maxReplicaCount": 0}
BUCKET = "x-hearth-snapshot-bucket"


async def state(ask, id="d"):
    _, content = await ask("GET", f"{DEPLOYMENTS}/{id}")
    return content["state"], content.get("statusMessage")


@pytest.fixture
async def created(ask, base):
    """A deployment that is asked for and does not answer yet."""
    status, content = await ask("POST", CREATE, {"baseModel": base})
    assert status == 200
    return content


def sampled(id="d"):
    return {"model": f"accounts/me/deployments/{id}", "prompt": [1]}


async def test_a_deployment_is_created_and_answers(ask, script, created):
    assert created["state"] == "CREATING"
    assert created["name"] == "accounts/me/deployments/d"

    script.last("d").starts()

    assert await state(ask) == ("READY", None)
    status, content = await ask("POST", COMPLETIONS, sampled())
    assert (status, content["worker"]) == (200, "deployment-d")
    _, listed = await ask("GET", DEPLOYMENTS)
    assert [found["name"] for found in listed["deployments"]] == ["accounts/me/deployments/d"]


@pytest.mark.parametrize("name", ["d", "accounts/me/deployments/d", "m#accounts/me/deployments/d"])
async def test_a_deployment_is_sampled_by_its_id_its_name_or_its_model_and_name(
    ask, deployed, name
):
    worker = await deployed()

    assert (await ask("POST", COMPLETIONS, {"model": name}))[0] == 200
    named = {"fireworks-deployment": name}
    assert (await ask("POST", COMPLETIONS, b"{}", headers=named))[0] == 200
    assert [request["body"] for request in worker.asked] == [
        f'{{"model":"{name}"}}'.encode(),
        b"{}",
    ]


async def test_one_killed_before_it_answers_is_started_once_more(ask, script, created):
    script.last("d").is_killed()
    assert (await state(ask), len(script.started)) == (("CREATING", None), 2)

    script.last("d").is_killed()
    assert ((await state(ask))[0], len(script.started)) == ("FAILED", 2)


async def test_one_that_dies_is_started_again_by_itself(ask, script, deployed):
    first = await deployed()

    first.dies("ended by SIGKILL")

    assert await state(ask) == ("UPDATING", "ended by SIGKILL")
    second = script.last("d")
    assert second is not first
    assert "got UPDATING: ask again soon" in await ask.refused(425, "POST", COMPLETIONS, sampled())
    first.starts()
    assert (await state(ask))[0] == "UPDATING", "late news"
    second.starts()
    assert await state(ask) == ("READY", None)
    first.dies()
    assert await state(ask) == ("READY", None)


async def test_deaths_between_which_completions_are_answered_are_no_reason_to_give_up(
    ask, script, deployed
):
    await deployed()
    for _ in range(3 * MOST_RESTARTS):
        assert (await ask("POST", COMPLETIONS, sampled()))[0] == 200
        script.last("d").dies("no memory")
        script.last("d").starts()

    assert await state(ask) == ("READY", None)


async def test_one_that_dies_a_fourth_time_within_ten_minutes_is_failed_with_the_reason(
    ask, script, deployed
):
    await deployed()
    for _ in range(MOST_RESTARTS):
        script.last("d").dies("no memory")
        script.last("d").starts()

    script.last("d").dies("no memory")

    assert await state(ask) == ("FAILED", "no memory")
    assert len(script.started) == 1 + MOST_RESTARTS == 4
    message = await ask.refused(410, "POST", COMPLETIONS, sampled())
    assert "got FAILED (no memory): patch maxReplicaCount to 1 to start it again" in message


async def test_a_death_that_no_disk_takes_is_one_death_whenever_it_is_told(
    script, make_plane, make_ask, base
):
    plane = make_plane(script)
    ask = make_ask(plane)
    await ask("POST", CREATE, {"baseModel": base})
    first = script.last("d")
    first.starts()
    plane.deployments.live.note_use("d")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        for _ in range(MOST_RESTARTS + 1):
            with pytest.raises(StorageError, match=r"control\.db' must be writable"):
                first.dies("no memory")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    first.dies("no memory")

    assert await state(ask) == ("UPDATING", "no memory")
    assert len(script.started) == 2


async def test_restarts_that_fail_count_as_deaths(ask, script, deployed):
    await deployed()
    for _ in range(MOST_RESTARTS + 1):
        assert (await state(ask))[0] in ("READY", "UPDATING")
        script.last("d").dies("no memory")

    assert await state(ask) == ("FAILED", "no memory")
    assert len(script.started) == 1 + MOST_RESTARTS


def test_deaths_of_more_than_ten_minutes_ago_do_not_count(plane, script, base):
    clock = [0.0]
    deployments = Deployments(
        plane.store.deployments, plane.store.models, plane.jobs, plane.context, now=lambda: clock[0]
    )
    deployments.create("d", Deployment(base_model=base))
    script.last("d").starts()

    for _ in range(20):
        clock[0] += RESTART_WINDOW_S / MOST_RESTARTS + 1
        script.last("d").dies()
        script.last("d").starts()

    assert deployments.get("d").state == "READY"
    assert len(script.started) == 21


async def test_a_first_start_that_fails_is_failed_at_once(ask, script, created):
    script.last("d").dies("could not start: no such model")

    assert await state(ask) == ("FAILED", "could not start: no such model")
    assert len(script.started) == 1


async def test_a_failed_one_is_started_again_by_a_patch(ask, script, created):
    script.last("d").dies("no memory")

    _, content = await ask("PATCH", f"{DEPLOYMENTS}/d", {"maxReplicaCount": 1})

    assert (content["state"], content.get("statusMessage")) == ("UPDATING", None)
    script.last("d").starts()
    assert await state(ask) == ("READY", None)


async def test_scaled_to_zero_it_has_no_replica_and_scaled_up_it_has_one_again(
    ask, script, deployed
):
    worker = await deployed()

    _, content = await ask("PATCH", f"{DEPLOYMENTS}/d", NO_REPLICA)
    assert (content["state"], content["statusMessage"]) == ("READY", "scaled to zero")
    assert worker.stops == 1
    message = await ask.refused(410, "POST", COMPLETIONS, sampled())
    assert "got none: it was stopped, or its run has ended" in message
    assert "`hearth start d` starts it" in message
    worker.dies("late")
    assert await state(ask) == ("READY", "scaled to zero")
    assert len(script.started) == 1

    _, content = await ask("PATCH", f"{DEPLOYMENTS}/d", {"maxReplicaCount": 1})
    assert (content["state"], content.get("statusMessage")) == ("UPDATING", None)
    script.last("d").starts()
    assert await state(ask) == ("READY", None)
    assert (await ask("POST", COMPLETIONS, sampled()))[0] == 200


async def test_one_may_be_created_with_no_replica(ask, script, base):
    _, content = await ask("POST", CREATE, {"baseModel": base} | NO_REPLICA)

    assert (content["state"], content["statusMessage"]) == ("READY", "scaled to zero")
    assert script.started == []
    await ask.refused(410, "POST", COMPLETIONS, sampled())


async def test_a_start_after_scaling_up_that_fails_is_not_tried_again(ask, script, deployed):
    first = await deployed()
    first.dies()
    script.last("d").starts()
    await ask("PATCH", f"{DEPLOYMENTS}/d", NO_REPLICA)
    await ask("PATCH", f"{DEPLOYMENTS}/d", {"maxReplicaCount": 1})

    script.last("d").dies("no memory")

    assert await state(ask) == ("FAILED", "no memory")


async def test_sampling_while_it_is_created_is_425(ask, created):
    answer = await ask.http.post(COMPLETIONS, json=sampled())

    assert (answer.status_code, answer.headers["retry-after"]) == (425, "1")
    message = answer.json()["error"]["message"]
    assert message == "deployment 'd' must be ready, got CREATING: ask again soon"


async def test_an_unknown_deployment_lists_the_known_ones(ask, deployed):
    await deployed("known")

    expected = "deployment must be one of ['known'], got 'other'"
    assert await ask.refused(404, "POST", COMPLETIONS, sampled("other")) == expected
    assert await ask.refused(404, "GET", f"{DEPLOYMENTS}/other") == expected
    assert await ask.refused(404, "PATCH", f"{DEPLOYMENTS}/other", {}) == expected
    assert await ask.refused(404, "DELETE", f"{DEPLOYMENTS}/other") == expected


@pytest.mark.parametrize(
    ("least", "most"), [(0, 2), (1, 2), (2, 2), (1, 0), (-1, 0), (-1, 1), (2, 1)]
)
async def test_other_replica_counts_than_zero_and_one_are_refused(
    ask, script, base, deployed, least, most
):
    body = {"minReplicaCount": least, "maxReplicaCount": most}
    path = f"{DEPLOYMENTS}?deploymentId=new"
    message = await ask.refused(400, "POST", path, {"baseModel": base} | body)
    assert f"got {least} and {most}" in message
    assert script.started == []

    worker = await deployed()
    assert f"got {least} and {most}" in await ask.refused(400, "PATCH", f"{DEPLOYMENTS}/d", body)
    assert await state(ask) == ("READY", None)
    assert worker.stops == 0


ON_VLLM = {
    "engine": "vllm",
    "engine_options": {"drain": "abort"},
    "lora_rank": 4,
    "train_mlp": True,
}


async def test_on_vllm_it_may_have_several_replicas_and_is_started_again_for_others(
    ask, script, base
):
    await ask("POST", CREATE, {"baseModel": base, "maxReplicaCount": 2, "extraValues": ON_VLLM})
    first = script.last("d")
    first.starts()
    assert (first.spec.engine, first.spec.replicas) == ("vllm", 2)
    assert first.spec.engine_options == {"drain": "abort", "lora_rank": 4, "train_mlp": True}

    _, content = await ask("PATCH", f"{DEPLOYMENTS}/d", {"maxReplicaCount": 64})
    assert content["state"] == "UPDATING"
    assert (first.stops, len(script.started)) == (1, 2)
    assert script.last("d").spec.replicas == 64
    script.last("d").starts()
    assert await state(ask) == ("READY", None)
    assert (await ask("POST", COMPLETIONS, sampled()))[0] == 200

    too_many = await ask.refused(400, "PATCH", f"{DEPLOYMENTS}/d", {"maxReplicaCount": 65})
    assert "got 1 and 65 with engine 'vllm'" in too_many
    assert len(script.started) == 2


async def test_engine_options_must_be_an_object(ask, base):
    body = {"baseModel": base, "extraValues": {"engine_options": [1]}}
    message = await ask.refused(400, "POST", CREATE, body)
    assert message == "extraValues.engine_options must be an object, got [1]"


async def test_a_hot_load_reads_the_bucket_of_the_trainer_it_is_attached_to(ask, running, deployed):
    await running("one")
    await running("two")
    worker = await deployed(hotLoadTrainerJob="accounts/me/rlorTrainerJobs/one")
    named = {"fireworks-deployment": "accounts/me/deployments/d"}

    await ask("POST", HOT_LOAD, {"identity": "s"}, headers=named)
    path = f"{DEPLOYMENTS}/d?updateMask=hot_load_trainer_job"
    body = {"hotLoadTrainerJob": "accounts/me/rlorTrainerJobs/two"}
    status, content = await ask("PATCH", path, body)
    assert (status, content["state"]) == (200, "READY")
    assert content["hotLoadTrainerJob"] == "accounts/me/rlorTrainerJobs/two"
    await ask("POST", HOT_LOAD, {"identity": "s"}, headers=named)

    assert [request["headers"][BUCKET] for request in worker.asked] == [
        "trainer-one",
        "trainer-two",
    ]
    assert worker.stops == 0, "attaching needs no restart"


async def test_a_deployment_that_no_trainer_is_named_for_reads_a_bucket_of_its_own(ask, deployed):
    worker = await deployed()

    await ask("POST", HOT_LOAD, {}, headers={"fireworks-deployment": "d"})

    assert worker.spec.bucket == worker.asked[0]["headers"][BUCKET] == "deployment-d"


async def test_a_trainer_that_is_tied_to_a_deployment_is_attached_to_no_other(
    ask, script, running, deployed, base
):
    await running("tied", {"hotLoadDeploymentId": "own"})
    await deployed("d")
    body = {"hotLoadTrainerJob": "accounts/me/rlorTrainerJobs/tied"}

    for method, path, more in (
        ("PATCH", f"{DEPLOYMENTS}/d", {}),
        ("POST", f"{DEPLOYMENTS}?deploymentId=new", {"baseModel": base}),
    ):
        message = await ask.refused(400, method, path, body | more)
        assert "accounts/me/rlorTrainerJobs/tied" in message
        assert "'own'" in message
        assert "exactly one of hotLoadTrainerJob" in message
    _, content = await ask("GET", f"{DEPLOYMENTS}/d")
    assert "hotLoadTrainerJob" not in content


async def test_a_trainer_that_never_was_cannot_be_attached(ask, running, deployed, base):
    await running("known")
    await deployed("d")
    body = {"hotLoadTrainerJob": "accounts/me/rlorTrainerJobs/other"}
    expected = "trainer job must be one of ['known'], got 'other'"

    assert await ask.refused(404, "PATCH", f"{DEPLOYMENTS}/d", body) == expected
    path = f"{DEPLOYMENTS}?deploymentId=new"
    assert await ask.refused(404, "POST", path, body | {"baseModel": base}) == expected


async def test_deleted_it_is_forgotten_and_its_id_is_free(ask, script, deployed, tmp_path, plane):
    first = await deployed()
    served = plane.context.data_dir / "deployments" / "d" / "serving.json"
    served.parent.mkdir(parents=True)
    served.write_text("{}")
    for _ in range(MOST_RESTARTS):
        script.last("d").dies()
        script.last("d").starts()

    assert await ask("DELETE", f"{DEPLOYMENTS}/d?ignoreChecks=true&hard=true") == (200, {})
    await ask.refused(404, "GET", f"{DEPLOYMENTS}/d")
    await ask.refused(404, "POST", COMPLETIONS, sampled())
    assert not served.exists()
    last = script.last("d")
    assert (first.stops, last.stops) == (0, 1)
    last.dies("late")
    await ask.refused(404, "GET", f"{DEPLOYMENTS}/d")

    worker = await deployed(displayName="another")
    assert await state(ask) == ("READY", None)
    worker.dies()
    assert (await state(ask))[0] == "UPDATING", "the old one's deaths are not the new one's"


async def test_asking_again_for_the_same_deployment_starts_nothing(ask, script, created, base):
    for body in ({"baseModel": base}, created):
        assert await ask("POST", CREATE, body) == (200, created)
    assert len(script.started) == 1

    message = await ask.refused(409, "POST", CREATE, body | {"displayName": "another"})
    assert "deploymentId must be new, got 'd'" in message


async def test_the_official_clients_request_is_accepted(ask, script, base):
    body = {
        "baseModel": base,
        "description": "Fireworks training deployment",
        "minReplicaCount": 1,
        "maxReplicaCount": 1,
        "enableHotLoad": True,
        "forTraining": True,
        "hotLoadBucketType": "FW_HOSTED",
        "acceleratorType": "NVIDIA_H200_141GB",
        "placement": {"region": "US_OHIO_1"},
        "annotations": {"a": "b"},
        "preemptible": False,
    }
    query = "skipShapeValidation=true&acceptShapelessRisk=true&disableSpeculativeDecoding=true"

    status, content = await ask("POST", f"{CREATE}&{query}", body)

    assert (status, content["state"]) == (200, "CREATING")
    assert content["hotLoadBucketType"] == "FW_HOSTED"
    assert len(script.started) == 1


async def test_a_deployments_shape_gives_its_length_and_must_be_of_its_model(ask, script, base):
    model = "accounts/fireworks/models/qwen3-8b"
    shape = "accounts/fireworks/deploymentShapes/qwen3-8b/versions/1"

    message = await ask.refused(400, "POST", CREATE, {"baseModel": base, "deploymentShape": shape})
    assert shape in message
    assert model in message
    status, _ = await ask("POST", CREATE, {"baseModel": model, "deploymentShape": shape})

    assert status == 200
    assert script.last("d").spec.max_seq_len == 40960


SHAPED = """
[shapes."accounts/me/trainingShapes/two"]
base_model = {base!r}
dtype = "bfloat16"
engine = "vllm"
engine_options = {{ tensor_parallel_size = 2, drain = "abort" }}
replicas = 2
"""


@pytest.fixture
async def ask_shaped(make_plane, script, base, tmp_path):
    """A platform whose catalog has a shape of vLLM with two replicas."""
    path = tmp_path / "shapes.toml"
    path.write_text(SHAPED.format(base=base))
    asked = PlatformClient(make_plane(script, "sqlite://", catalog=read_catalog(path)))
    yield asked
    await asked.close()


SHAPE = {"deploymentShape": "accounts/me/deploymentShapes/two/versions/1"}


async def test_a_shape_decides_what_a_request_leaves_open(ask_shaped, script, base):
    body = {"baseModel": base} | SHAPE

    status, content = await ask_shaped("POST", CREATE, body)
    assert (status, content["maxReplicaCount"]) == (200, 2)
    spec = script.last("d").spec
    assert (spec.engine, spec.replicas, spec.dtype) == ("vllm", 2, "bfloat16")
    assert spec.engine_options == {"tensor_parallel_size": 2, "drain": "abort"}
    assert (await ask_shaped("POST", CREATE, body))[0] == 200  # asked for likewise

    own = {"engine_options": {"drain": "wait"}, "dtype": "float32"}
    body |= {"maxReplicaCount": 3, "extraValues": own}
    await ask_shaped("POST", CREATE.replace("=d", "=e"), body)
    spec = script.last("e").spec
    assert (spec.engine, spec.replicas, spec.dtype) == ("vllm", 3, "float32")
    assert spec.engine_options == {"tensor_parallel_size": 2, "drain": "wait"}


async def test_started_again_it_has_the_replicas_of_its_shape(ask_shaped, script, base):
    await ask_shaped("POST", CREATE, {"baseModel": base} | SHAPE)
    script.last("d").starts()
    await ask_shaped("PATCH", f"{DEPLOYMENTS}/d", NO_REPLICA)

    _, content = await ask_shaped("PATCH", f"{DEPLOYMENTS}/d", {"minReplicaCount": 1})

    assert (content["state"], content["maxReplicaCount"]) == ("UPDATING", 2)
    assert script.last("d").spec.replicas == 2


async def test_a_deployment_without_shape_has_one_replica_and_the_dtype_of_its_device(
    ask, script, base
):
    _, content = await ask("POST", CREATE, {"baseModel": base})

    assert content["maxReplicaCount"] == 1
    spec = script.last("d").spec
    assert (spec.engine, spec.replicas, spec.dtype) == ("embedded", 1, None)


async def test_extra_values_reach_the_deployment(ask, script, base):
    more = {"max_batch_size": 3, "max_context_length": "64", "dtype": "bfloat16", "device": "cpu"}
    body = {"baseModel": base, "extraValues": more | {"tokenizer": base}}

    await ask("POST", CREATE, body)

    spec = script.last("d").spec
    assert (spec.max_batch_size, spec.max_seq_len) == (3, 64)
    assert (spec.dtype, spec.device, spec.tokenizer) == ("bfloat16", "cpu", base)


async def test_a_deployment_has_room_for_as_many_adapters_as_asked(ask, script, base):
    await ask("POST", CREATE, {"baseModel": base, "maxAdapters": 8})

    assert script.last("d").spec.max_adapters == 8


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"maxAdapters": -1}, "maxAdapters must be in 0..1024, got -1"),
        ({"maxAdapters": 1025}, "maxAdapters must be in 0..1024, got 1025"),
        (
            {"maxAdapters": 2, "extraValues": {"engine": "vllm"}},
            "maxAdapters must be absent with engine 'vllm', got 2",
        ),
    ],
)
async def test_adapters_that_cannot_be_are_refused(ask, base, fields, message):
    refusal = await ask.refused(400, "POST", CREATE, {"baseModel": base, **fields})
    assert message in refusal


async def test_who_waits_for_a_deployment_hears_of_it_at_the_change(ask, script, created):
    waiting = asyncio.create_task(
        ask("GET", f"{DEPLOYMENTS}/d?waitForState=READY,FAILED&timeoutS=25")
    )
    await asyncio.sleep(0.1)
    assert not waiting.done()

    start_s = time.monotonic()
    await asyncio.to_thread(script.last("d").starts)

    assert (await waiting)[1]["state"] == "READY"
    assert time.monotonic() - start_s < 1


async def test_ready_deployments_are_openai_models(ask, script, deployed, base):
    await deployed("d")
    await ask("POST", f"{DEPLOYMENTS}?deploymentId=starting", {"baseModel": base})

    _, listed = await ask("GET", "/v1/models")
    assert [model["id"] for model in listed["data"]] == ["accounts/me/deployments/d"]
    _, value = await ask("GET", "/v1/models/accounts/me/deployments/d")
    assert value == listed["data"][0]
    await ask.refused(404, "GET", "/v1/models/accounts/me/deployments/other")


@pytest.mark.slow
def test_scaling_down_and_up_at_once_leaves_one_replica_or_none(plane, script, base):
    plane.deployments.create("d", Deployment(base_model=base))
    script.last("d").starts()
    down, up = (DeploymentPatch(min_replica_count=n, max_replica_count=n) for n in (0, 1))
    gate = threading.Barrier(4)

    def scale(change):
        gate.wait()
        for _ in range(10):
            plane.deployments.patch("d", change)

    threads = [threading.Thread(target=scale, args=(change,)) for change in (down, up) * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    living = [worker for worker in script.started if worker.stops == 0]
    assert all(worker.stops <= 1 for worker in script.started)
    wanted = Deployment.from_dict(plane.store.deployments.get("d").body).max_replica_count
    assert len(living) == wanted
