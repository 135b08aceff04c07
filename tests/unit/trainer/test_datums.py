"""Datums read all at once, as columns too, and one by one: the same, errors included."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tinker
import torch
from hypothesis import given
from hypothesis import strategies as st

from hearth.errors import RequestError
from hearth.losses import builtin_objective
from hearth.sdk.batches import build_batch
from hearth.trainer.datums import read_datums
from hearth.trainer.packing import Example, Limits, is_same_text
from hearth.wire.tensors import Encoding, TensorRecord, encode
from hearth.wire.tinker import DatumColumns, DatumRecord

LIMITS = Limits(vocab_size=96, max_seq_len=40, max_position=40)
PPO = builtin_objective("ppo")


def content(length: int, encoding: Encoding, *, seed: int = 0) -> dict[str, Any]:
    numbers = np.random.default_rng((seed, length))
    fields = {
        "target_tokens": encode(numbers.integers(0, 96, length), "int64", encoding),
        "logprobs": encode(-numbers.random(length), "float32", encoding),
        "advantages": encode(numbers.normal(size=length), "float32", encoding),
        "loss_mask": encode(numbers.integers(0, 2, length), "int64", encoding),
    }
    tokens = numbers.integers(0, 96, length).tolist()
    return {
        "model_input": {"chunks": [{"tokens": tokens, "type": "encoded_text"}]},
        "loss_fn_inputs": {name: record.as_dict() for name, record in fields.items()},
    }


def records(contents: list[dict[str, Any]]) -> list[DatumRecord]:
    return [DatumRecord.model_validate(content) for content in contents]


def columns(contents: list[dict[str, Any]]) -> DatumColumns:
    """The same as our SDK sends them."""
    data = [
        tinker.Datum(
            model_input=tinker.ModelInput.from_ints(content["model_input"]["chunks"][0]["tokens"]),
            loss_fn_inputs={
                name: tinker.TensorData.from_numpy(TensorRecord.from_dict(record).to_numpy())
                for name, record in content["loss_fn_inputs"].items()
            },
        )
        for content in contents
    ]
    return DatumColumns.from_dict(build_batch(data, as_columns=True).body["columns"])


def assert_same(first: Example, second: Example) -> None:
    assert (first.index, first.target_shape) == (second.index, second.target_shape)
    assert is_same_text([first], [second])
    assert first.inputs.keys() == second.inputs.keys()
    for name, values in first.inputs.items():
        torch.testing.assert_close(values, second.inputs[name], rtol=0, atol=0)


@pytest.mark.slow
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12))
def test_bytes_lists_and_columns_give_the_same_examples(lengths: list[int]) -> None:
    as_bytes, as_lists = (
        [content(length, encoding, seed=place) for place, length in enumerate(lengths)]
        for encoding in ("base64", "list")
    )

    forms = [
        read_datums(data, PPO, LIMITS)
        for data in (records(as_bytes), records(as_lists), columns(as_bytes))
    ]
    for first, second, third in zip(*forms, strict=True):
        assert_same(first, second)
        assert_same(first, third)


def test_columns_are_cut_into_those_of_some_datums() -> None:
    contents = [content(length, "base64", seed=length) for length in (3, 5, 2, 4)]
    shares = [[1, 3], [], [0, 2]]

    cut = columns(contents).cut(shares)

    assert [own.lengths.to_numpy().tolist() for own in cut] == [[5, 4], [], [3, 2]]
    for own, places in ((cut[0], shares[0]), (cut[2], shares[2])):
        expected = read_datums(records([contents[place] for place in places]), PPO, LIMITS)
        for first, second in zip(read_datums(own, PPO, LIMITS), expected, strict=True):
            assert_same(first, second)


def test_forms_may_differ_from_datum_to_datum() -> None:
    mixed = [content(5, "base64"), content(7, "list"), content(9, "base64")]
    del mixed[2]["loss_fn_inputs"]["loss_mask"]
    mixed[0]["model_input"]["chunks"] = [
        {"tokens": mixed[0]["model_input"]["chunks"][0]["tokens"][:2], "type": "encoded_text"},
        {"tokens": mixed[0]["model_input"]["chunks"][0]["tokens"][2:], "type": "encoded_text"},
    ]

    examples = read_datums(records(mixed), PPO, LIMITS)

    assert [example.length for example in examples] == [5, 7, 9]
    assert [sorted(example.inputs) for example in examples] == [
        ["advantages", "logprobs", "loss_mask"],
        ["advantages", "logprobs", "loss_mask"],
        ["advantages", "logprobs"],
    ]


TARGETS, ADVANTAGES = ("loss_fn_inputs", "target_tokens"), ("loss_fn_inputs", "advantages")
TOKENS = ("model_input", "chunks", 0, "tokens")


def int_tensor(*values: int) -> dict[str, Any]:
    return encode(np.array(values), "int64", "base64").as_dict()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (TARGETS, int_tensor(0, 1, 2), r"datum 1: target_tokens of ppo must have shape \[4\]"),
        (
            TARGETS,
            int_tensor(1, 96, 3, 4),
            r"target_tokens must be token ids .* got 96 at position 1",
        ),
        ((*TOKENS, 2), -1, r"datum 1: model_input must be token ids .* got -1 at position 2"),
        ((*TOKENS, 2), 2**70, "datum 1: model_input must hold 64-bit token ids"),
        ((*TARGETS, "dtype"), "float32", "datum 1: target_tokens must be int64"),
        (("loss_fn_inputs",), {}, "datum 1: loss_fn_inputs must hold target_tokens"),
        (("loss_fn_inputs", "rewards"), int_tensor(1, 2, 3, 4), r"of ppo .* got \['rewards'\]"),
        ((*ADVANTAGES, "data"), "no base64!", "data must be base64"),
        ((*ADVANTAGES, "data"), "AAAAAA==", "shape must fit the data"),
        (("model_input", "chunks"), [], "datum 1: model_input must have 1 to 40 tokens, got 0"),
    ],
)
def test_a_datum_that_breaks_a_rule_is_named(path: Any, value: Any, message: str) -> None:
    contents = [content(4, "base64", seed=place) for place in range(3)]
    changed: Any = contents[1]
    for key in path[:-1]:
        changed = changed[key]
    changed[path[-1]] = value

    with pytest.raises(RequestError, match=message):
        read_datums(records(contents), PPO, LIMITS)


def test_a_datum_longer_than_the_model_is_named() -> None:
    with pytest.raises(RequestError, match="datum 1: model_input must have 1 to 40 tokens, got 41"):
        read_datums(records([content(4, "base64"), content(41, "base64")]), PPO, LIMITS)


def changed(name: str, place: int, value: Any) -> DatumColumns:
    """Three datums of 4 tokens, one value of one column another."""
    made = columns([content(4, "base64", seed=place) for place in range(3)])
    record = made.tokens if name == "tokens" else made.loss_fn_inputs[name]
    values = np.array(record.to_numpy())
    values[place] = value
    record.data = encode(values, record.dtype, "base64").data
    return made


@pytest.mark.parametrize(
    ("name", "place", "value", "said"),
    [
        ("tokens", 6, -1, r"datum 1: model_input must be token ids .* got -1 at position 2"),
        ("target_tokens", 5, 96, r"datum 1: target_tokens must be token ids .* got 96 at pos.* 1"),
    ],
)
def test_a_foreign_token_of_a_column_is_named_by_its_datum(
    name: str, place: int, value: int, said: str
) -> None:
    with pytest.raises(RequestError, match=said):
        read_datums(changed(name, place, value), PPO, LIMITS)


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        ([4, 4, 5], r"columns.tokens must have the shape that the lengths add up to, \[13\], got"),
        ([4, -4, 12], r"columns.lengths must be int64 numbers of tokens, >= 0"),
        ([4, 0, 8], "datum 1: model_input must have 1 to 40 tokens, got 0"),
        ([], "columns.tokens must have the shape"),
    ],
)
def test_lengths_of_columns_fit_them(lengths: list[int], said: str) -> None:
    made = columns([content(4, "base64", seed=place) for place in range(3)])
    made.lengths = encode(lengths, "int64", "base64")

    with pytest.raises(RequestError, match=said):
        read_datums(made, PPO, LIMITS)


def test_columns_of_no_datum_are_refused() -> None:
    none = encode([], "int64", "base64")
    made = DatumColumns(lengths=none, tokens=none, loss_fn_inputs={"target_tokens": none})

    with pytest.raises(RequestError, match="data must hold at least one datum, got none"):
        read_datums(made, PPO, LIMITS)


def test_columns_keep_the_rules_of_datums() -> None:
    made = columns([content(4, "base64", seed=place) for place in range(3)])
    advantages = made.loss_fn_inputs.pop("advantages")

    with pytest.raises(RequestError, match=r"datum 0: loss_fn_inputs of ppo .* got .'rewards'"):
        read_datums(
            made.model_copy(
                update={"loss_fn_inputs": made.loss_fn_inputs | {"rewards": advantages}}
            ),
            PPO,
            LIMITS,
        )
    with pytest.raises(RequestError, match="datum 1: model_input must have 1 to 40 tokens, got 41"):
        read_datums(columns([content(4, "base64"), content(41, "base64")]), PPO, LIMITS)
    made.tokens.dtype = "float32"
    made.tokens.data = encode(np.zeros(12), "float32", "base64").data
    with pytest.raises(RequestError, match=r"columns.tokens must be int32 or int64, got float32"):
        read_datums(made, PPO, LIMITS)


def test_token_ids_without_room_in_32_bits_are_sent_datum_by_datum() -> None:
    small, large = 5, 2**40
    for tokens, targets in (((small, large), (1, 2)), ((1, 2), (small, large))):
        datum = tinker.Datum(
            model_input=tinker.ModelInput.from_ints(list(tokens)),
            loss_fn_inputs={"target_tokens": tinker.TensorData.from_numpy(np.array(targets))},
        )

        batch = build_batch([datum], as_columns=True)

        assert batch.lengths is None
        with pytest.raises(RequestError, match=rf"must be token ids .* got {large} at position 1"):
            read_datums(records(batch.body["data"]), builtin_objective("cross_entropy"), LIMITS)
