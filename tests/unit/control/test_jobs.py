import asyncio
import threading
import time

import pytest

from hearth.control.workers import LiveEntry, LiveTable
from hearth.wire.fireworks import TrainerJob

TRAINER = "/training/v1/rlorTrainerJobs/me"
JOBS = "rlorTrainerJobs"
MODEL = "accounts/fireworks/models/qwen3-8b"
SHAPE = "accounts/fireworks/trainingShapes/qwen3-8b"
CREATE = f"{JOBS}?rlorTrainerJobId=j"


async def state(ask, id="j"):
    _, content = await ask("GET", f"{JOBS}/{id}")
    return content["state"].removeprefix("JOB_STATE_"), content.get("statusMessage")


async def test_a_job_is_created_runs_is_cancelled_resumed_and_deleted(ask, script, job):
    status, created = await ask("POST", CREATE, job())
    assert (status, created["state"]) == (200, "JOB_STATE_CREATING")
    assert created["name"] == "accounts/me/rlorTrainerJobs/j"
    assert created["bucket"] == "trainer-j"

    first = script.last("j")
    first.starts()
    assert await state(ask) == ("RUNNING", None)

    status, cancelled = await ask("POST", f"{JOBS}/j:cancel")
    assert (status, cancelled["state"]) == (200, "JOB_STATE_CANCELLED")
    assert cancelled["statusMessage"] == "cancelled by request"
    assert first.stops == 1

    status, resumed = await ask("POST", f"{JOBS}/j:resume")
    assert (status, resumed["state"]) == (200, "JOB_STATE_CREATING")
    assert "statusMessage" not in resumed
    second = script.last("j")
    assert second is not first
    assert second.spec == first.spec
    second.starts()
    assert await state(ask) == ("RUNNING", None)

    assert await ask("DELETE", f"{JOBS}/j") == (200, {})
    assert await state(ask) == ("DELETED", "deleted by request")
    assert (first.stops, second.stops) == (1, 1)
    _, listed = await ask("GET", JOBS)
    assert listed["rlorTrainerJobs"] == []


async def test_a_running_job_is_reached_at_its_trainers_own_path(ask, running):
    worker = await running()

    status, content = await ask("POST", f"{TRAINER}/j/api/v1/forward?x=1", {"a": 1})

    assert (status, content["worker"]) == (200, "trainer-j")
    assert worker.asked[-1]["path"] == "/api/v1/forward"
    assert worker.asked[-1]["body"] == b'{"a":1}'


async def test_a_trainer_that_does_not_run_answers_425_or_410_with_what_to_do(ask, script, created):
    path = f"{TRAINER}/j/api/v1/healthz"
    assert "got JOB_STATE_CREATING: ask again soon" in await ask.refused(425, "GET", path)
    script.last("j").starts()
    await ask("POST", f"{JOBS}/j:cancel")
    assert "(cancelled by request): resume it" in await ask.refused(410, "GET", path)
    await ask("DELETE", f"{JOBS}/j")
    assert "(deleted by request): create a new one" in await ask.refused(410, "GET", path)

    message = await ask.refused(404, "GET", f"{TRAINER}/other/api/v1/healthz")
    assert message == "trainer job must be one of [], got 'other'"


async def test_a_trainer_killed_before_it_is_used_is_started_once_more(ask, script, created):
    script.last("j").is_killed()
    assert (await state(ask), len(script.started)) == (("CREATING", None), 2)

    script.last("j").is_killed()
    assert (await state(ask))[0] == "FAILED"
    assert len(script.started) == 2

    await ask("POST", f"{JOBS}/j:resume")
    script.last("j").is_killed()
    script.last("j").starts()
    await ask("GET", f"{TRAINER}/j/api/v1/healthz")
    assert (await state(ask), len(script.started)) == (("RUNNING", None), 4)

    script.last("j").is_killed()  # the second
    assert (await state(ask))[0] == "FAILED"


async def test_a_trainer_killed_after_it_answered_its_health_alone_is_started_once_more(
    ask, script, running
):
    first = await running()
    await ask("GET", f"{TRAINER}/j/api/v1/healthz")
    first.is_killed()
    assert (await state(ask), len(script.started)) == (("CREATING", None), 2)
    script.last("j").starts()
    assert await state(ask) == ("RUNNING", None)


async def test_a_trainer_killed_after_it_was_used_waits_for_its_client(ask, script, running):
    worker = await running()
    await ask("POST", f"{TRAINER}/j/api/v1/create_model", {})
    worker.is_killed()
    assert ((await state(ask))[0], len(script.started)) == ("FAILED", 1)


