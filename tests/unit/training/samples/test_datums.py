from types import SimpleNamespace

import pytest
import torch

from hearth.errors import ConfigError
from training.samples.datums import completion_datum, datum_from_tokens_weights, token_logprobs
from training.utils.rl import build_grpo_datums

TOKENS = [10, 11, 12, 13, 14, 15]


def fields_of(datum):
    return {name: list(value.data) for name, value in datum.loss_fn_inputs.items()}


def test_a_datum_is_shifted_by_one():
    datum = datum_from_tokens_weights(TOKENS, [0, 0, 0, 0.5, 1, -2])

    assert datum.model_input.to_ints() == [10, 11, 12, 13, 14]
    assert fields_of(datum) == {
        "target_tokens": [11, 12, 13, 14, 15],
        "weights": [0.0, 0.0, 0.5, 1.0, -2.0],
    }
    assert datum.loss_fn_inputs["target_tokens"].dtype == "int64"
    assert datum.loss_fn_inputs["weights"].dtype == "float32"


def test_tensors_and_lists_give_the_same_datum():
    weights = torch.tensor([0.0, 0, 0, 1, 1, 1])

    from_tensors = datum_from_tokens_weights(torch.tensor(TOKENS), weights)

    assert fields_of(from_tensors) == fields_of(completion_datum(TOKENS, 3))
    assert from_tensors.model_input == completion_datum(TOKENS, 3).model_input


def test_grpo_datums_weigh_the_prompt_0_and_the_completion_1():
    completion = SimpleNamespace(full_tokens=TOKENS, prompt_len=3)

    (datum,) = build_grpo_datums([completion])

    assert fields_of(datum)["weights"] == [0.0, 0.0, 1.0, 1.0, 1.0]
    assert fields_of(datum)["target_tokens"] == TOKENS[1:]


def test_grpo_datums_keep_the_first_8192_tokens_and_then_shift():
    completion = SimpleNamespace(full_tokens=list(range(9000)), prompt_len=8190)

    (datum,) = build_grpo_datums([completion])

    assert datum.model_input.to_ints() == list(range(8191))
    assert fields_of(datum)["target_tokens"] == list(range(1, 8192))
    assert fields_of(datum)["weights"] == [0.0] * 8189 + [1.0, 1.0]


def test_a_prompt_that_fills_the_sequence_is_kept_without_any_weight():
    assert fields_of(completion_datum(TOKENS, 5, max_length=4))["weights"] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("call", "rule"),
    [
        (lambda: datum_from_tokens_weights([1], [1.0]), "at least 2 ids, got 1"),
        (lambda: datum_from_tokens_weights([1, 2], [1.0]), "one entry per token, got 1 for 2"),
        (lambda: completion_datum([1, 2], 0), r"prompt_len must be in \[1, 2\], got 0"),
        (lambda: completion_datum([1, 2], 3), r"prompt_len must be in \[1, 2\], got 3"),
    ],
)
def test_bad_sequences_are_refused(call, rule):
    with pytest.raises(ConfigError, match=rule):
        call()


SAMPLED = [-0.4, -0.5, -0.6]
ALIGNED = {
    "echo": ([None, -0.2, -0.3, *SAMPLED], False, [-0.2, -0.3, *SAMPLED]),
    "echo-with-one-generated": ([None, -0.2, -0.3, *SAMPLED, -9.0], False, [-0.2, -0.3, *SAMPLED]),
    "echo-of-sampled-rows-only": ([None, None, None, *SAMPLED], False, [0.0, 0.0, *SAMPLED]),
    "completion-only": (SAMPLED, False, [0.0, 0.0, *SAMPLED]),
    "echo-without-the-none": ([-0.2, -0.3, *SAMPLED], True, [-0.2, -0.3, *SAMPLED]),
}


@pytest.mark.parametrize(("values", "is_echoed", "rows"), ALIGNED.values(), ids=ALIGNED)
def test_every_form_of_the_sampler_becomes_one_logprob_per_token(values, is_echoed, rows):
    logprobs = token_logprobs(values, num_tokens=6, prompt_len=3, is_echoed=is_echoed)
    assert logprobs == [0.0, *rows]


@pytest.mark.parametrize(
    ("values", "is_echoed"),
    [
        ([-0.1, -0.2, -0.3, *SAMPLED], False),  # N values, none of them None
        ([-0.2, -0.3, *SAMPLED], False),  # N - 1 that nobody said are echoed
        ([None, -0.3, *SAMPLED], False),
        ([None, -0.2, -0.3, *SAMPLED, -1.0, -1.0], False),
        (SAMPLED[1:], False),
        ([*SAMPLED, -0.7], False),
        (SAMPLED, True),
        ([-0.1, -0.2, -0.3, *SAMPLED], True),
    ],
)
def test_an_off_by_one_list_is_refused(values, is_echoed):
    with pytest.raises(ConfigError, match=f"got {len(values)} with .*off by one"):
        token_logprobs(values, num_tokens=6, prompt_len=3, is_echoed=is_echoed)


@pytest.mark.parametrize("values", [None, []])
def test_missing_logprobs_are_refused(values):
    with pytest.raises(ConfigError, match="must be given for 3 completion tokens, got"):
        token_logprobs(values, num_tokens=6, prompt_len=3)


def test_an_empty_completion_needs_no_logprobs():
    assert token_logprobs([], num_tokens=3, prompt_len=3) == [0.0, 0.0, 0.0]


def test_a_none_on_a_completion_token_is_refused():
    with pytest.raises(ConfigError, match="got None for token 4 of 6"):
        token_logprobs([-0.4, None, -0.6], num_tokens=6, prompt_len=3)
