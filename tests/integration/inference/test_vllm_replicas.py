"""What clients see of replicas that die, refuse, disagree or come late."""

from __future__ import annotations

import os
import signal
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration.inference.scripted import Scripted, snapshot
from tests.waiting import wait_until

from hearth.errors import ClosedError, ConfigError, EngineError, RequestError
from hearth.inference.backend import SampledSequence, SampleRequest, TokenListener
from hearth.inference.sync_tracker import ServingState
from hearth.inference.vllm.replicas import MOST_RESTARTS

PATIENCE_S = 20.0


def request(first: int = 1, **fields: Any) -> SampleRequest:
    return SampleRequest(**{"prompt": [first, 2, 3], "max_tokens": 4, "seed": 5, **fields})


def count_generated(scripted: Scripted, pid: int) -> int:
    """How many completions, probes not counted, a server was asked for."""
    return sum("seed" in call and "/generate" in call for call in scripted.calls(pid))


def load(scripted: Scripted, identity: str, **fields: Any) -> ServingState:
    future = scripted.backend.hot_load(identity, lambda: snapshot(identity, **fields))
    return future.result(PATIENCE_S)


def submit_held(scripted: Scripted) -> Future[SampledSequence]:
    """A request that the one server has begun, and holds."""
    scripted.order("hold")
    future = scripted.backend.submit(request())
    wait_until(lambda: count_generated(scripted, scripted.pids()[0]) == 1)
    return future


@pytest.fixture
def deployment(scripted) -> Scripted:
    """One server, which runs."""
    made = scripted()
    made.start()
    return made


@pytest.fixture
def two(scripted) -> Scripted:
    """Two servers, which run."""
    made = scripted(2)
    made.start()
    return made


