"""Captured turns as chains of tokens."""

import random

import pytest

from hearth.sdk.capture import CapturedTurn, TurnChain
from hearth.sdk.capture.turns import build_chains

STOP = 9


def turn(prompt, completion, *, version=0, text="", finish_reason="stop"):
    return CapturedTurn(
        prompt_tokens=prompt,
        completion_tokens=completion,
        logprobs=[-token / 10 for token in completion],
        versions=[[version, len(completion)]] if completion else [],
        finish_reason=finish_reason,
        text=text,
    )


def tokens_of(chains):
    return [chain.tokens for chain in chains]


def test_one_turn_is_one_chain():
    assert build_chains([turn([1, 2], [3, STOP], version=4, text="hi")]) == [
        TurnChain(
            tokens=[1, 2, 3, STOP],
            logprobs=[0.0, 0.0, -0.3, -0.9],
            loss_mask=[0, 0, 1, 1],
            versions=[[4, 2]],
            finish_reason="stop",
            text="hi",
            turns=1,
        )
    ]


def test_a_prompt_that_begins_with_all_before_it_extends_the_chain():
    first = turn([1, 2], [3, STOP], version=1, text="a")
    second = turn([1, 2, 3, STOP, 5, 6], [7], version=1, text="b", finish_reason="length")
    third = turn([1, 2, 3, STOP, 5, 6, 7, 8], [4], version=2, text="c")

    assert build_chains([first, second, third]) == [
        TurnChain(
            tokens=[1, 2, 3, STOP, 5, 6, 7, 8, 4],
            logprobs=[0.0, 0.0, -0.3, -0.9, 0.0, 0.0, -0.7, 0.0, -0.4],
            loss_mask=[0, 0, 1, 1, 0, 0, 1, 0, 1],
            versions=[[1, 3], [2, 1]],
            finish_reason="stop",
            text="c",
            turns=3,
        )
    ]


@pytest.mark.parametrize("sampled", [[3], [3, STOP]], ids=["stop token left out", "with it"])
def test_a_stop_token_is_context_where_it_was_not_sampled(sampled):
    (chain,) = build_chains([turn([1], sampled), turn([1, 3, STOP, 2], [4])])

    assert chain.tokens == [1, 3, STOP, 2, 4]
    assert chain.loss_mask == [0, 1, int(STOP in sampled), 0, 1]


def test_a_prompt_that_is_the_chain_itself_continues_it():
    (chain,) = build_chains([turn([1], [2]), turn([1, 2], [3])])

    assert (chain.tokens, chain.loss_mask) == ([1, 2, 3], [0, 1, 1])


REWRITTEN = {
    "another token": [1, 2, 4, STOP, 5],
    "the stop token missing": [1, 2, 3, 5, 6],
    "shortened": [1, 2, 3],
    "its beginning cut": [2, 3, STOP, 5],
}


@pytest.mark.parametrize("prompt", REWRITTEN.values(), ids=REWRITTEN.keys())
def test_a_history_that_is_not_what_was_sampled_begins_a_chain(prompt):
    chains = build_chains([turn([1, 2], [3, STOP]), turn(prompt, [7])])

    assert tokens_of(chains) == [[1, 2, 3, STOP], [*prompt, 7]]
    assert chains[1].loss_mask == [0] * len(prompt) + [1]


def test_branches_of_one_prefix_are_chains_that_train_the_prefix_once():
    root = turn([1], [2])
    left, right = turn([1, 2, 3], [4]), turn([1, 2, 3], [5])

    chains = build_chains([root, left, right])

    assert tokens_of(chains) == [[1, 2, 3, 4], [1, 2, 3, 5]]
    assert [chain.loss_mask for chain in chains] == [[0, 1, 0, 1], [0, 0, 0, 1]]
    assert [chain.turns for chain in chains] == [2, 1]


def test_of_several_chains_the_longest_is_extended():
    short, long = turn([1], [2]), turn([1], [2, 3])

    chains = build_chains([short, long, turn([1, 2, 3, 4], [5])])

    assert tokens_of(chains) == [[1, 2], [1, 2, 3, 4, 5]]


def test_of_equal_chains_the_first_is_extended():
    chains = build_chains(
        [turn([1], [2], text="first"), turn([1], [2], text="second"), turn([1, 2], [3])]
    )

    assert tokens_of(chains) == [[1, 2], [1, 2, 3]]
    assert chains[0].text == "second"


def test_a_conversation_that_goes_on_after_another_one_stands_behind_it():
    question, answer = turn([1], [2]), turn([1, 2, 3], [4])
    aside = turn([7], [8])

    chains = build_chains([question, aside, answer])

    assert tokens_of(chains) == [[7, 8], [1, 2, 3, 4]]


def test_turns_in_which_nothing_was_sampled_are_left_out():
    assert build_chains([]) == []
    assert build_chains([turn([1], [])]) == []
    assert tokens_of(build_chains([turn([1], []), turn([1, 5], [2])])) == [[1, 5, 2]]


@pytest.mark.parametrize("seed", range(10))
def test_every_sampled_token_is_in_one_chain_with_its_logprob_and_version(seed):
    rng = random.Random(seed)
    turns = []
    for version in range(12):
        before = rng.choice(turns) if turns and rng.random() < 0.8 else None
        prompt = before.prompt_tokens + before.completion_tokens if before else []
        prompt = prompt + [rng.randrange(3) for _ in range(rng.randrange(1, 4))]
        completion = [rng.randrange(3) for _ in range(rng.randrange(1, 4))]
        turns.append(turn(prompt, completion, version=version))

    chains = build_chains(turns)

    sampled = sum(len(turn.completion_tokens) for turn in turns)
    assert sum(sum(chain.loss_mask) for chain in chains) == sampled
    assert sum(chain.turns for chain in chains) == len(turns)
    for chain in chains:
        assert len(chain.tokens) == len(chain.logprobs) == len(chain.loss_mask)
        assert sum(tokens for _, tokens in chain.versions) == sum(chain.loss_mask)
        rows = zip(chain.tokens, chain.logprobs, chain.loss_mask, strict=True)
        assert all(logprob == (-token / 10 if mask else 0.0) for token, logprob, mask in rows)
