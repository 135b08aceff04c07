"""Mixtures of experts in the engine: sampled as they compute, and their experts told on request."""

import json
import logging

import numpy as np
import pytest
import torch
from tests.unit.inference.conftest import AppClient
from tests.unit.inference.test_in_flight_updates import act_at
from tests.unit.moe import LAYERS, TOP_K, plain_logprobs, write_moe
from transformers import DynamicCache

from hearth.errors import RequestError
from hearth.inference.backend import SampleRequest
from hearth.inference.engine.prompts import Extras, Prompt
from hearth.inference.requests import read_chat, read_completion
from hearth.inference.service import create_app
from hearth.models.loading import base_tensors, load_model
from hearth.models.routing import find_routers
from hearth.sdk.sampling import parse_completion
from hearth.sync.store import MemorySnapshotStore, Snapshot
from hearth.wire.completions import CompletionRequest, CompletionResponse
from hearth.wire.routing import RoutingShape, decode_routing, encode_routing

pytestmark = pytest.mark.slow

SHAPE = RoutingShape(LAYERS, 8, TOP_K)
PROMPTS = [[5, 6, 7], [*range(4, 44)], [9] * 70]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_moe(tmp_path_factory.mktemp("moe"), vocab_size=264)


@pytest.fixture
def moe(folder):
    return load_model(folder, name="moe")


@pytest.fixture
def engine(start, moe):
    return start(moe)


@pytest.fixture(scope="module")
def exact(folder):
    """The model's weights in float64."""
    return {
        name: weight.double() for name, weight in load_model(folder).module.state_dict().items()
    }


def ask(prompt, **changes) -> SampleRequest:
    usual = {"max_tokens": 12, "seed": 1, "ignore_eos": True, "routing": True}
    return SampleRequest(prompt=prompt, **(usual | changes))


def stacked(choices) -> torch.Tensor:
    """Experts as int64 [T, N, K]."""
    return torch.from_numpy(np.array(choices, np.int64).reshape(-1, LAYERS, TOP_K))


def test_logprobs_and_experts_are_those_of_a_plain_computation(engine, exact):
    futures = [engine.submit(ask(prompt, prompt_logprobs=True)) for prompt in PROMPTS]

    for prompt, future in zip(PROMPTS, futures, strict=True):
        sampled = future.result()
        expected, experts = plain_logprobs(exact, prompt + sampled.token_ids)
        got = torch.tensor([*sampled.prompt_logprobs[1:], *sampled.logprobs], dtype=torch.float64)
        assert (got - expected).abs().max() <= 1e-5
        recorded = stacked([*sampled.prompt_routing, *sampled.routing])
        # The last token's own position was never computed.
        assert torch.equal(recorded, experts[:-1])
        assert len(sampled.routing) == len(sampled.token_ids) == 12
        assert sampled.routing[0].dtype == np.uint8


def test_recording_changes_nothing_and_goes_to_those_who_ask(engine):
    wanted = [True, False, True, False]

    sampled = [engine.submit(ask(PROMPTS[0], routing=is_wanted)) for is_wanted in wanted]

    results = [completion.result() for completion in sampled]
    assert [result.routing is not None for result in results] == wanted
    assert [result.prompt_routing is not None for result in results] == wanted
    assert len({tuple(result.token_ids) for result in results}) == 1
    assert len({tuple(result.logprobs) for result in results}) == 1


def test_a_shared_prompt_tells_its_experts_to_whoever_comes_later(engine):
    first = engine.submit(ask(PROMPTS[1])).result()
    again = engine.submit(ask(PROMPTS[1], seed=2)).result()

    assert (first.cached_prompt_tokens, again.cached_prompt_tokens) == (0, 40)
    assert torch.equal(stacked(first.prompt_routing), stacked(again.prompt_routing))
    assert torch.equal(stacked(first.routing[:1]), stacked(again.routing[:1]))


def test_a_prompt_that_was_kept_without_its_experts_is_computed_once_more(engine):
    engine.submit(ask(PROMPTS[1], routing=False)).result()
    asked = engine.submit(ask(PROMPTS[1])).result()

    assert asked.cached_prompt_tokens == 0
    assert len(asked.prompt_routing) == 39


def test_experts_are_told_of_rows_that_move_and_of_prompts_that_only_score(engine, exact):
    lengths = [2, 9, 4, 16, 1, 7]
    futures = [
        engine.submit(ask([4 + place] * 5, max_tokens=length, routing=place % 2 == 1))
        for place, length in enumerate(lengths)
    ]
    for place, future in enumerate(futures):
        sampled = future.result()
        if place % 2:
            _, experts = plain_logprobs(exact, [4 + place] * 5 + sampled.token_ids)
            assert torch.equal(stacked(sampled.routing), experts[4:-1])

    scored = engine.submit(ask(PROMPTS[0], max_tokens=0)).result()
    assert (len(scored.routing), len(scored.prompt_routing)) == (0, 2)


