import orjson
import pytest

from hearth.errors import ForwardOnlyError, NotFoundError, RequestError
from hearth.wire.chat import ChatRequest
from hearth.wire.completions import CompletionRequest, RawOutput
from hearth.wire.fireworks import TrainerJob, TrainingConfig
from hearth.wire.http import describe_failure, error_body, error_status
from hearth.wire.tensors import pack_floats
from hearth.wire.tinker import CreateModel, CreateSession, ForwardBackward, OptimStep
from hearth.wire.tinker_requests import CreateSessionRequest


def test_unknown_fields_are_tolerated_and_none_is_left_out():
    body = b'{"model": "m", "prompt": [1, 2], "brand_new_field": 3}'

    dumped = orjson.loads(CompletionRequest.parse(body).dump())

    assert dumped["prompt"] == [1, 2]
    assert "brand_new_field" not in dumped
    assert "seed" not in dumped


@pytest.mark.parametrize(
    ("record", "body", "message"),
    [
        (CompletionRequest, b"{nope", "body must be JSON"),
        (CompletionRequest, b'{"prompt": [1, "x"]}', "prompt"),
        (OptimStep, b'{"adam_params": {"beta1": 1.5}, "model_id": "m", "seq_id": 1}', "beta1"),
        (ForwardBackward, b'{"model_id": "m", "seq_id": 1}', "forward_backward_input"),
    ],
    ids=["json", "type", "range", "missing"],
)
def test_a_bad_body_names_its_field(record, body, message):
    with pytest.raises(RequestError, match=message):
        record.parse(body)


@pytest.mark.parametrize(
    ("record", "body"),
    [
        (ChatRequest, b'{"messages":%s}'),
        (CompletionRequest, b'{"prompt":%s}'),
        (ForwardBackward, b'{"model_id":"m","seq_id":1,"forward_backward_input":{"data":%s}}'),
        (TrainerJob, b'{"trainingConfig":{"baseModel":"m","extraArgs":%s}}'),
    ],
)
@pytest.mark.slow
def test_the_errors_of_a_body_of_many_odd_items_are_not_all_made(record, body):
    """A million of them take half a minute and half a gigabyte."""
    items = orjson.dumps([[{}]] * 10**5)

    with pytest.raises(RequestError, match=r"\.0.* must be valid, got [^(]*(\(and \d more\))?$"):
        record.parse(body % items)


def test_a_value_nested_deeper_than_python_shows_is_shown_in_short():
    body = b'{"messages":' + b"[" * 1000 + b"]" * 1000 + b"}"

    with pytest.raises(RequestError, match=r"got '\[\[\[\[\[\[\[\.\.\.\]"):
        ChatRequest.parse(body)


@pytest.mark.parametrize("value", ["1e400", "inf", "-inf", "nan"])
@pytest.mark.parametrize(
    ("record", "content", "field"),
    [
        (OptimStep, {"adam_params": {"learning_rate": 1.0}}, "adam_params.learning_rate"),
        (OptimStep, {"adam_params": {"eps": 1.0}}, "adam_params.eps"),
        (OptimStep, {"adam_params": {"weight_decay": 1.0}}, "adam_params.weight_decay"),
        (OptimStep, {"adam_params": {"grad_clip_norm": 1.0}}, "adam_params.grad_clip_norm"),
        (CreateModel, {"lora_config": {"rank": 8, "alpha": 1.0}}, "lora_config.alpha"),
        (CompletionRequest, {"prompt": [1], "temperature": 1.0}, "temperature"),
        (CompletionRequest, {"prompt": [1], "top_p": 1.0}, "top_p"),
        (TrainingConfig, {"baseModel": "m", "learningRate": 1.0}, "learningRate"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_setting_that_is_not_finite_is_refused_by_name(record, content, field, value):
    needed = {"model_id": "m", "seq_id": 1, "session_id": "s", "base_model": "m"}
    assert record.from_dict(needed | content)

    body = orjson.dumps(needed | content).replace(b"1.0", b'"%s"' % value.encode())
    with pytest.raises(RequestError, match=f"^{field} must be a finite number, got '{value}'"):
        record.parse(body)


@pytest.mark.parametrize(
    ("record", "content", "field"),
    [
        (OptimStep, {"adam_params": {"learning_rate": True}}, "adam_params.learning_rate"),
        (OptimStep, {"seq_id": True, "adam_params": {}}, "seq_id"),
        (CompletionRequest, {"prompt": [1], "max_tokens": False}, "max_tokens"),
        (CompletionRequest, {"prompt": [1], "seed": True}, "seed"),
        (CompletionRequest, {"prompt": [1, True]}, r"prompt\.list\[int\]\.1"),
        (CompletionRequest, {"prompt": [1], "stop_token_ids": [False]}, r"stop_token_ids\.0"),
        (TrainingConfig, {"baseModel": "m", "loraRank": True}, "loraRank"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_boolean_is_no_number(record, content, field):
    needed = {"model_id": "m", "seq_id": 1}

    with pytest.raises(RequestError, match=rf"^{field} must be [^:]*, got '?(True|False)"):
        record.from_dict(needed | content)


def test_a_number_may_come_as_a_text_and_logprobs_as_a_boolean():
    asked = CompletionRequest.from_dict({"prompt": [1], "logprobs": True, "max_tokens": "3"})

    assert asked.logprobs is True
    assert asked.max_tokens == 3


@pytest.mark.parametrize("record", [CreateSession, CreateSessionRequest])
def test_a_session_has_a_bounded_number_of_tags(record):
    assert len(record.from_dict({"tags": ["a"] * 128}).tags) == 128

    with pytest.raises(RequestError, match=r"^tags must be valid"):
        record.from_dict({"tags": ["a"] * 129})


def test_errors_carry_status_code_and_category():
    assert error_status(NotFoundError("x")) == 404
    assert error_status(KeyError("x")) == 500
    assert (
        orjson.loads(error_body(NotFoundError("no such model")))["error"]["message"]
        == "no such model"
    )
    assert describe_failure(ForwardOnlyError("frozen")).category == "user"
    assert describe_failure(KeyError("x")).category == "server"


@pytest.mark.parametrize("text", ["AAA", "AAAAAAA=", "no base64"])
def test_ids_that_are_no_base64_of_int32_are_refused(text):
    with pytest.raises(RequestError, match="completion_token_ids must be valid"):
        RawOutput.from_dict({"completion_token_ids": text})


def test_packed_logprobs_have_nothing_where_lists_have_null():
    raw = RawOutput.from_dict({"completion_token_ids": [1], "logprobs": pack_floats([None, -0.5])})

    assert raw.logprobs == [None, -0.5]