async def test_a_start_that_fails_and_a_death_are_failed_with_what_is_known(ask, script, created):
    script.last("j").dies("could not start: no memory")
    assert await state(ask) == ("FAILED", "could not start: no memory")

    await ask("POST", f"{JOBS}/j:resume")
    script.last("j").starts()
    script.last("j").dies("ended by SIGKILL")

    assert await state(ask) == ("FAILED", "ended by SIGKILL")
    message = await ask.refused(410, "GET", f"{TRAINER}/j/api/v1/healthz")
    assert message.endswith("got JOB_STATE_FAILED (ended by SIGKILL): resume it")
    assert len(script.started) == 2, "a dead trainer is not started unasked"


async def test_late_news_of_an_old_worker_changes_nothing(ask, script, running):
    first = await running()
    await ask("POST", f"{JOBS}/j:cancel")

    first.starts()
    assert await state(ask) == ("CANCELLED", "cancelled by request")
    first.dies("late")
    assert await state(ask) == ("CANCELLED", "cancelled by request")

    await ask("POST", f"{JOBS}/j:resume")
    first.starts()
    assert (await state(ask))[0] == "CREATING"
    await ask.refused(425, "GET", f"{TRAINER}/j/api/v1/healthz")
    first.dies("late")
    assert (await state(ask))[0] == "CREATING"
    script.last("j").starts()
    first.dies("later")
    assert await state(ask) == ("RUNNING", None)

    await ask("DELETE", f"{JOBS}/j")
    script.last("j").starts()
    assert (await state(ask))[0] == "DELETED"
    await ask.refused(410, "GET", f"{TRAINER}/j/api/v1/healthz")


async def test_asking_again_for_the_same_job_starts_nothing(ask, script, created, job):
    assert await ask("POST", CREATE, job()) == (200, created)
    script.last("j").starts()
    status, again = await ask("POST", CREATE, job())
    assert (status, again["state"]) == (200, "JOB_STATE_RUNNING")
    assert len(script.started) == 1


async def test_what_a_client_read_it_may_send_again(ask, script, running, job):
    await running()
    _, read = await ask("GET", f"{JOBS}/j")

    assert await ask("POST", CREATE, read) == (200, read)
    assert len(script.started) == 1


async def test_another_job_under_a_taken_id_is_409(ask, created, job):

    message = await ask.refused(409, "POST", CREATE, job(loraRank=8))

    assert "rlorTrainerJobId must be new, got 'j'" in message
    assert "was asked for otherwise" in message


async def test_the_id_of_a_deleted_job_is_never_given_again(ask, created, job):
    await ask("DELETE", f"{JOBS}/j")

    assert "was deleted" in await ask.refused(409, "POST", CREATE, job())
    message = await ask.refused(409, "POST", f"{JOBS}/j:resume")
    assert "got JOB_STATE_DELETED of 'j': create a new one" in message


@pytest.mark.parametrize("action", ["POST :resume", "POST :cancel", "GET ", "DELETE "])
async def test_an_unknown_job_lists_the_known_ones(ask, running, action):
    await running("known")
    method, suffix = action.split(" ")

    message = await ask.refused(404, method, f"{JOBS}/other{suffix}")

    assert message == "trainer job must be one of ['known'], got 'other'"


async def test_a_job_that_has_ended_is_not_cancelled(ask, script, running):
    worker = await running()
    worker.dies("ended by SIGKILL")

    _, content = await ask("POST", f"{JOBS}/j:cancel")

    assert (content["state"], content["statusMessage"]) == ("JOB_STATE_FAILED", "ended by SIGKILL")


async def test_resuming_a_job_that_runs_changes_nothing(ask, script, running):
    await running()

    status, content = await ask("POST", f"{JOBS}/j:resume")

    assert (status, content["state"], len(script.started)) == (200, "JOB_STATE_RUNNING", 1)


async def test_an_unknown_model_lists_the_registered_ones(ask, job):
    body = job(baseModel="accounts/fireworks/models/nothing")

    message = await ask.refused(400, "POST", CREATE, body)

    assert "got 'accounts/fireworks/models/nothing': registered are [" in message
    assert MODEL in message
    assert "HEARTH_CATALOG" in message
    body = job(baseModel="/nowhere/at/all")
    message = await ask.refused(400, "POST", CREATE, body)
    assert message == "base_model must be an existing folder, got '/nowhere/at/all'"
    _, listed = await ask("GET", JOBS)
    assert listed["rlorTrainerJobs"] == []


