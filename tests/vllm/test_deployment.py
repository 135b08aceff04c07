"""One deployment of two vLLM servers: what it samples, how its weights change, how one dies.

The tests share the servers, and each goes on with the weights that the one before has left.
"""

from __future__ import annotations

import itertools
import os
import signal

import httpx
import pytest
from tests.pieces import RankPublisher
from tests.vllm.stack import PROMPT, TOLERANCE, events, logprobs_of

_numbers = itertools.count(1)


@pytest.fixture
def published(deployment, trainer):
    """Weights that the trainer has as well."""
    identity = trainer.save(f"shared-{next(_numbers)}")
    state = deployment.hot_load(identity)
    assert state["current_snapshot_identity"] == identity, state
    return state


def test_it_serves_and_a_seed_repeats(deployment):
    completions, again = (deployment.complete(n=4) for _ in range(2))

    tokens = [completion["raw_output"]["completion_token_ids"] for completion in completions]
    assert [completion["raw_output"]["completion_token_ids"] for completion in again] == tokens
    assert len({tuple(token) for token in tokens}) > 1
    assert all(len(token) == 12 for token in tokens)


def test_both_replicas_sample(deployment):
    assert len(deployment.servers()) == 2
    deployment.complete(n=64, max_tokens=4)


def test_a_server_answers_nobody_but_its_worker(deployment):
    addresses = deployment.addresses()

    assert len(addresses) == 2
    for server in addresses:
        for method, path in (("POST", "/pause"), ("GET", "/health"), ("GET", "/v1/models")):
            answer = httpx.request(method, f"http://{server}{path}", timeout=30)
            assert answer.status_code == 401


