import asyncio
import os
import signal
import time
from collections.abc import Callable

import pytest

from hearth.errors import ClosedError, ConfigError, EngineError
from hearth.sdk import DeploymentSampler
from training.platform.run_infra import load_tokenizer, provision
from training.quickstart import MODEL
from training.recipes.rl_loop import Config
from training.run.command import run_until_signal
from training.utils import ResourceCleanup

BASE = str(MODEL)
JOBS = "/v1/accounts/me/rlorTrainerJobs"
DEPLOYMENTS = "/v1/accounts/me/deployments"


@pytest.fixture
def parts(stage):
    """Two jobs and two deployments."""
    for name in ("a", "b"):
        stage.create_job(name)
        stage.create_deployment(name)
    return stage


def register(cleanup: ResourceCleanup) -> None:
    for name in ("a", "b"):
        cleanup.trainer(name)
        cleanup.deployment(name)


def run(stage, body: Callable[[], None], *callbacks: Callable[[], None]) -> None:
    """A scope with two jobs and two deployments around ``body``."""
    with stage.cleanup() as cleanup:
        register(cleanup)
        for callback in callbacks:
            cleanup.callback("callback", callback)
        body()


def nothing() -> None:
    """A body that ends well."""


def boom() -> None:
    raise RuntimeError("a step that nobody foresaw")


def fail() -> None:
    raise KeyError("the body's")


def interrupt() -> None:
    raise KeyboardInterrupt


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def ends(stage) -> list[str]:
    """What took something down, in order: kind and id."""
    found = stage.wire.requests(rf"(:cancel|PATCH|DELETE {JOBS}|DELETE {DEPLOYMENTS})")
    return [
        f"{request.path.split('/')[-2]} {request.path.rsplit('/', 1)[-1].split(':')[0]}"
        for request in found
    ]


IN_REVERSE = ["rlorTrainerJobs b", "rlorTrainerJobs a", "deployments b", "deployments a"]


def test_trainers_then_deployments_are_taken_down_the_last_one_first(parts):
    seen: list[str] = []

    run(parts, lambda: seen.extend(ends(parts)))

    assert seen == []
    assert ends(parts) == IN_REVERSE
    assert set(parts.states().values()) == {"JOB_STATE_CANCELLED"}
    assert parts.replicas() == {"a": 0, "b": 0}


@pytest.mark.parametrize("error", [KeyError("x"), KeyboardInterrupt(), SystemExit(3)], ids=repr)
def test_the_bodys_error_goes_on_and_everything_is_taken_down(parts, error):
    def body():
        raise error

    with pytest.raises(type(error)) as raised:
        run(parts, body)

    assert raised.value is error
    assert ends(parts) == IN_REVERSE


def test_sigterm_in_the_body_takes_everything_down(parts):
    before = signal.getsignal(signal.SIGTERM)

    def body():
        terminate()
        raise AssertionError("the signal ends the body")

    with pytest.raises(SystemExit) as raised:
        run(parts, body)

    assert raised.value.code == 143
    assert ends(parts) == IN_REVERSE
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_handler_of_ones_own_stays(parts):
    got = []
    before = signal.signal(signal.SIGTERM, lambda *_: got.append("mine"))
    try:
        run(parts, terminate)
    finally:
        signal.signal(signal.SIGTERM, before)

    assert got == ["mine"]
    assert ends(parts) == IN_REVERSE


async def pause() -> None:
    await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("body", "callback", "error"),
    [
        (nothing, terminate, SystemExit(143)),
        (fail, terminate, KeyError("the body's")),
        (nothing, interrupt, KeyboardInterrupt()),
        (lambda: run_until_signal(pause()), terminate, SystemExit(143)),
    ],
    ids=["sigterm in the cleanup", "and the body's error", "ctrl-c", "after the loop"],
)
def test_a_signal_during_the_cleanup_waits_for_its_end(parts, body, callback, error):
    with pytest.raises(type(error)) as raised:
        run(parts, body, callback)

    assert raised.value.args == error.args
    assert ends(parts) == IN_REVERSE


@pytest.mark.parametrize("end", [boom, interrupt])
def test_a_cleanup_that_fails_does_not_hide_the_bodys_error(parts, end):
    parts.wire.rule(f"POST {JOBS}/b:cancel", status=400, message="busy")
    parts.wire.rule(f"PATCH {DEPLOYMENTS}/b", status=500, message="broken")

    with pytest.raises(KeyError, match="the body's"):
        run(parts, fail, end)

    assert parts.states() == {"a": "JOB_STATE_CANCELLED", "b": "JOB_STATE_RUNNING"}
    assert parts.replicas() == {"a": 0, "b": 1}


def test_a_cleanup_that_fails_after_a_good_body_is_logged_only(parts, caplog):
    parts.wire.rule(f"POST {JOBS}/b:cancel", status=400, message="busy")

    run(parts, nothing, boom)

    assert "trainer job b could not be taken down: busy" in caplog.text
    assert "a step that nobody foresaw" in caplog.text
    assert parts.states()["a"] == "JOB_STATE_CANCELLED"


def test_nothing_is_taken_down_twice(parts):
    with parts.cleanup() as cleanup:
        register(cleanup)
        register(cleanup)
        cleanup.close()
        cleanup.close()

    assert ends(parts) == [
        "rlorTrainerJobs b",
        "rlorTrainerJobs a",
        "deployments b",
        "deployments a",
    ]


