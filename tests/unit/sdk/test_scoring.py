"""Scoring whole sequences: one request that echoes its prompts and samples nothing."""

import asyncio

import pytest
from tests.unit.sdk.conftest import response

from hearth.errors import ConfigError, TransportError
from hearth.sdk import DeploymentSampler, SamplingRetryPolicy
from hearth.sdk.transport import RetryPolicy

MODEL = "accounts/me/deployments/d"
COMPLETIONS = ("POST", "/inference/v1/completions")
ONCE = SamplingRetryPolicy(retries=RetryPolicy(attempts=1))


def choice(index, tokens, logprobs):
    raw = {"completion_token_ids": tokens, "logprobs": logprobs}
    return {"index": index, "text": "", "finish_reason": "length", "raw_output": raw}


def scoring(peer, sequences, **options):
    sampler = DeploymentSampler(peer.url, MODEL, "key", retry_policy=ONCE)
    return asyncio.run(sampler.score_token_ids(sequences, **options))


def test_sequences_are_one_request_of_token_ids_and_come_back_in_their_order(peer, answer):
    choices = [choice(1, [3, 4], [None, -3.0]), choice(0, [5, 6, 7], [None, -1.0, -2.0])]
    peer.on(*COMPLETIONS, answer(response(*choices)))

    rows = scoring(peer, [(5, 6, 7), (3, 4)])

    assert rows == [[-1.0, -2.0], [-3.0]]
    (sent,) = peer.requests(*COMPLETIONS)
    assert sent.body["prompt"] == [[5, 6, 7], [3, 4]]
    assert (sent.body["max_tokens"], sent.body["echo"], sent.body["logprobs"]) == (0, True, True)


def test_the_ends_of_sequences_are_scored_alone(peer, answer):
    choices = [choice(0, [6, 7], [-1.0, -2.0]), choice(1, [3, 4], [None, -3.0])]
    peer.on(*COMPLETIONS, answer(response(*choices)))

    rows = scoring(peer, [[5, 6, 7], [3, 4]], last=2)

    assert rows == [[-1.0, -2.0], [-3.0]]
    (sent,) = peer.requests(*COMPLETIONS)
    assert (sent.body["echo"], sent.body["echo_last"]) == (False, 2)


def test_of_no_token_there_is_no_score(peer):
    with pytest.raises(ConfigError, match="last must be >= 1 or None, got 0"):
        scoring(peer, [[5, 6]], last=0)


def test_nothing_to_score_asks_nothing(peer):
    assert scoring(peer, []) == []
    assert peer.requests(*COMPLETIONS) == []


@pytest.mark.parametrize(
    "choices",
    [
        [choice(0, [5, 6], [None, -1.0])],
        [choice(0, [5, 6], [None, -1.0]), choice(1, [9, 9], [None, -1.0])],
        [choice(0, [5, 6], [None, -1.0]), choice(1, [3, 4], [None, None])],
        [choice(0, [5, 6], [None, -1.0]), choice(1, [3, 4], None)],
    ],
    ids=["too few", "other tokens", "no logprob", "no logprobs"],
)
def test_an_answer_that_is_not_about_each_sequence_is_refused(peer, answer, choices):
    peer.on(*COMPLETIONS, answer(response(*choices)))

    with pytest.raises(TransportError, match=r"must (answer about each|come back with its own)"):
        scoring(peer, [[5, 6], [3, 4]])


def test_a_sample_does_not_take_what_only_scoring_understands():
    sampler = DeploymentSampler("http://nowhere", MODEL, "key", retry_policy=ONCE)

    with pytest.raises(ConfigError, match=r"must be request fields, got \['echo_last'\]"):
        asyncio.run(sampler.sample_with_prompt_tokens([5, 6], echo_last=1))


def top_choice(tokens, *tops):
    content = [
        {
            "token": "",
            "token_id": token,
            "logprob": -1.0,
            "top_logprobs": [
                {"token": "", "token_id": other, "logprob": logprob} for other, logprob in top
            ],
        }
        for token, top in zip(tokens, tops, strict=True)
    ]
    listed = {
        "content": content,
        "tokens": [""] * len(tokens),
        "token_logprobs": [-1.0] * len(tokens),
    }
    return {"index": 0, "text": "", "finish_reason": "length", "logprobs": listed}


def top_tokens(peer, sequence, k, last):
    sampler = DeploymentSampler(peer.url, MODEL, "key", retry_policy=ONCE)
    return asyncio.run(sampler.score_top_tokens(sequence, k, last=last))


def test_the_most_probable_tokens_at_the_end_of_a_sequence_are_ids_and_logprobs(peer, answer):
    tops = [[(6, -0.5), (1, -1.5)], [(2, -0.1), (7, -3.0)]]
    peer.on(*COMPLETIONS, answer(response(top_choice([6, 7], *tops))))

    assert top_tokens(peer, [5, 6, 7], 2, 2) == tops
    (sent,) = peer.requests(*COMPLETIONS)
    assert (sent.body["echo_last"], sent.body["top_logprobs"], sent.body["max_tokens"]) == (2, 2, 0)


@pytest.mark.parametrize(
    "found",
    [
        top_choice([6, 8], [(6, -0.5)], [(2, -0.1)]),
        top_choice([7], [(2, -0.1)]),
        top_choice([6, 7], [(6, -0.5)], []),
        choice(0, [6, 7], [-1.0, -2.0]),
    ],
    ids=["other tokens", "too few", "no top", "no logprobs"],
)
def test_top_tokens_of_others_are_refused(peer, answer, found):
    peer.on(*COMPLETIONS, answer(response(found)))

    with pytest.raises(TransportError, match="must come back with its own tokens and the 1 most"):
        top_tokens(peer, [5, 6, 7], 1, 2)


@pytest.mark.parametrize(
    ("k", "last", "message"),
    [(0, 1, "k must be >= 1, got 0"), (1, 0, "last must be >= 1"), (1, 3, "last must be .* <= 2")],
)
def test_of_the_first_token_and_of_none_there_is_no_top(peer, k, last, message):
    with pytest.raises(ConfigError, match=message):
        top_tokens(peer, [5, 6, 7], k, last)