@pytest.mark.parametrize(
    ("status", "shape", "config", "parts"),
    [
        (
            404,
            "accounts/x/trainingShapes/none",
            {"baseModel": MODEL},
            ["got 'accounts/x/trainingShapes/none'", SHAPE, f"{SHAPE}-forward"],
        ),
        (400, SHAPE, {}, [SHAPE, MODEL]),
    ],
    ids=["unknown", "of another model"],
)
async def test_a_shape_that_does_not_fit_is_refused_with_the_names(
    ask, job, status, shape, config, parts
):
    path = f"{CREATE}&trainingShape={shape}"

    message = await ask.refused(status, "POST", path, job(**config))

    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("query", "more", "config", "is_forward_only"),
    [
        ("", {"forwardOnly": True}, {}, True),
        ("", {}, {"extraArgs": ["--forward-only"]}, True),
        (f"&trainingShape={SHAPE}-forward", {}, {"baseModel": MODEL}, True),
        (f"&trainingShape={SHAPE}-forward/versions/1", {}, {"baseModel": MODEL}, True),
        (f"&trainingShape={SHAPE}", {}, {"baseModel": MODEL, "extraArgs": ["--other"]}, False),
    ],
    ids=["flag", "extra argument", "shape", "versioned shape", "unasked"],
)
async def test_a_trainer_is_forward_only_when_anything_asks_for_it(
    ask, script, job, query, more, config, is_forward_only
):
    _, content = await ask("POST", f"{CREATE}{query}", job(more, **config))

    assert content["forwardOnly"] is is_forward_only
    assert script.last("j").spec.forward_only is is_forward_only


@pytest.mark.parametrize(
    ("config", "expected"),
    [({}, 4096), ({"maxContextLength": 64}, 64), ({"baseModel": MODEL}, 40960)],
    ids=["the model's own", "as asked", "as registered"],
)
async def test_the_longest_context_is_answered_at_once_where_it_is_known(
    ask, job, config, expected
):
    _, content = await ask("POST", CREATE, job(**config))

    assert content["trainingConfig"]["maxContextLength"] == expected


async def test_the_longest_context_of_a_model_nobody_knows_is_the_trainers_own(
    ask, script, job, make_plane
):
    body = job(baseModel="somebody/unheard-of")
    _, created = await ask("POST", CREATE, body)
    assert "maxContextLength" not in created["trainingConfig"]
    assert script.last("j").spec.max_seq_len is None

    await asyncio.to_thread(script.last("j").starts)

    _, content = await ask("GET", f"{JOBS}/j")
    assert content["state"] == "JOB_STATE_RUNNING"
    assert content["trainingConfig"]["maxContextLength"] == 77
    status, again = await ask("POST", CREATE, body)
    assert (status, again) == (200, content), "what was learned is no difference"
    await ask("POST", f"{JOBS}/j:cancel")
    await ask("POST", f"{JOBS}/j:resume")
    assert script.last("j").spec.max_seq_len is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"maxContextLength": 0}, "maxContextLength must be >= 1, got 0"),
        ({"maxContextLength": -1}, "maxContextLength must be >= 1, got -1"),
        ({"loraRank": -1}, "loraRank must be >= 0, got -1"),
    ],
)
async def test_a_length_or_rank_that_breaks_its_rule_is_refused(ask, job, config, message):
    assert await ask.refused(400, "POST", CREATE, job(**config)) == message


@pytest.mark.parametrize(
    ("config", "more", "field"),
    [
        ({}, {"nodeCount": 2}, "nodeCount"),
        ({}, {"trainerReplicaCount": 2}, "trainerReplicaCount"),
        ({"acceleratorCount": 2}, {}, "trainingConfig.acceleratorCount"),
    ],
    ids=["nodes", "replicas", "accelerators"],
)
async def test_more_machines_than_a_trainer_gets_are_refused(ask, script, job, config, more, field):
    message = await ask.refused(400, "POST", CREATE, job(more, **config))

    assert message.startswith(f"{field} must be 1, got 2: a trainer is one process here, or as")
    assert script.started == []


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"dtype": "int8"},
            r"extraValues.dtype must be one of ['float32', 'bfloat16'], got 'int8'",
        ),
        ({"device": 3}, "extraValues.device must be a text, got 3"),
        ({"threads": 0}, "extraValues.threads must be a whole number >= 1, got 0"),
        ({"threads": 10**9}, "extraValues.threads must be at most 4096, got 1000000000"),
        ({"threads": True}, "extraValues.threads must be a whole number >= 1, got True"),
        (
            {"micro_batch_tokens": "many"},
            "extraValues.micro_batch_tokens must be a whole number >= 1, got 'many'",
        ),
    ],
)
async def test_an_extra_value_that_breaks_its_rule_is_named(ask, script, job, more, message):
    assert await ask.refused(400, "POST", CREATE, job({"extraValues": more})) == message
    assert script.started == []