def test_a_deployment_may_be_deleted_instead(parts):
    with parts.cleanup() as cleanup:
        cleanup.deployment("a", action="delete")

    assert parts.replicas() == {"b": 1}
    with pytest.raises(ConfigError, match="action must be 'scale_to_zero' or 'delete', got 'x'"):
        cleanup.deployment("a", action="x")


def test_without_a_manager_no_deployment_can_be_registered(stage):
    with pytest.raises(ConfigError, match="deploy_mgr must be given"):
        ResourceCleanup(stage.trainers).deployment("a")


def test_what_was_gone_before_is_no_trouble(stage, caplog):
    with stage.cleanup() as cleanup:
        cleanup.trainer("never-made")
        cleanup.deployment("never-made", action="delete")

    assert caplog.text == ""


@pytest.mark.parametrize("scope", ["per_trainer", "per_deployment"])
@pytest.mark.parametrize("failing", [2, 3], ids=["second", "third"])
def test_a_create_that_fails_takes_down_those_before_it(stage, failing, scope):
    kinds = {"per_trainer": [JOBS, JOBS, DEPLOYMENTS], "per_deployment": [DEPLOYMENTS, JOBS, JOBS]}
    kind = kinds[scope][failing - 1]
    if kinds[scope].index(kind) < failing - 1:  # the kind's first request passes
        stage.wire.rule(f"POST {kind}$", times=1)
    stage.wire.rule(f"POST {kind}$", status=400, message="no room")

    config = stage.serving(weight_sync_scope=scope)
    options = {"needs_reference": True, "needs_inference": True, "job_suffix": "1"}
    with (
        pytest.raises(EngineError, match=r"1 of 3 parts:\n.*no room"),
        stage.provision(deploy_cfg=config, **options),
    ):
        pass

    assert len(stage.states()) + len(stage.replicas()) == failing - 1
    assert set(stage.states().values()) <= {"JOB_STATE_CANCELLED"}
    assert set(stage.replicas().values()) <= {0}


def test_sigterm_while_trainers_start_takes_them_down_at_once(stage):
    """The wait itself is long; a signal must not wait for it."""
    stage.wire.rule("GET /training/.*healthz", status=425)

    def soon(_line: str) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.3)

    before = signal.signal(signal.SIGALRM, lambda *_: terminate())
    try:
        options = {"needs_reference": True, "needs_inference": True, "on_status": soon}
        with pytest.raises(SystemExit), stage.provision(**options):
            pass
    finally:
        signal.signal(signal.SIGALRM, before)

    asked = len(stage.wire.requests("healthz"))
    time.sleep(0.5)
    assert len(stage.wire.requests("healthz")) == asked, "nobody waits any longer"
    assert set(stage.states().values()) == {"JOB_STATE_CANCELLED"}
    assert stage.replicas() == {"serving": 0}


@pytest.mark.parametrize("lora_rank", [0, 4], ids=["two trainers", "shared reference"])
def test_clients_used_after_the_block_say_to_keep_the_loop_inside(stage, datums, lora_rank):
    with stage.provision(lora_rank=lora_rank, needs_reference=True, needs_inference=True) as infra:
        pass
    assert set(stage.states().values()) == {"JOB_STATE_CANCELLED"}
    syncer = stage.sync_weights(infra)
    sampler = DeploymentSampler(stage.deployments.inference_url, infra.inference_model, "key")

    for call in (
        lambda: infra.policy.forward(datums(1)),
        lambda: infra.policy_client.forward(datums(1)).result(timeout=5),
        lambda: infra.policy.save_state("late"),
        lambda: infra.reference.forward(datums(1)),
        lambda: infra.reference_client.forward(datums(1)).result(timeout=5),
        lambda: syncer.save_and_hotload("late"),
        lambda: sampler.sample_with_prompt_tokens([5, 6], n=1, max_tokens=2).result(timeout=5),
    ):
        with pytest.raises(ClosedError, match="inside the `with` block"):
            call()
    assert set(stage.states().values()) == {"JOB_STATE_CANCELLED"}


def test_a_recipe_that_leaves_its_trainers_running_closes_its_clients(
    stage, datums, tmp_path, monkeypatch
):
    monkeypatch.setenv("FIREWORKS_BASE_URL", stage.url)
    monkeypatch.setenv("FIREWORKS_API_KEY", "x")
    config = Config(
        log_path=str(tmp_path),
        base_model=BASE,
        max_seq_len=128,
        cleanup_on_exit=False,
        deployment=stage.serving(),
    )

    with provision(config, load_tokenizer(config.deployment)) as infra:
        assert infra.reference is not None
        assert len(infra.reference.forward(datums(1)).loss_fn_outputs) == 1

    assert list(stage.states().values()) == ["JOB_STATE_RUNNING"] * 2
    assert stage.replicas() == {"serving": 1}
    for client in (infra.policy, infra.reference):
        with pytest.raises(ClosedError, match="inside the `with` block"):
            client.forward(datums(1))


def test_after_the_embedded_platform_has_ended_clients_say_the_same(stage, datums):
    infra = stage.setup(needs_inference=True)
    stage.platform.close()

    for call in (
        lambda: infra.policy.forward(datums(1)),
        lambda: stage.trainers.get("x"),
        lambda: stage.deployments.replica_state("serving", BASE),
    ):
        with pytest.raises(ClosedError, match="inside the `with` block"):
            call()


def test_a_job_that_somebody_cancelled_is_not_resumed_by_its_client(stage, datums):
    with stage.provision() as infra:
        stage.trainers.cancel(infra.policy_job_id)

        with pytest.raises(ClosedError, match="JOB_STATE_CANCELLED"):
            infra.policy.forward(datums(1))

    assert stage.wire.requests(":resume") == []