@pytest.mark.parametrize(
    "fields",
    [{}, {"temperature": 0.0}, {"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.8}],
    ids=str,
)
def test_the_models_own_logprobs_are_the_trainers(deployment, trainer, published, fields):
    for choice in deployment.complete(n=2, **fields):
        assert trainer.gap(choice) < TOLERANCE


def test_sampling_logprobs_are_of_the_distribution_that_was_sampled_from(deployment):
    for choice in deployment.complete(temperature=0.0):
        assert choice["raw_output"]["sampling_logprobs"] == [0.0] * 12
    for choice in deployment.complete():
        assert choice["raw_output"]["sampling_logprobs"] == logprobs_of(choice)
    (cut,) = deployment.complete(top_k=1)
    assert cut["raw_output"]["sampling_logprobs"] == pytest.approx([0.0] * 12, abs=1e-5)
    assert min(logprobs_of(cut)) < -1e-3


def test_a_prompt_is_scored_like_the_trainer_does(deployment, trainer, published):
    tokens = [*PROMPT, *range(10, 30)]
    (scored,) = deployment.complete(prompt=tokens, max_tokens=0, echo=True)
    own = trainer.logprobs(tokens)

    assert logprobs_of(scored)[0] is None
    assert logprobs_of(scored)[1:] == pytest.approx(list(own), abs=TOLERANCE)
    (last,) = deployment.complete(prompt=tokens, max_tokens=0, echo_last=3)
    assert logprobs_of(last) == pytest.approx(list(own[-3:]), abs=TOLERANCE)


def test_the_most_probable_tokens_are_told_in_order(deployment):
    asked = {"logprob_format": "objects", "top_logprobs": 4, "raw_output": False}
    (completions,) = deployment.complete(**asked)
    (greedy,) = deployment.complete(**asked, temperature=0.0)
    for row in completions["logprobs"]["content"]:
        listed = [top_logprob["logprob"] for top_logprob in row["top_logprobs"]]
        assert len(listed) == 4
        assert listed == sorted(listed, reverse=True)
    for row in greedy["logprobs"]["content"]:
        assert row["top_logprobs"][0]["logprob"] == pytest.approx(row["logprob"])


def test_stops_end_a_text(deployment):
    (free,) = deployment.complete(max_tokens=24)
    tokens = free["raw_output"]["completion_token_ids"]
    third = tokens[2]
    (by_id,) = deployment.complete(max_tokens=24, stop_token_ids=[third])
    until = tokens.index(third) + 1
    assert by_id["raw_output"]["completion_token_ids"] == tokens[:until]
    assert by_id["finish_reason"] == "stop"

    stop = free["text"][4:6]
    (by_text,) = deployment.complete(max_tokens=24, stop=[stop])
    assert by_text["finish_reason"] == "stop"
    assert by_text["text"] == free["text"][: free["text"].index(stop)]


def test_the_context_ends_a_text(deployment):
    (completions,) = deployment.complete(prompt=[7] * 250, max_tokens=64)
    assert len(completions["raw_output"]["completion_token_ids"]) == 6
    assert completions["finish_reason"] == "length"


def test_a_stream_tells_what_an_answer_tells(deployment):
    (whole,) = deployment.complete(max_tokens=8)
    body = {
        "prompt": PROMPT,
        "max_tokens": 8,
        "seed": 3,
        "stream": True,
        "logprobs": True,
        "ignore_eos": True,
    }
    messages = events(deployment.ask("POST", "/v1/completions", body))

    assert "".join(message["choices"][0]["text"] for message in messages) == whole["text"]
    assert messages[-1]["choices"][0]["finish_reason"] == "length"
    rows = [message["choices"][0].get("logprobs") or {} for message in messages]
    logprobs = [value for row in rows for value in row.get("token_logprobs", ())]
    assert logprobs == pytest.approx(logprobs_of(whole), abs=TOLERANCE)


def test_a_base_and_deltas_are_served_by_both_replicas(deployment, trainer):
    before = deployment.complete(n=8)[0]["raw_output"]["versions"][0][0]
    for number, kind in enumerate(["base", "delta", "delta"], 1):
        trainer.step()
        identity = trainer.save(f"chain-{number}", kind)
        assert deployment.snapshots.get(deployment.snapshots.names()[-1]).kind == kind
        state = deployment.hot_load(identity)
        assert state["current_snapshot_identity"] == identity, state
        assert state["weight_version"] == before + number
        for choice in deployment.complete(n=64, max_tokens=4):
            assert choice["raw_output"]["versions"] == [[before + number, 4]]
            assert trainer.gap(choice) < TOLERANCE


def test_what_ranks_have_written_in_pieces_is_served(deployment, trainer):
    ranks = RankPublisher(deployment.snapshots, 2, trainer.engine.name)
    for kind in ("base", "delta"):
        trainer.step()
        weights = deployment.snapshots.get(trainer.save(f"whole-{next(_numbers)}")).tensors
        identity = f"pieces-{next(_numbers)}"
        ranks.publish(identity, weights, as_delta=kind == "delta")
        assert deployment.snapshots.open(identity).kind == kind
        state = deployment.hot_load(identity)
        assert state["current_snapshot_identity"] == identity, state
        assert all(trainer.gap(choice) < TOLERANCE for choice in deployment.complete(n=4))


def test_what_a_trainer_sends_without_files_is_served_by_both_replicas(deployment, trainer):
    for _ in range(2):
        trainer.step()
        identity = trainer.save(f"sent-{next(_numbers)}", "direct")
        files = [path.name for path in deployment.snapshots.folder(identity).iterdir()]
        assert files == ["manifest.json"]
        state = deployment.hot_load(identity)
        assert state["current_snapshot_identity"] == identity, state
        assert all(trainer.gap(choice) < TOLERANCE for choice in deployment.complete(n=16))


def test_a_prompt_that_was_cached_is_computed_again_with_new_weights(deployment, trainer):
    prompt = [*PROMPT, *([11, 12, 13, 14] * 40)]
    deployment.complete(prompt=prompt, n=4, max_tokens=2)
    trainer.step()
    deployment.hot_load(trainer.save(f"fresh-{next(_numbers)}"))

    for choice in deployment.complete(prompt=prompt, n=4, max_tokens=2):
        assert trainer.gap(choice) < TOLERANCE


def test_requests_that_are_kept_go_on_under_the_new_version(deployment, trainer):
    trainer.step()
    identity = trainer.save(f"kept-{next(_numbers)}")
    running = deployment.running(16, max_tokens=240)
    state = deployment.hot_load(identity, running_requests="keep")
    number = state["weight_version"]
    completions = [number.result()[0] for number in running]

    runs = [completion["raw_output"]["versions"] for completion in completions]
    assert all(sum(count for _, count in run) == 240 for run in runs)
    ran_across = [
        completion for completion in completions if len(completion["raw_output"]["versions"]) == 2
    ]
    assert ran_across, runs
    for completion in ran_across:
        (before, old), (after, _) = completion["raw_output"]["versions"]
        assert (before, after) == (number - 1, number)
        # What the new weights have sampled is theirs, on keys of their own.
        assert trainer.gap(completion, since=old) < TOLERANCE


def test_a_damaged_delta_is_refused_and_nothing_changes(deployment, trainer, published):
    trainer.step()
    identity = trainer.save(f"damaged-{next(_numbers)}", "delta")
    file = deployment.snapshots.folder(identity) / "weights.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    state = deployment.hot_load(identity)

    assert state["loading_state"]["stage"] == "error"
    assert state["current_snapshot_identity"] == published["current_snapshot_identity"]
    (choice,) = deployment.complete()
    assert choice["raw_output"]["versions"] == [[published["weight_version"], 12]]


def test_no_client_sees_a_server_die_and_its_successor_serves_the_same(deployment, trainer):
    identity = trainer.save(f"alive-{next(_numbers)}")
    number = deployment.hot_load(identity)["weight_version"]
    # The second finds the successor of the first, or waits until that has come.
    for victim in deployment.servers():
        running = deployment.running(32, max_tokens=200)
        os.kill(victim, signal.SIGKILL)
        for task in running:
            (choice,) = task.result()
            assert choice["raw_output"]["versions"] == [[number, 200]]
            assert trainer.gap(choice) < TOLERANCE