async def test_extra_values_reach_the_trainer(ask, script, job):
    more = {"dtype": "bfloat16", "device": "cpu", "threads": "2", "micro_batch_tokens": 512}
    more |= {"recompute_above": 4096}

    await ask("POST", CREATE, job({"extraValues": more}))

    spec = script.last("j").spec
    assert (spec.dtype, spec.device) == ("bfloat16", "cpu")
    assert (spec.threads, spec.micro_batch_tokens, spec.recompute_above) == (2, 512, 4096)


async def test_several_ranks_share_the_threads(ask, script, job):
    script.placement = "process"
    more = {"ranks": 2, "rank_timeout_s": 60, "offload_optimizer": True, "threads": 5}

    await ask("POST", CREATE, job({"extraValues": more}))
    await ask("POST", f"{JOBS}?rlorTrainerJobId=i", job({"extraValues": {"ranks": 64}}))

    spec = script.last("j").spec
    assert (spec.ranks, spec.threads, spec.rank_timeout_s) == (2, 2, 60)
    assert spec.offload_optimizer is True
    assert script.last("i").spec.threads == 1


@pytest.mark.parametrize(
    ("placement", "more", "message"),
    [
        ("inline", {"ranks": 2}, "ranks must be 1 with the inline placement, got 2"),
        ("process", {"ranks": 65}, "extraValues.ranks must be at most 64, got 65"),
        ("ray", {"ranks": 10**6}, "extraValues.ranks must be at most 1024, got 1000000"),
        ("process", {"offload_optimizer": True}, "offload_optimizer must be off with ranks=1"),
        (
            "process",
            {"ranks": 2, "offload_optimizer": "yes"},
            "extraValues.offload_optimizer must be true or false, got 'yes'",
        ),
        (
            "process",
            {"ranks": 2, "context_parallel": 2},
            "context_parallel must be 1, got 2: it is not supported on CPU",
        ),
    ],
)
async def test_ranks_that_cannot_be_are_refused(ask, script, job, placement, more, message):
    script.placement = placement

    assert message in await ask.refused(400, "POST", CREATE, job({"extraValues": more}))
    assert script.started == []


async def test_the_deployment_of_the_query_is_the_one_the_trainer_publishes_into(ask, script, job):
    path = f"{CREATE}&deploymentId=d"
    _, content = await ask("POST", path, job())
    assert content["hotLoadDeploymentId"] == "d"
    assert content["bucket"] == "deployment-d"
    assert script.last("j").spec.bucket == "deployment-d"

    for again in (path, CREATE):
        assert await ask("POST", again, job({"hotLoadDeploymentId": "d"})) == (200, content)

    more = {"hotLoadDeploymentId": "accounts/me/deployments/e"}
    message = await ask.refused(400, "POST", path, job(more))
    assert "'accounts/me/deployments/e', got 'd'" in message


@pytest.mark.parametrize("change", ["ready", "failed", "cancelled", "deleted"])
async def test_who_waits_for_a_state_hears_of_it_at_the_change(ask, script, created, change):
    wanted = {"ready": "RUNNING", "failed": "FAILED"}.get(change, change.upper())
    waiting = asyncio.create_task(
        ask("GET", f"{JOBS}/j?waitForState=JOB_STATE_ARCHIVED,JOB_STATE_{wanted}&timeoutS=25")
    )
    await asyncio.sleep(0.1)
    assert not waiting.done()

    start_s = time.monotonic()
    if change == "ready":
        await asyncio.to_thread(script.last("j").starts)
    elif change == "failed":
        await asyncio.to_thread(script.last("j").dies)
    elif change == "cancelled":
        await ask("POST", f"{JOBS}/j:cancel")
    else:
        await ask("DELETE", f"{JOBS}/j")
    _, content = await waiting

    assert time.monotonic() - start_s < 1
    assert content["state"] == f"JOB_STATE_{wanted}"