def test_after_a_weight_sync_the_experts_are_those_of_the_new_weights(engine, moe):
    before = engine.submit(ask(PROMPTS[0])).result()
    weights = {name: tensor.detach().clone() for name, tensor in base_tensors(moe.module).items()}
    for name in weights:
        if name.endswith("gate.weight"):
            weights[name] = weights[name].flip(0)
    state = engine.load_snapshot(Snapshot.capture("flipped", "base", "moe", weights)).result()

    after = engine.submit(ask(PROMPTS[0])).result()

    assert (state.weight_version, after.weight_version) == (1, 1)
    # The first layer's routers are each other's mirror image.
    first_layer = [stacked(item.prompt_routing)[:, 0] for item in (before, after)]
    assert torch.equal(7 - first_layer[0], first_layer[1])


def test_each_token_has_the_experts_of_the_weights_that_it_was_sampled_with(start, moe, folder):
    old, new = load_model(folder), load_model(folder)
    for layer in new.module.model.layers:
        with torch.no_grad():
            layer.mlp.gate.weight.copy_(layer.mlp.gate.weight.flip(0))
    snapshot = Snapshot.capture("flipped", "base", "moe", base_tensors(new.module))
    engine = start(moe)
    swap = act_at({5: lambda: engine.load_snapshot(snapshot, running_requests="keep")})

    sampled = engine.submit(ask(PROMPTS[0], listener=swap)).result()

    assert sampled.versions == [[0, 5], [1, 7]]
    # The first of the new weights reads the last token of the old ones.
    tokens, cache, experts = [*PROMPTS[0], *sampled.token_ids], DynamicCache(), []
    for model, part in ((old, tokens[:7]), (new, tokens[7:-1])):
        routers = find_routers(model)
        assert routers is not None
        with torch.no_grad(), routers.recording() as record:
            model.module(input_ids=torch.tensor([part]), past_key_values=cache, use_cache=True)
        experts.append(stacked(record.choices()))
    assert torch.equal(stacked(sampled.routing), torch.cat(experts)[2:])


def test_a_dense_model_answers_without_experts_and_says_so_once(start, caplog):
    engine = start("qwen")
    with caplog.at_level(logging.WARNING):
        sampled = [engine.submit(ask([1, 2, 3])).result() for _ in range(3)]

    assert [(completion.routing, completion.prompt_routing) for completion in sampled] == [
        (None, None)
    ] * 3
    reported = [record for record in caplog.records if "experts" in record.getMessage()]
    assert len(reported) == 1


# The wire.


