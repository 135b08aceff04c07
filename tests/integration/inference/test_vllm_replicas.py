"""What clients see of replicas that die, refuse, disagree or come late."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.integration.inference.scripted import Scripted, snapshot

from hearth.errors import ClosedError, ConfigError, EngineError, RequestError
from hearth.inference.backend import SampleRequest, ServingState, TokenListener
from hearth.inference.vllm.replicas import MOST_RESTARTS

PATIENCE_S = 20.0


def request(first: int = 1, **fields: Any) -> SampleRequest:
    return SampleRequest(**{"prompt": [first, 2, 3], "max_tokens": 4, "seed": 5, **fields})


def until(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < end_s, "it never came to that"
        time.sleep(0.01)


def generated(scripted: Scripted, pid: int) -> int:
    """How many completions, probes not counted, a server was asked for."""
    return sum("seed" in call and "/generate" in call for call in scripted.calls(pid))


def loaded(scripted: Scripted, identity: str, **fields: Any) -> ServingState:
    future = scripted.backend.hot_load(identity, lambda: snapshot(identity, **fields))
    return future.result(PATIENCE_S)


class Collector:
    """Collects what a listener is called with."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.prompts: list[Any] = []
        self.listener = TokenListener(
            self.prompts.append, lambda token: self.tokens.append(token.token_id)
        )


def test_a_completion_has_its_tokens_version_and_logprobs(scripted) -> None:
    backend = scripted().start()
    drawn = backend.submit(request(prompt_logprobs=True)).result(PATIENCE_S)

    assert drawn.token_ids == [11, 18, 25, 32]
    assert drawn.logprobs == drawn.sampling_logprobs
    assert drawn.prompt_logprobs is not None
    assert drawn.prompt_logprobs[0] is None
    assert drawn.versions == [[0, 4]]
    assert (drawn.weight_version, drawn.snapshot_identity, drawn.seed) == (0, None, 5)
    assert drawn.finish_reason == "length"


def test_a_greedy_draw_is_certain_and_tells_the_models_logprob(scripted) -> None:
    drawn = scripted().start().submit(request(temperature=0)).result(PATIENCE_S)

    assert drawn.sampling_logprobs == [0.0] * 4
    assert all(logprob <= -1 for logprob in drawn.logprobs)


