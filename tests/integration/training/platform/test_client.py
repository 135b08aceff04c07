import inspect
import threading
import time

import pytest
import tinker
import torch

from hearth.errors import ClosedError, HearthError, RequestFailedError
from training.platform.client import ReconnectableClient
from training.platform.spec import DCP_TIMEOUT_S, STEP_TIMEOUT_S
from training.utils.rl import setup_infra

ADAM = tinker.AdamParams(learning_rate=0.1, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0)


@pytest.fixture
def policy(stage):
    with stage.provision(lora_rank=4, seed=1) as infra:
        yield infra.policy


def rows(result):
    return torch.cat([torch.tensor(output["logprobs"].data) for output in result.loss_fn_outputs])


def squared(data, logprobs):
    loss = torch.stack([(row**2).sum() for row in logprobs]).sum()
    return loss, {"squared": float(loss.detach())}


def test_every_call_waits_and_gives_its_result(policy, datums, tmp_path):
    data = datums(2)
    base = rows(policy.forward(data))

    trained = policy.forward_backward(data, "cross_entropy")
    custom = policy.forward_backward_custom(data, squared)
    stepped = policy.optim_step(ADAM, grad_accumulation_normalization="num_sequences")
    moved = rows(policy.forward(data))

    assert torch.equal(rows(trained), base)
    assert custom.metrics["squared"] == pytest.approx(float((base**2).sum()), rel=1e-5)
    assert stepped.metrics["step"] == 1.0
    assert not torch.equal(moved, base)

    saved = policy.save_state("one", metadata={"cursor": 3})
    assert policy.list_checkpoints() == ["one"]
    assert policy.save_weights_for_sampler_ext("step-00001").snapshot_name.startswith("step-00001-")
    policy.optim_step(ADAM)
    policy.forward_backward(data)
    policy.optim_step(ADAM)
    assert policy.load_state_with_optimizer(saved.path).metadata == {"cursor": 3}
    assert torch.equal(rows(policy.forward(data)), moved)
    assert policy.load_state("one").path == "one"
    assert torch.equal(rows(policy.forward(data)), moved)
    with pytest.raises(RequestFailedError, match="must be a PEFT adapter's folder"):
        policy.load_adapter(str(tmp_path))


def test_the_optimizer_comes_back_or_starts_fresh_as_asked(policy, datums):
    def step():
        policy.forward_backward(datums(2))
        return policy.optim_step(ADAM).metrics["step"]

    assert [step(), step()] == [1.0, 2.0]
    policy.save_state("two")
    policy.load_state_with_optimizer("two")
    assert step() == 3.0
    policy.load_state("two")
    assert step() == 1.0


def test_calls_that_return_futures_are_one_attribute_away(policy, datums):
    data = datums(2)

    futures = [policy.inner.forward(data), policy.inner.forward_backward_custom(data, squared)]
    stepped = policy.inner.optim_step(ADAM)

    assert torch.equal(rows(futures[0].result()), rows(futures[1].result()))
    assert stepped.result(timeout=30).metrics["step"] == 1.0
    assert policy.inner.save_state("x").result().path == "x"


async def test_futures_may_be_awaited_too(policy, datums):
    scored = await policy.inner.forward(datums(1))

    assert len(scored.loss_fn_outputs) == 1


def test_default_timeouts_are_an_hour_for_a_step_and_45_minutes_for_a_checkpoint():
    made = inspect.signature(ReconnectableClient).parameters
    asked = inspect.signature(setup_infra).parameters

    assert (STEP_TIMEOUT_S, DCP_TIMEOUT_S) == (3600.0, 2700.0)
    assert (made["timeout_s"].default, made["dcp_timeout_s"].default) == (3600.0, 2700.0)
    assert (asked["step_timeout"].default, asked["dcp_timeout"].default) == (3600.0, 2700.0)


CALLS = {
    "forward": ("step", lambda client, data: client.forward(data)),
    "forward_backward": ("step", lambda client, data: client.forward_backward(data)),
    "forward_backward_custom": (
        "step",
        lambda client, data: client.forward_backward_custom(data, squared),
    ),
    "optim_step": ("step", lambda client, data: client.optim_step(ADAM)),
    "save_state": ("dcp", lambda client, data: client.save_state("x")),
    "load_state": ("dcp", lambda client, data: client.load_state("x")),
    "load_state_with_optimizer": (
        "dcp",
        lambda client, data: client.load_state_with_optimizer("x"),
    ),
    "load_adapter": ("dcp", lambda client, data: client.load_adapter("x")),
    "save_weights_for_sampler_ext": (
        "dcp",
        lambda client, data: client.save_weights_for_sampler_ext("x"),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_takes_too_long_names_its_time(stage, datums, name):
    kind, call = CALLS[name]
    allowed = {"step": 60.0, "dcp": 60.0, kind: 0.05}
    stage.wire.rule("POST /training/.*/(forward|optim_step|save_|load_).*", delay_s=0.3)
    timeouts = {"step_timeout": allowed["step"], "dcp_timeout": allowed["dcp"]}
    with stage.provision(lora_rank=4, **timeouts) as infra:
        started = time.monotonic()

        with pytest.raises(TimeoutError, match=r"must end within 0\.05 s, it still runs: raise"):
            call(infra.policy, datums(1))
        assert time.monotonic() - started < 0.25


def test_a_loss_functions_own_timeout_is_passed_on(policy, datums):
    def late(data, logprobs):
        raise TimeoutError("the judge did not answer")

    with pytest.raises(TimeoutError, match="the judge did not answer"):
        policy.forward_backward_custom(datums(1), late)


def test_closing_twice_is_closing_once(stage, datums):
    policy = stage.setup().policy

    with policy as same:
        assert same is policy
        assert len(policy.forward(datums(1)).loss_fn_outputs) == 1
    policy.close()

    for call in (
        *[call for _, call in CALLS.values()],
        lambda client, _: client.unload(),
        lambda client, _: client.list_checkpoints(),
    ):
        with pytest.raises(ClosedError, match="inside the `with` block"):
            call(policy, datums(1))


def test_a_shared_reference_closes_only_itself(stage, datums):
    with stage.provision(lora_rank=4, needs_reference=True) as infra:
        infra.reference.close()

        with pytest.raises(ClosedError):
            infra.reference.forward(datums(1))
        assert len(infra.policy.forward(datums(1)).loss_fn_outputs) == 1


def test_a_model_may_be_unloaded(policy, datums):
    policy.unload()

    with pytest.raises(HearthError, match="must be loaded, got it unloaded"):
        policy.inner.forward(datums(1)).result(timeout=10)


def test_the_client_knows_its_job(stage):
    with stage.provision(job_suffix="1") as infra:
        policy = infra.policy
        assert policy.job_id == policy.endpoint.job_id == "rl-policy-1"
        assert policy.endpoint.base_url == stage.trainers.trainer_url("rl-policy-1")
        assert policy.inner.max_seq_len == 128
    assert ReconnectableClient(policy.inner).job_id is None


def test_calls_from_several_threads_keep_their_turn(policy, datums):
    sums = []

    def train():
        done = policy.forward_backward_custom(datums(2), squared)
        sums.append(done.metrics["loss:sum"])

    threads = [threading.Thread(target=train) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(set(sums)) == 1
    assert len(sums) == 4