@pytest.fixture
def call(start, moe):
    """Post to the deployment's app; returns the answer's text."""
    client = AppClient(create_app(start(moe), model_name="d", snapshots=MemorySnapshotStore()))

    async def post(path: str, **fields) -> str:
        body = {"max_tokens": 5, "seed": 7, "ignore_eos": True, "logprobs": True} | fields
        answer = await client.call("POST", path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.text

    return post


COMPLETIONS = {"path": "/v1/completions", "prompt": [5, 6, 7], "include_routing_matrix": True}
CHAT = {
    "path": "/v1/chat/completions",
    "messages": [{"role": "user", "content": "2"}],
    "include_routing_matrix": True,
}


def content_rows(choices) -> list[dict]:
    return [row for choice in choices for row in choice["logprobs"]["content"]]


def streamed(text: str) -> list[dict]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [choice for line in lines[:-1] for choice in json.loads(line)["choices"]]


async def test_every_token_object_has_its_experts_streamed_or_not_in_both_apis(call):
    for asked in (COMPLETIONS, CHAT):
        whole = json.loads(await call(**asked))["choices"]
        pieces = streamed(await call(**asked, stream=True))
        reported = [row["routing_matrix"] for row in content_rows(whole)]
        assert [row["routing_matrix"] for row in content_rows(pieces)] == reported
        assert decode_routing(reported, SHAPE).shape == (5, LAYERS, TOP_K)
        assert "routing_matrices" not in whole[0].get("raw_output", {})


async def test_arrays_have_them_beside_the_ids_streamed_or_not_in_both_apis(call):
    for asked in (COMPLETIONS, CHAT):
        objects = content_rows(json.loads(await call(**asked))["choices"])
        arrays = {**asked, "logprob_format": "arrays", "raw_output": True}
        whole = json.loads(await call(**arrays))["choices"][0]
        *_, last = streamed(await call(**arrays, stream=True))
        reported = [row["routing_matrix"] for row in objects]
        assert whole["raw_output"]["routing_matrices"] == reported
        assert last["raw_output"]["routing_matrices"] == reported


async def test_nothing_is_told_without_being_asked_for(call):
    text = await call(**{**COMPLETIONS, "include_routing_matrix": False}, raw_output=True)
    assert "routing" not in text


async def test_echo_and_the_prompts_own_option_tell_the_same(call):
    arrays = {**COMPLETIONS, "logprob_format": "arrays", "raw_output": True}
    plain, echoed, added = [
        json.loads(await call(**arrays, **more))["choices"][0]["raw_output"]
        for more in ({}, {"echo": True}, {"include_prompt_routing": True})
    ]
    own = plain["routing_matrices"]
    assert echoed["routing_matrices"][0] == ""
    assert echoed["routing_matrices"][3:] == own == added["routing_matrices"]
    assert echoed["routing_matrices"][1:3] == added["prompt_routing_matrices"]
    assert "prompt_routing_matrices" not in plain

    last = json.loads(await call(**arrays, echo_last=2))["choices"][0]["raw_output"]
    assert last["routing_matrices"] == echoed["routing_matrices"][1:]

    objects = json.loads(await call(**COMPLETIONS, echo=True))["choices"]
    reported = [row.get("routing_matrix", "") for row in content_rows(objects)]
    assert reported == echoed["routing_matrices"]


@pytest.mark.parametrize(
    ("options", "count"), [({}, 5), ({"echo": True}, 7), ({"include_prompt_routing": True}, 7)]
)
async def test_the_sdk_has_one_text_per_sampled_token_or_per_token_after_the_first(
    call, options, count
):
    fields = COMPLETIONS | {"raw_output": True, "logprob_format": "arrays"} | options
    request = CompletionRequest.from_dict(fields)
    answer = CompletionResponse.parse((await call(**fields)).encode())

    assert len(parse_completion(answer, request).routing_matrices or []) == count


REFUSED = {
    "without logprobs": ({"logprobs": False}, "logprobs must be true"),
    "as a shared file": ({"routing_matrix_format": "parquet_v1"}, "routing_matrix_format must be"),
    "of the prompt alone": (
        {"include_routing_matrix": False, "include_prompt_routing": True, "raw_output": True},
        "include_prompt_routing must come with include_routing_matrix",
    ),
    "echoed as a stream": ({"echo": True, "stream": True}, "echo must be false"),
}


@pytest.mark.parametrize(("fields", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_told_is_refused(fields, message):
    usual = {"prompt": [1], "logprobs": True, "include_routing_matrix": True}
    with pytest.raises(RequestError, match=message):
        read_completion(json.dumps(usual | fields).encode())


def test_chat_too_tells_experts_beside_logprobs_only():
    body = {"messages": [{"role": "user", "content": "2"}], "include_routing_matrix": True}
    with pytest.raises(RequestError, match="logprobs must be true"):
        read_chat(json.dumps(body).encode())


def test_a_row_is_a_byte_per_expert_and_two_where_a_byte_is_too_small():
    few, many = RoutingShape(58, 256, 8), RoutingShape(2, 257, 2)
    assert (few.bytes_per_token, many.bytes_per_token) == (464, 8)

    choice = np.array([[256, 1], [2, 3]], many.dtype)
    (row,) = encode_routing([choice])
    assert row == "AAEBAAIAAwA="
    assert decode_routing(["", row], many).tolist() == [[[-1, -1], [-1, -1]], choice.tolist()]


BAD_ROWS = {
    "no base64": ("?", "must be base64, got '\\?' at position 1"),
    "short": ("AAE=", "must hold 4 bytes per position .2 layers, 2 experts.*got 2 at position 1"),
    "unknown expert": ("AAECCQ==", "must name experts in 0..7, got 9 at position 1, layer 1"),
    "twice": ("AAECAg==", "must name an expert once, got \\[2, 2\\] at position 1, layer 1"),
}


@pytest.mark.parametrize(("row", "message"), BAD_ROWS.values(), ids=BAD_ROWS.keys())
def test_a_row_of_another_model_is_refused_with_its_position(row, message):
    with pytest.raises(RequestError, match=f"routing_matrices {message}"):
        decode_routing(["", row], SHAPE)


def test_a_kept_prompt_counts_what_its_experts_take():
    parts = (torch.zeros(2, 1, 3, 4), torch.zeros(2, 1, 3, 2), torch.zeros(5))
    plain = Prompt((4, 5, 6), *parts)
    routed = Prompt((4, 5, 6), *parts, routing=np.zeros((3, LAYERS, TOP_K), np.uint8))

    assert routed.size_bytes - plain.size_bytes == 3 * LAYERS * TOP_K
    assert (plain.has(Extras(routed=True)), routed.has(Extras(routed=True))) == (False, True)
