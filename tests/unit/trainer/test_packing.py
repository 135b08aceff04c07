from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.trainer.conftest import make_datum

from hearth.errors import ConfigError, RequestError
from hearth.losses import builtin_objective
from hearth.trainer.datums import read_datums
from hearth.trainer.packing import Limits, PaddedBatch, split_padded
from hearth.wire.tensors import encode
from hearth.wire.tinker import DatumRecord

LIMITS = Limits(vocab_size=96, max_seq_len=100, max_position=100)
CROSS_ENTROPY = builtin_objective("cross_entropy")


def batches_of(lengths: list[int], budget: int, datum: Any) -> list[PaddedBatch]:
    data = [datum([1] * (length + 1)) for length in lengths]
    return split_padded(read_datums(data, CROSS_ENTROPY, LIMITS), budget, LIMITS)


def test_batches_are_sorted_by_length_and_hold_the_budget(datum: Any) -> None:
    batches = batches_of([5, 40, 30, 64, 33], 128, datum)

    assert [[example.length for example in batch.examples] for batch in batches] == [
        [64, 40],
        [33, 30],
        [5],
    ]
    assert [list(batch.input_ids.shape) for batch in batches] == [[2, 64], [2, 64], [1, 32]]


def test_a_datum_above_the_budget_gets_a_batch_of_its_own(datum: Any) -> None:
    batches = batches_of([90, 10, 10], 64, datum)

    assert [[example.index for example in batch.examples] for batch in batches] == [[0], [1, 2]]


def test_padding_stops_at_the_models_last_position(datum: Any) -> None:
    (batch,) = batches_of([97], 1000, datum)

    assert list(batch.input_ids.shape) == [1, 100]


@pytest.mark.slow
@given(st.lists(st.integers(1, 100), min_size=1, max_size=40), st.integers(1, 2000))
def test_every_token_stands_in_exactly_one_place(lengths: list[int], budget: int) -> None:
    data = [make_datum([index % 90 + 1] * (length + 1)) for index, length in enumerate(lengths)]
    batches = split_padded(read_datums(data, CROSS_ENTROPY, LIMITS), budget, LIMITS)

    assert sorted(example.index for batch in batches for example in batch.examples) == list(
        range(len(data))
    )
    for batch in batches:
        assert len(batch.examples) == 1 or batch.input_ids.numel() <= budget
        flat = batch.input_ids.flatten()[batch.token_places].tolist()
        assert flat == [
            example.index % 90 + 1 for example in batch.examples for _ in range(example.length)
        ]
        assert int((batch.input_ids != 0).sum()) == len(flat)


def test_a_budget_below_one_is_refused(datum: Any) -> None:
    with pytest.raises(ConfigError, match="micro_batch_tokens must be >= 1, got 0"):
        batches_of([3], 0, datum)


def test_chunks_of_an_input_are_joined(datum: Any) -> None:
    given = datum([1, 2, 3, 4])
    given.model_input.chunks *= 2
    given.loss_fn_inputs["target_tokens"] = encode([5] * 6, "int64")

    (example,) = read_datums([given], CROSS_ENTROPY, LIMITS)

    assert example.tokens.tolist() == [1, 2, 3, 1, 2, 3]


def test_masks_may_be_integers(datum: Any) -> None:
    given = datum([1, 2, 3])
    given.loss_fn_inputs["loss_mask"] = encode([0, 1], "int64")

    (example,) = read_datums([given], CROSS_ENTROPY, LIMITS)

    assert example.inputs["loss_mask"].tolist() == [0.0, 1.0]


Change = Callable[[DatumRecord], None]


def set_input(name: str, values: Any, dtype: Any = "float32") -> Change:
    def change(datum: DatumRecord) -> None:
        datum.loss_fn_inputs[name] = encode(np.asarray(values), dtype)

    return change


def set_tokens(*tokens: int) -> Change:
    def change(datum: DatumRecord) -> None:
        datum.model_input.chunks[0].tokens = list(tokens)

    return change


def make_image(datum: DatumRecord) -> None:
    datum.model_input.chunks[0].type = "image"


def drop_targets(datum: DatumRecord) -> None:
    del datum.loss_fn_inputs["target_tokens"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_tokens(1, 96), r"model_input must be token ids in \[0, 96\), got 96 at position 1"),
        (set_tokens(-1, 2), r"model_input must be token ids in \[0, 96\), got -1 at position 0"),
        (set_tokens(2**70, 1), "model_input must hold 64-bit token ids"),
        (set_tokens(), "model_input must have 1 to 100 tokens, got 0"),
        (set_tokens(*[1] * 101), "model_input must have 1 to 100 tokens, got 101"),
        (set_tokens(1, 2, 3), r"target_tokens of cross_entropy must have shape \[3\]"),
        (make_image, "encoded_text chunks, got a 'image' chunk"),
        (drop_targets, "loss_fn_inputs must hold target_tokens"),
        (set_input("target_tokens", [1.0, 2.0]), "target_tokens must be int64, got float32"),
        (set_input("target_tokens", [1, 200], "int64"), r"target_tokens must be token ids.*200"),
        (set_input("target_tokens", [[], []], "int64"), r"got \[2, 0\]"),
        (set_input("weights", [1.0]), r"weights must have the shape of target_tokens, \[2\]"),
        (set_input("advantages", [1.0, 1.0]), r"must be among .* got \['advantages'\]"),
    ],
)
def test_a_bad_datum_is_named_with_its_index(datum: Any, change: Change, message: str) -> None:
    good, bad = datum([1, 2, 3]), datum([1, 2, 3])
    change(bad)

    with pytest.raises(RequestError, match=f"datum 1: .*{message}"):
        read_datums([good, bad], CROSS_ENTROPY, LIMITS)


def test_policy_losses_take_one_target_per_token(datum: Any) -> None:
    given = datum([1, 2, 3], targets=[[1, 2], [3, 4]])

    with pytest.raises(RequestError, match=r"target_tokens of ppo must have shape \[2\]"):
        read_datums([given], builtin_objective("ppo"), LIMITS)
    (example,) = read_datums([given], CROSS_ENTROPY, LIMITS)
    assert example.target_shape == (2, 2)


def test_no_data_is_refused() -> None:
    with pytest.raises(RequestError, match="data must hold at least one datum"):
        read_datums([], CROSS_ENTROPY, LIMITS)
