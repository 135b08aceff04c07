"""What a newer client sends is said once, wherever in a message it is."""

from __future__ import annotations

import logging
import secrets

import pytest
from tinker.proto import tinker_public_pb2

from hearth.tinker.protobuf import read_pass
from hearth.wire.tinker_requests import AskSamples


def test_unknown_fields_are_logged_once_in_parts_of_messages_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    mark = secrets.token_hex(4)
    ask = {
        "prompt": {"chunks": [{"tokens": [1]}], f"cache_{mark}": True},
        "sampling_params": {"max_tokens": 1, f"min_p_{mark}": 0.1},
        "sampling_session_id": "s",
        "seq_id": 1,
        f"priority_{mark}": 3,
        "type": "sample",
    }
    with caplog.at_level(logging.WARNING):
        AskSamples.from_dict(ask)
        AskSamples.from_dict(ask)

    assert sorted(record.getMessage() for record in caplog.records) == [
        f"AskSamples has the field 'priority_{mark}', which is unknown here",
        f"PromptChunks has the field 'cache_{mark}', which is unknown here",
        f"SamplingParams has the field 'min_p_{mark}', which is unknown here",
    ]


def test_unknown_numbers_of_a_binary_message_are_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    request = tinker_public_pb2.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="ppo")
    request.data.add()
    number = secrets.randbelow(1000) + 1000
    tag = number << 3  # a varint follows
    unknown = bytes([tag & 127 | 128, tag >> 7 & 127, 1])
    body = request.SerializeToString() + unknown

    with caplog.at_level(logging.WARNING):
        read_pass(body)
        read_pass(body)

    (record,) = caplog.records
    assert record.getMessage() == (
        f"ForwardBackwardRequest has the field {number}, which is unknown here"
    )