class Collector:
    """Collects what a listener is called with."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.prompts: list[Any] = []
        self.listener = TokenListener(
            self.prompts.append, lambda token: self.tokens.append(token.token_id)
        )


def test_a_completion_has_its_tokens_version_and_logprobs(deployment) -> None:
    sampled = deployment.backend.submit(request(prompt_logprobs=True)).result(PATIENCE_S)

    assert sampled.token_ids == [11, 18, 25, 32]
    assert sampled.logprobs == sampled.sampling_logprobs
    assert sampled.prompt_logprobs is not None
    assert sampled.prompt_logprobs[0] is None
    assert sampled.versions == [[0, 4]]
    assert (sampled.weight_version, sampled.snapshot_identity, sampled.seed) == (0, None, 5)
    assert sampled.finish_reason == "length"


def test_a_greedy_completion_is_certain_and_tells_the_models_logprob(deployment) -> None:
    sampled = deployment.backend.submit(request(temperature=0)).result(PATIENCE_S)

    assert sampled.sampling_logprobs == [0.0] * 4
    assert all(logprob <= -1 for logprob in sampled.logprobs)


@pytest.mark.parametrize("cut", [{"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.9}])
def test_the_models_own_logprobs_of_a_cut_completion_are_scored_apart(scripted, cut) -> None:
    deployment = scripted()
    sampled = deployment.start().submit(request(**cut)).result(PATIENCE_S)

    assert len(sampled.logprobs) == 4
    scoring = deployment.calls(deployment.pids()[0])[-1]
    assert '"token_ids": [1, 2, 3, 11, 18, 25, 32]' in scoring


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"routing": True}, "include_routing_matrix must be absent with engine 'vllm'"),
        ({"temperature": 0.001}, r"temperature must be 0 or >= 0.01 with engine 'vllm'"),
        ({"prompt": [50]}, r"prompt must be token ids in 0\.\.49"),
        ({"stop": ["x"]}, "this deployment has no tokenizer"),
    ],
)
def test_what_vllm_cannot_do_is_refused(deployment, fields, message) -> None:
    with pytest.raises(RequestError, match=message):
        deployment.backend.submit(request(**fields))


def test_nothing_to_sample_is_answered_at_once(deployment) -> None:
    sampled = deployment.backend.submit(request(max_tokens=0)).result(PATIENCE_S)
    assert (sampled.token_ids, sampled.versions, sampled.finish_reason) == ([], [], "length")


def test_a_listener_hears_each_token(deployment) -> None:
    collector = Collector()
    sampled = deployment.backend.submit(request(listener=collector.listener)).result(PATIENCE_S)

    assert collector.tokens == sampled.token_ids == [11, 18, 25, 32]
    assert len(collector.prompts) == 1


def test_bad_connections_to_servers_lose_and_change_no_completion(scripted) -> None:
    made = scripted(2)
    (made.orders / "bad-network").write_text(str(Path(__file__).parents[3]))
    backend = made.start()
    made.order("disturb")

    running = [backend.submit(request(seed=seed)) for seed in range(120)]
    sampled = [future.result(60) for future in running]
    made.withdraw("disturb")

    expected = [[(1 + 2 + 3 + seed + 7 * n) % 50 for n in range(4)] for seed in range(120)]
    assert [completion.token_ids for completion in sampled] == expected
    disturbed = [int(path.read_text()) for path in made.orders.parent.glob("disturbed-*")]
    assert sum(disturbed) > 5
    assert len(made.pids()) == 2, "no server was ended for it"


def test_requests_beyond_one_replicas_room_go_to_the_other(two) -> None:
    two.order("hold")
    futures = [two.backend.submit(request(seed=seed)) for seed in range(8)]
    wait_until(lambda: [count_generated(two, pid) for pid in two.pids()] == [4, 4])
    two.withdraw("hold")

    assert [future.result(PATIENCE_S).seed for future in futures] == list(range(8))


def test_no_client_sees_a_replica_die(two) -> None:
    state = load(two, "s-1")
    two.order("hold")
    futures = [two.backend.submit(request(seed=seed)) for seed in range(8)]
    wait_until(lambda: sum(count_generated(two, pid) for pid in two.pids()) == 8)

    os.kill(two.pids()[0], signal.SIGKILL)
    wait_until(lambda: len(two.pids()) == 3)
    two.withdraw("hold")

    for seed, future in enumerate(futures):
        sampled = future.result(PATIENCE_S)
        assert sampled.token_ids[0] == (6 + seed) % 50
        assert (sampled.weight_version, sampled.snapshot_identity) == (1, "s-1")
    assert state.weight_version == 1


def test_a_replacement_serves_the_current_version_before_it_is_given_requests(deployment) -> None:
    load(deployment, "s-1")
    os.kill(deployment.pids()[0], signal.SIGKILL)
    sampled = deployment.backend.submit(request()).result(PATIENCE_S)

    assert sampled.snapshot_identity == "s-1"
    calls = deployment.calls(deployment.pids()[1])
    places = [
        next(n for n, call in enumerate(calls) if wanted in call)
        for wanted in ('"identity": "s-1"', '"new_version": "1-1"', '"seed": 5')
    ]
    assert places == sorted(places)


def test_a_stream_goes_on_where_its_replica_died(deployment) -> None:
    deployment.order("hold-streams")
    collector = Collector()
    future = deployment.backend.submit(request(listener=collector.listener))
    wait_until(lambda: len(collector.tokens) == 2)

    os.kill(deployment.pids()[0], signal.SIGKILL)
    wait_until(lambda: len(deployment.pids()) == 2)
    deployment.withdraw("hold-streams")

    assert future.result(PATIENCE_S).token_ids == collector.tokens == [11, 18, 25, 32]


def test_a_replica_that_dies_too_often_ends_the_deployment(deployment) -> None:
    deployment.order("never-start")
    os.kill(deployment.pids()[0], signal.SIGKILL)
    error = deployment.backend.failed.result(PATIENCE_S)

    assert f"more than {MOST_RESTARTS} times" in str(error)
    assert "something else" in str(error)
    with pytest.raises(EngineError, match="must keep its replicas running"):
        deployment.backend.submit(request()).result(PATIENCE_S)


def test_every_replica_takes_new_weights(two) -> None:
    state = load(two, "s-1")

    assert (state.stage, state.current_identity, state.weight_version) == ("done", "s-1", 1)
    for pid in two.pids():
        assert any('"identity": "s-1"' in call for call in two.calls(pid))
        assert any('"new_version": "1-1"' in call for call in two.calls(pid))


def test_draining_ends_what_runs_on_the_old_weights(deployment) -> None:
    running = submit_held(deployment)
    sync = deployment.backend.hot_load("s-1", lambda: snapshot("s-1"))
    wait_until(lambda: deployment.backend.state().stage == "loading")
    assert not sync.done()
    deployment.withdraw("hold")

    assert running.result(PATIENCE_S).versions == [[0, 4]]
    assert sync.result(PATIENCE_S).current_identity == "s-1"
    assert deployment.backend.submit(request()).result(PATIENCE_S).versions == [[1, 4]]


def test_drain_by_abort_samples_what_runs_again_with_the_new_weights(scripted) -> None:
    deployment = scripted(drain="abort")
    backend = deployment.start()
    running = submit_held(deployment)
    sync: Future[ServingState] = backend.hot_load("s-1", lambda: snapshot("s-1"))
    assert sync.result(PATIENCE_S).current_identity == "s-1"
    deployment.withdraw("hold")

    assert running.result(PATIENCE_S).versions == [[1, 4]]


@pytest.mark.parametrize("order", ["once-damage", "once-refuse", "once-break", "once-garble"])
def test_weights_that_one_replica_does_not_take_are_taken_by_none(two, order) -> None:
    load(two, "s-1")
    two.order(order)
    state = load(two, "s-2", value=2.0)

    assert (state.stage, state.current_identity) == ("error", "s-1")
    assert order not in ("once-damage", "once-refuse") or state.error == "bad checksum"
    for seed in range(8):
        sampled = two.backend.submit(request(first=seed, seed=seed)).result(PATIENCE_S)
        assert sampled.versions == [[1, 4]]
    assert load(two, "s-3", value=3.0).weight_version == 2


def test_a_replica_that_dies_amid_a_sync_comes_back_with_its_outcome(two) -> None:
    two.order("once-die")
    assert load(two, "s-1").current_identity == "s-1"
    wait_until(lambda: len(two.pids()) == 3)
    third = two.pids()[2]
    wait_until(lambda: any('"new_version": "1-1"' in call for call in two.calls(third)))

    assert any('"identity": "s-1"' in call for call in two.calls(third))


def test_weights_of_another_model_are_refused_before_any_replica_hears_of_them(deployment) -> None:
    state = load(deployment, "s-1", tensors={"w": torch.zeros(5)})

    assert state.error is not None
    assert "w (5,) instead of (4,)" in state.error
    assert not any("update_weights" in call for call in deployment.calls(deployment.pids()[0]))


def test_a_server_that_does_not_start_says_what_to_do(scripted) -> None:
    two = scripted(2)
    two.order("once-no-start")
    with pytest.raises(ConfigError, match=r"exited with code 1, .* must fit the memory"):
        two.start()


def test_a_server_that_never_answers_is_given_up_after_its_budget(scripted) -> None:
    deployment = scripted(start_timeout_s=0.5)
    deployment.order("no-answer")
    with pytest.raises(ConfigError, match="had not answered after 0 s"):
        deployment.start()


def test_an_interpreter_that_is_not_there_is_named(scripted) -> None:
    deployment = scripted()
    deployment.plan = replace(deployment.plan, python="/no/such/python")
    with pytest.raises(EngineError, match="got '/no/such/python'"):
        deployment.start()


def test_closing_fails_what_is_left(deployment) -> None:
    running = submit_held(deployment)
    deployment.backend.close()

    with pytest.raises(ClosedError):
        running.result(PATIENCE_S)
    with pytest.raises(ClosedError):
        deployment.backend.submit(request())


def test_a_cancelled_request_leaves_its_place_to_another(deployment) -> None:
    deployment.order("hold")
    futures = [deployment.backend.submit(request(seed=seed)) for seed in range(4)]
    wait_until(lambda: count_generated(deployment, deployment.pids()[0]) == 4)
    fifth = deployment.backend.submit(request(seed=9))
    futures[0].cancel()
    wait_until(lambda: count_generated(deployment, deployment.pids()[0]) == 5)
    deployment.withdraw("hold")

    assert fifth.result(PATIENCE_S).seed == 9
