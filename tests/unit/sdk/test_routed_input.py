"""Experts on their way from the SDK to a trainer, and from captured turns."""

import pytest
import tinker
from tests.unit.sdk.conftest import response

from hearth.errors import TransportError
from hearth.sdk import RoutedModelInput
from hearth.sdk.batches import MAX_CHUNK_TOKENS, build_batch, split_datums
from hearth.sdk.capture.answers import build_answer, read_turn
from hearth.sdk.capture.policy import SamplingPolicy
from hearth.sdk.capture.requests import AnswerForm
from hearth.sdk.capture.turns import CapturedTurn, build_chains
from hearth.sdk.sampling import parse_completion
from hearth.wire.chat import ChatResponse
from hearth.wire.completions import CompletionRequest, CompletionResponse
from hearth.wire.tinker import DatumRecord


def datum_of(tokens, routing=None) -> tinker.Datum:
    model_input = tinker.ModelInput.from_ints(tokens)
    if routing is not None:
        model_input = RoutedModelInput(chunks=model_input.chunks, routing_matrices=routing)
    return tinker.Datum(model_input=model_input, loss_fn_inputs={})


def test_a_routed_input_crosses_the_wire_and_a_plain_one_says_nothing():
    data = [datum_of([1, 2], ["", "AAE="]), datum_of([1, 2])]

    body = build_batch(data, as_columns=True).body

    routed, plain = body["data"]
    assert DatumRecord.model_validate(routed).model_input.routing_matrices == ["", "AAE="]
    assert "routing_matrices" not in plain["model_input"]


def test_experts_count_where_a_batch_is_cut():
    tokens, row = [1] * (MAX_CHUNK_TOKENS // 4), "A" * 32

    assert [len(chunk) for chunk in split_datums([datum_of(tokens)] * 4)] == [4]
    routed = [datum_of(tokens, [row] * len(tokens))] * 4
    assert [len(chunk) for chunk in split_datums(routed)] == [2, 2]


@pytest.mark.parametrize("rows", [["a"], ["a", "b", "c"]])
def test_a_deployment_that_tells_experts_of_another_number_of_tokens_is_not_believed(rows):
    raw = {"completion_token_ids": [3, 4], "routing_matrices": rows}
    choice = {"index": 0, "text": "", "finish_reason": "stop", "raw_output": raw}
    answer = CompletionResponse.from_dict(response(choice))

    with pytest.raises(TransportError, match=f"must be one per token, 2, got {len(rows)}"):
        parse_completion(answer, CompletionRequest(prompt=[1]))


def turn(prompt, sampled, routing) -> CapturedTurn:
    return CapturedTurn(
        prompt_tokens=prompt,
        completion_tokens=sampled,
        logprobs=[-0.1] * len(sampled),
        versions=[[0, len(sampled)]],
        finish_reason="stop",
        text="",
        routing_matrices=routing,
    )


def test_a_chain_of_turns_has_the_experts_of_each_sampled_token():
    (chain,) = build_chains([turn([1, 2], [3], ["c"]), turn([1, 2, 3, 4], [5, 6], ["e", "f"])])
    assert chain.tokens == [1, 2, 3, 4, 5, 6]
    assert chain.routing_matrices == ["", "", "c", "", "e", "f"]

    (late,) = build_chains([turn([1, 2], [3], None), turn([1, 2, 3], [5], ["e"])])
    assert late.routing_matrices == ["", "", "", "e"]
    assert build_chains([turn([1], [2], None)])[0].routing_matrices is None


def chat_answer(raw, rows=None) -> ChatResponse:
    choice = {
        "index": 0,
        "message": {"content": "x"},
        "finish_reason": "stop",
        "raw_output": {"completion_token_ids": [3], "prompt_token_ids": [1], **raw},
        "logprobs": None if rows is None else {"content": rows},
    }
    return ChatResponse.from_dict(response(choice))


def test_a_turn_is_captured_with_its_experts_in_both_forms_and_clients_do_not_see_them():
    arrays = chat_answer({"sampling_logprobs": [-0.1], "routing_matrices": ["c"]})
    row = {"token": "x", "token_id": 3, "logprob": -0.1, "sampling_logprob": -0.1}
    objects = chat_answer({}, [row | {"routing_matrix": "c"}])

    assert read_turn(arrays).routing_matrices == read_turn(objects).routing_matrices == ["c"]
    assert read_turn(chat_answer({}, [row])).routing_matrices is None
    shown = build_answer(objects, AnswerForm(logprobs=True))
    assert set(shown["choices"][0]["logprobs"]["content"][0]) == {"token", "logprob"}


def test_the_recipe_asks_for_experts_in_every_request_of_an_agent():
    policy = SamplingPolicy({"include_routing_matrix": True})
    assert policy.apply({"include_routing_matrix": False})["include_routing_matrix"] is True