@pytest.mark.parametrize("cut", [{"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.9}])
def test_the_models_own_logprobs_of_a_cut_draw_are_scored_apart(scripted, cut) -> None:
    entry = scripted()
    drawn = entry.start().submit(request(**cut)).result(PATIENCE_S)

    assert len(drawn.logprobs) == 4
    scoring = entry.calls(entry.pids()[0])[-1]
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
def test_what_vllm_cannot_do_is_refused(scripted, fields, message) -> None:
    backend = scripted().start()
    with pytest.raises(RequestError, match=message):
        backend.submit(request(**fields))


def test_nothing_to_draw_is_answered_at_once(scripted) -> None:
    drawn = scripted().start().submit(request(max_tokens=0)).result(PATIENCE_S)
    assert (drawn.token_ids, drawn.versions, drawn.finish_reason) == ([], [], "length")


def test_a_listener_hears_each_token(scripted) -> None:
    collector = Collector()
    drawn = scripted().start().submit(request(listener=collector.listener)).result(PATIENCE_S)

    assert collector.tokens == drawn.token_ids == [11, 18, 25, 32]
    assert len(collector.prompts) == 1


def test_requests_beyond_one_replicas_room_go_to_the_other(scripted) -> None:
    two = scripted(2)
    backend = two.start()
    two.order("hold")
    futures = [backend.submit(request(seed=seed)) for seed in range(8)]
    until(lambda: [generated(two, pid) for pid in two.pids()] == [4, 4])
    two.withdraw("hold")

    assert [future.result(PATIENCE_S).seed for future in futures] == list(range(8))


def test_no_client_sees_a_replica_die(scripted) -> None:
    two = scripted(2)
    backend = two.start()
    state = loaded(two, "s-1")
    two.order("hold")
    futures = [backend.submit(request(seed=seed)) for seed in range(8)]
    until(lambda: sum(generated(two, pid) for pid in two.pids()) == 8)

    os.kill(two.pids()[0], signal.SIGKILL)
    until(lambda: len(two.pids()) == 3)
    two.withdraw("hold")

    for seed, future in enumerate(futures):
        drawn = future.result(PATIENCE_S)
        assert drawn.token_ids[0] == (6 + seed) % 50
        assert (drawn.weight_version, drawn.snapshot_identity) == (1, "s-1")
    assert state.weight_version == 1


def test_a_replacement_serves_the_current_version_before_it_is_given_requests(scripted) -> None:
    entry = scripted()
    backend = entry.start()
    loaded(entry, "s-1")
    os.kill(entry.pids()[0], signal.SIGKILL)
    drawn = backend.submit(request()).result(PATIENCE_S)

    assert drawn.snapshot_identity == "s-1"
    calls = entry.calls(entry.pids()[1])
    places = [
        next(n for n, call in enumerate(calls) if wanted in call)
        for wanted in ('"identity": "s-1"', '"new_version": "1-1"', '"seed": 5')
    ]
    assert places == sorted(places)


def test_a_stream_goes_on_where_its_replica_died(scripted) -> None:
    entry = scripted()
    backend = entry.start()
    entry.order("hold-streams")
    collector = Collector()
    future = backend.submit(request(listener=collector.listener))
    until(lambda: len(collector.tokens) == 2)

    os.kill(entry.pids()[0], signal.SIGKILL)
    until(lambda: len(entry.pids()) == 2)
    entry.withdraw("hold-streams")

    assert future.result(PATIENCE_S).token_ids == collector.tokens == [11, 18, 25, 32]


def test_a_replica_that_dies_too_often_ends_the_deployment(scripted) -> None:
    entry = scripted()
    backend = entry.start()
    entry.order("never-start")
    os.kill(entry.pids()[0], signal.SIGKILL)
    error = backend.failed.result(PATIENCE_S)

    assert f"more than {MOST_RESTARTS} times" in str(error)
    assert "something else" in str(error)
    with pytest.raises(EngineError, match="must keep its replicas running"):
        backend.submit(request()).result(PATIENCE_S)


def test_every_replica_takes_new_weights(scripted) -> None:
    two = scripted(2)
    two.start()
    state = loaded(two, "s-1")

    assert (state.stage, state.current_identity, state.weight_version) == ("done", "s-1", 1)
    for pid in two.pids():
        assert any('"identity": "s-1"' in call for call in two.calls(pid))
        assert any('"new_version": "1-1"' in call for call in two.calls(pid))


def test_draining_ends_what_runs_on_the_old_weights(scripted) -> None:
    entry = scripted()
    backend = entry.start()
    entry.order("hold")
    running = backend.submit(request())
    until(lambda: generated(entry, entry.pids()[0]) == 1)
    sync = backend.hot_load("s-1", lambda: snapshot("s-1"))
    until(lambda: backend.state().stage == "loading")
    assert not sync.done()
    entry.withdraw("hold")

    assert running.result(PATIENCE_S).versions == [[0, 4]]
    assert sync.result(PATIENCE_S).current_identity == "s-1"
    assert backend.submit(request()).result(PATIENCE_S).versions == [[1, 4]]


def test_drain_by_abort_draws_what_runs_again_with_the_new_weights(scripted) -> None:
    entry = scripted(drain="abort")
    backend = entry.start()
    entry.order("hold")
    running = backend.submit(request())
    until(lambda: generated(entry, entry.pids()[0]) == 1)
    sync: Future[ServingState] = backend.hot_load("s-1", lambda: snapshot("s-1"))
    assert sync.result(PATIENCE_S).current_identity == "s-1"
    entry.withdraw("hold")

    assert running.result(PATIENCE_S).versions == [[1, 4]]


@pytest.mark.parametrize("order", ["once-refuse", "once-break", "once-garble"])
def test_weights_that_one_replica_does_not_take_are_taken_by_none(scripted, order) -> None:
    two = scripted(2)
    backend = two.start()
    loaded(two, "s-1")
    two.order(order)
    state = loaded(two, "s-2", value=2.0)

    assert (state.stage, state.current_identity) == ("error", "s-1")
    for seed in range(8):
        drawn = backend.submit(request(first=seed, seed=seed)).result(PATIENCE_S)
        assert drawn.versions == [[1, 4]]
    assert loaded(two, "s-3", value=3.0).weight_version == 2


def test_the_error_of_a_refusal_says_why(scripted) -> None:
    entry = scripted()
    entry.start()
    entry.order("once-refuse")
    assert loaded(entry, "s-1").error == "bad checksum"


def test_a_replica_that_dies_amid_a_sync_comes_back_with_its_outcome(scripted) -> None:
    two = scripted(2)
    two.start()
    two.order("once-die")
    assert loaded(two, "s-1").current_identity == "s-1"
    until(lambda: len(two.pids()) == 3)
    third = two.pids()[2]
    until(lambda: any('"new_version": "1-1"' in call for call in two.calls(third)))

    assert any('"identity": "s-1"' in call for call in two.calls(third))


def test_weights_of_another_model_are_refused_before_any_replica_hears_of_them(scripted) -> None:
    entry = scripted()
    entry.start()
    state = loaded(entry, "s-1", tensors={"w": torch.zeros(5)})

    assert state.error is not None
    assert "w (5,) instead of (4,)" in state.error
    assert not any("update_weights" in call for call in entry.calls(entry.pids()[0]))


def test_a_server_that_does_not_start_says_what_to_do(scripted) -> None:
    two = scripted(2)
    two.order("once-no-start")
    with pytest.raises(ConfigError, match=r"exited with code 1, .* must fit the memory"):
        two.start()


def test_a_server_that_never_answers_is_given_up_after_its_budget(scripted) -> None:
    entry = scripted(start_timeout_s=0.5)
    entry.order("no-answer")
    with pytest.raises(ConfigError, match="had not answered after 0 s"):
        entry.start()


def test_an_interpreter_that_is_not_there_is_named(scripted) -> None:
    entry = scripted()
    entry.plan = replace(entry.plan, python="/no/such/python")
    with pytest.raises(EngineError, match="got '/no/such/python'"):
        entry.start()


def test_closing_fails_what_is_left(scripted) -> None:
    entry = scripted()
    backend = entry.start()
    entry.order("hold")
    running = backend.submit(request())
    until(lambda: generated(entry, entry.pids()[0]) == 1)
    backend.close()

    with pytest.raises(ClosedError):
        running.result(PATIENCE_S)
    with pytest.raises(ClosedError):
        backend.submit(request())


def test_a_cancelled_request_leaves_its_place_to_another(scripted) -> None:
    entry = scripted()
    backend = entry.start()
    entry.order("hold")
    futures = [backend.submit(request(seed=seed)) for seed in range(4)]
    until(lambda: generated(entry, entry.pids()[0]) == 4)
    fifth = backend.submit(request(seed=9))
    futures[0].cancel()
    until(lambda: generated(entry, entry.pids()[0]) == 5)
    entry.withdraw("hold")

    assert fifth.result(PATIENCE_S).seed == 9
