"""The binary messages are those of the official client, both ways."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import (
    deserialize_forward_backward_output,
    deserialize_sample_response,
)
from tinker.types.forward_backward_input import ForwardBackwardInput
from tinker.types.forward_backward_request import ForwardBackwardRequest

from hearth.errors import RequestError
from hearth.tinker.protobuf import Sample, WireSequence, read_pass, write_pass, write_sample
from hearth.wire.tinker import DatumColumns, DatumRecord


def send(data: list[types.Datum], loss_fn: str = "cross_entropy", **config: Any) -> bytes:
    given = ForwardBackwardInput(data=data, loss_fn=loss_fn, loss_fn_config=config or None)
    request = ForwardBackwardRequest(forward_backward_input=given, model_id="s:train:0", seq_id=7)
    return forward_backward_request_to_proto(request).SerializeToString()


def datum(tokens: list[int], **inputs: Any) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens),
        loss_fn_inputs={
            name: types.TensorData.from_numpy(np.asarray(v)) for name, v in inputs.items()
        },
    )


def test_datums_of_one_form_come_as_columns() -> None:
    first = datum([1, 2], target_tokens=[2, 3], weights=np.array([0.0, 1.0], "f4"))
    second = datum([4], target_tokens=[5], weights=np.array([0.5], "f4"))

    ask = read_pass(send([first, second], clip_low_threshold=0.5))

    assert (ask.model_id, ask.seq_id, ask.is_forward, ask.lengths) == (
        "s:train:0",
        7,
        False,
        [2, 1],
    )
    assert ask.content["loss_fn_config"] == {"clip_low_threshold": 0.5}
    lengths, tokens, inputs = DatumColumns.from_dict(ask.content["columns"]).arrays()
    assert (lengths, tokens.tolist()) == ([2, 1], [1, 2, 4])
    assert inputs["target_tokens"].tolist() == [2, 3, 5]
    assert inputs["weights"].tolist() == [0.0, 1.0, 0.5]


def test_cross_entropy_without_weights_counts_every_token() -> None:
    single = read_pass(send([datum([1, 2], target_tokens=[2, 3])]))
    mixed = read_pass(
        send(
            [
                datum([1, 2], target_tokens=[2, 3]),
                datum([1], target_tokens=[2], weights=np.array([3.0], "f4")),
            ]
        )
    )

    _, _, inputs = DatumColumns.from_dict(single.content["columns"]).arrays()
    assert inputs["weights"].tolist() == [1.0, 1.0]
    assert mixed.lengths is None
    records = [DatumRecord.from_dict(each) for each in mixed.content["data"]]
    weights = [record.loss_fn_inputs["weights"].to_numpy().tolist() for record in records]
    assert weights == [[1.0, 1.0], [3.0]]


def test_sparse_targets_and_weights_are_read_as_they_are() -> None:
    torch = pytest.importorskip("torch")
    targets = torch.zeros((4, 8), dtype=torch.int64)
    weights = torch.zeros((4, 8))
    targets[0, 0], targets[2, 1] = 9, 7
    weights[0, 0], weights[2, 1] = 0.25, 0.5
    made = types.Datum(
        model_input=types.ModelInput.from_ints([1, 2, 3, 4]),
        loss_fn_inputs={"target_tokens": targets, "weights": weights},
    )

    (read,) = read_pass(send([made])).content["data"]

    record = DatumRecord.from_dict(read)
    assert (record.loss_fn_inputs["target_tokens"].to_numpy() == targets.numpy()).all()
    assert (record.loss_fn_inputs["weights"].to_numpy() == weights.numpy()).all()


def test_the_mask_of_gspo_is_the_losss_mask() -> None:
    mask = np.array([0.0, 1.0], "f4")
    ask = read_pass(send([datum([1, 2], target_tokens=[2, 3], sequence_ratio_mask=mask)], "gspo"))

    _, _, inputs = DatumColumns.from_dict(ask.content["columns"]).arrays()
    assert inputs["loss_mask"].tolist() == [0.0, 1.0]


@pytest.mark.parametrize("body", [b"\xff\xff", b"{}", b"\x1a\x05abc"])
def test_other_bytes_are_refused(body: bytes) -> None:
    with pytest.raises(RequestError, match="body must be a ForwardBackwardRequest"):
        read_pass(body)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_request_or_a_clear_error(body: bytes) -> None:
    with contextlib.suppress(RequestError):
        read_pass(body)


def test_outputs_of_several_shapes_arrive_datum_by_datum() -> None:
    outputs = [np.arange(3, dtype="f4"), np.arange(2, dtype="f4"), np.ones((2, 4), "f4")]

    result = deserialize_forward_backward_output(
        write_pass([{"logprobs": values} for values in outputs], {"loss:sum": 1.5})
    )

    assert result.metrics == {"loss:sum": 1.5}
    for values, output in zip(outputs, result.loss_fn_outputs, strict=True):
        assert output["logprobs"].shape == list(values.shape)
        assert np.array_equal(np.asarray(output["logprobs"].tolist()).reshape(values.shape), values)


def test_a_sample_arrives_with_its_gaps() -> None:
    sequence = WireSequence(
        tokens=[5, 6], logprobs=[-1.0, -2.0], is_stopped=False, tops=[[(5, -1.0)], [(6, -2.0)]]
    )
    sample = Sample(
        sequences=[sequence],
        prompt_logprobs=[None, -0.5],
        prompt_tops=[None, [(3, -0.5), (4, -0.7)]],
        prompt_k=2,
        sample_k=1,
        cached_prompt_tokens=1,
    )

    read = deserialize_sample_response(write_sample(sample))

    (own,) = read.sequences
    assert (own.tokens, own.logprobs, own.stop_reason) == ([5, 6], [-1.0, -2.0], "length")
    assert read.prompt_logprobs == [None, -0.5]
    assert read.topk_prompt_logprobs is not None
    assert read.topk_prompt_logprobs[0] is None
    assert [token for token, _ in read.topk_prompt_logprobs[1] or []] == [3, 4]
    assert read.prompt_cache_hit_tokens == 1