async def test_a_look_at_a_job_that_starts_is_held_until_it_runs(ask, script, created, looks):
    looks(60.0)
    looking = asyncio.create_task(ask("GET", f"{JOBS}/j"))
    await asyncio.sleep(0.1)
    assert not looking.done()

    await asyncio.to_thread(script.last("j").starts)

    assert (await looking)[1]["state"] == "JOB_STATE_RUNNING"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("starts", "timeout_s", "least_s"),
    [(False, 0.2, 0.2), (True, 25, 0)],
    ids=["when time is over", "at once in that state"],
)
async def test_who_waits_is_told_how_it_stands(ask, script, created, starts, timeout_s, least_s):
    if starts:
        script.last("j").starts()
    start_s = time.monotonic()

    _, content = await ask("GET", f"{JOBS}/j?waitForState=JOB_STATE_RUNNING&timeoutS={timeout_s}")

    assert least_s <= time.monotonic() - start_s < 1
    assert content["state"] == ("JOB_STATE_RUNNING" if starts else "JOB_STATE_CREATING")


async def test_who_waits_when_the_platform_ends_is_told_how_it_stands(ask, created, plane):
    path = f"{JOBS}/j?waitForState=JOB_STATE_RUNNING&timeoutS=25"
    waiting = asyncio.create_task(ask("GET", path))
    await asyncio.sleep(0.1)
    assert not waiting.done()

    plane.store.release_waiters()

    for answer in (waiting, ask("GET", path)):
        _, content = await asyncio.wait_for(answer, 1)
        assert content["state"] == "JOB_STATE_CREATING"


@pytest.mark.parametrize("timeout", ["nan", "soon"])
async def test_a_time_that_is_no_number_is_refused(ask, running, timeout):
    await running()

    message = await ask.refused(400, "GET", f"{JOBS}/j?waitForState=X&timeoutS={timeout}")

    assert "timeoutS must be" in message


async def test_waiting_for_an_unknown_job_is_404_at_once(ask):
    await ask.refused(404, "GET", f"{JOBS}/j?waitForState=JOB_STATE_RUNNING&timeoutS=25")


def test_of_two_that_create_one_job_at_once_one_starts_it(plane, script, job):
    made, gate = [], threading.Barrier(4)
    asked = TrainerJob.from_dict(job())

    def create():
        gate.wait()
        made.append(plane.jobs.create("j", asked, None))

    threads = [threading.Thread(target=create) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(made) == 4
    assert len({created.create_time for created in made}) == 1
    assert len(script.started) == 1


def test_a_cancel_while_the_worker_is_being_asked_for_stops_it(plane, script, job, monkeypatch):
    begun, may_return = threading.Event(), threading.Event()
    start = type(script).start

    class Slow(type(script)):
        def start(self, spec, watcher):
            begun.set()
            assert may_return.wait(5)
            return start(self, spec, watcher)

    script.__class__ = Slow
    creating = threading.Thread(
        target=plane.jobs.create, args=("j", TrainerJob.from_dict(job()), None)
    )
    creating.start()
    assert begun.wait(5)
    cancelling = threading.Thread(target=plane.jobs.cancel, args=("j",))
    cancelling.start()
    may_return.set()
    creating.join()
    cancelling.join()

    assert plane.jobs.get("j").state == "JOB_STATE_CANCELLED"
    assert script.last("j").stops == 1
    script.last("j").starts()
    assert plane.jobs.get("j").state == "JOB_STATE_CANCELLED"
    assert plane.jobs.live.endpoint("j") is None


def test_news_that_come_before_the_launcher_returns_are_heard(plane, script, job):
    class Eager(type(script)):
        def start(self, spec, watcher):
            worker = super().start(spec, watcher)
            worker.starts()
            return worker

    script.__class__ = Eager
    plane.jobs.create("j", TrainerJob.from_dict(job()), None)

    assert plane.jobs.get("j").state == "JOB_STATE_RUNNING"
    assert plane.jobs.find_endpoint("j").app is not None


def test_a_worker_that_is_taken_away_while_it_is_asked_does_not_come_back() -> None:
    table = LiveTable()

    class Leaving(LiveEntry):
        """Taken away by another thread just after it was looked at."""

        def __getattribute__(self, name: str) -> object:
            if name == "is_used":
                table.take_worker("j")
            return super().__getattribute__(name)

    table.put("j", Leaving())
    table.note_use("j")

    assert table.get("j") is None
