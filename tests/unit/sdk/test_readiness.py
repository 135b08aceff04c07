import asyncio
import itertools
import time

import pytest

from hearth.errors import EngineError, NotFoundError
from hearth.sdk import TrainerJobConfig, TrainerJobManager, WaitPolicy

BASE = "accounts/fireworks/models/tiny"
JOBS = "/v1/accounts/me/rlorTrainerJobs"
JOB = f"{JOBS}/policy"
HEALTH = "/training/v1/rlorTrainerJobs/me/policy/api/v1/healthz"


@pytest.fixture
def healthy(peer, answer):
    peer.on("GET", HEALTH, answer({"status": "ok"}))


def test_a_job_is_ready_when_it_runs_and_its_trainer_is_healthy(peer, answer, manager, job):
    peer.on("POST", JOBS, job("PENDING"))
    peer.on("GET", JOB, job("PENDING"), job("CREATING"), job("RUNNING"))
    peer.on("GET", HEALTH, answer(status=425), answer({"status": "ok"}))
    statuses: list[str] = []

    endpoint = manager.create_and_wait(
        TrainerJobConfig(base_model=BASE, job_id="policy"), timeout_s=5, on_status=statuses.append
    )

    assert endpoint.base_url == f"{peer.url}/training/v1/rlorTrainerJobs/me/policy"
    assert endpoint.base_url == manager.trainer_url("policy")
    assert endpoint.job_id == "policy"
    assert endpoint.max_context_length == 512
    assert statuses == ["JOB_STATE_PENDING", "JOB_STATE_CREATING", "JOB_STATE_RUNNING"]
    assert len(peer.requests("GET", HEALTH)) == 2


@pytest.mark.slow
def test_a_server_that_holds_the_question_is_asked_once_per_change(peer, answer, healthy, job):
    """The question names every other state, and is answered when one of them is reached."""
    reached = time.monotonic() + 0.3

    async def hold(seen):
        while "waitForState" in seen.query and time.monotonic() < reached:
            await asyncio.sleep(0.005)
        return job("RUNNING") if time.monotonic() >= reached else job("CREATING")

    peer.handle("GET", JOB, hold)
    manager = TrainerJobManager("key", "me", peer.url, wait_policy=WaitPolicy(hold_s=25))

    manager.wait_for_ready("policy", timeout_s=10)

    questions = peer.requests("GET", JOB)
    assert len(questions) == 2
    wanted = questions[1].query["waitForState"].split(",")
    assert "JOB_STATE_RUNNING" in wanted
    assert "JOB_STATE_FAILED" in wanted
    assert "JOB_STATE_CREATING" not in wanted
    assert float(questions[1].query["timeoutS"]) == pytest.approx(10, abs=2)
    assert time.monotonic() - reached < 3


@pytest.mark.slow
def test_a_server_that_does_not_hold_the_question_is_asked_at_growing_intervals(peer, healthy, job):
    times: list[float] = []

    async def at_once(seen):
        times.append(time.monotonic())
        return job("CREATING") if len(times) < 6 else job("RUNNING")

    peer.handle("GET", JOB, at_once)
    wait_policy = WaitPolicy(hold_s=25, first_s=0.02, longest_s=0.08)

    TrainerJobManager("key", "me", peer.url, wait_policy=wait_policy).wait_for_ready("policy")

    pauses = [later - earlier for earlier, later in itertools.pairwise(times[1:])]
    assert all(
        pause >= least for pause, least in zip(pauses, [0.02, 0.04, 0.08, 0.08], strict=True)
    )
    assert len(times) == 6


UNREADY = {
    "failed": (
        [("CREATING", None), ("FAILED", "out of memory on cuda:0")],
        {},
        "JOB_STATE_FAILED: out of memory on cuda:0",
    ),
    **{
        state: ([(state, None)], {}, "reconnect_and_wait resumes it")
        for state in ("CANCELLED", "COMPLETED", "PAUSED")
    },
    "starts too long": (
        [("CREATING", "loading shard 3 of 8")],
        {"timeout_s": 0.05},
        r"within 0\.05 s, still JOB_STATE_CREATING: loading sh",
    ),
    "waits for room too long": (
        [("PENDING", None)],
        {"pending_timeout_s": 0.05},
        r"within 0\.05 s, still JOB_STATE_PENDING",
    ),
}


@pytest.mark.parametrize(("states", "options", "message"), UNREADY.values(), ids=UNREADY)
def test_a_job_that_does_not_become_ready_is_an_error_that_says_how_it_stands(
    peer, manager, job, states, options, message
):
    peer.on("GET", JOB, *(job(*state) for state in states))

    with pytest.raises(EngineError, match=message):
        manager.wait_for_ready("policy", **options)


def test_an_end_that_is_just_being_left_is_no_error(peer, healthy, manager, job):
    peer.on("GET", JOB, job("CANCELLED"), job("CANCELLED"), job("CREATING"), job("RUNNING"))

    assert manager.wait_for_ready("policy").job_id == "policy"


def test_a_deleted_or_unknown_job_is_not_found(peer, manager, job):
    peer.on("GET", JOB, job("DELETED"))

    with pytest.raises(NotFoundError, match="create another job"):
        manager.wait_for_ready("policy")
    with pytest.raises(NotFoundError):
        manager.wait_for_existing("nope")


@pytest.mark.slow
def test_waiting_for_room_does_not_use_the_time_to_start(peer, healthy, manager, job):
    peer.on("GET", JOB, *[job("PENDING", delay_s=0.05)] * 4, job("RUNNING"))

    assert manager.wait_for_ready("policy", timeout_s=0.05).job_id == "policy"


@pytest.mark.parametrize("state", ["FAILED", "CANCELLED", "PAUSED", "COMPLETED"])
def test_reconnecting_resumes_a_job_that_has_ended(peer, answer, healthy, manager, job, state):
    peer.on("GET", JOB, job(state), job(state), job("CREATING"), job("RUNNING"))
    peer.on("POST", f"{JOB}:resume", answer({}))

    assert manager.reconnect_and_wait("policy", timeout_s=5).job_id == "policy"
    assert len(peer.requests("POST", f"{JOB}:resume")) == 1


def test_reconnecting_to_a_living_job_only_waits(peer, healthy, manager, job):
    peer.on("GET", JOB, job("CREATING"), job("RUNNING"))

    manager.reconnect_and_wait("policy", timeout_s=5)

    assert [line for line in peer.log if line.startswith("POST")] == []


def test_a_resumed_job_that_fails_again_is_an_error(peer, answer, manager, job):
    peer.on("GET", JOB, job("FAILED"), job("FAILED"), job("CREATING"), job("FAILED", "again"))
    peer.on("POST", f"{JOB}:resume", answer({}))

    with pytest.raises(EngineError, match="FAILED: again"):
        manager.reconnect_and_wait("policy", timeout_s=5)


def test_waits_overlap_as_futures_and_may_be_awaited(peer, healthy, manager, job):
    peer.on("GET", JOB, job("RUNNING", delay_s=0.05))

    async def both():
        return await asyncio.gather(
            manager.wait_for_ready_async("policy"), manager.wait_for_ready_async("policy")
        )

    assert [endpoint.job_id for endpoint in asyncio.run(both())] == ["policy", "policy"]
    assert peer.most_in_flight == 2
