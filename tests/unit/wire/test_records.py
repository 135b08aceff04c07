import orjson
import pytest

from hearth.errors import ForwardOnlyError, NotFoundError, RequestError
from hearth.wire.completions import CompletionRequest
from hearth.wire.http import describe_failure, error_body, error_status
from hearth.wire.tinker import ForwardBackward, OptimStep


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


def test_errors_carry_status_code_and_category():
    assert error_status(NotFoundError("x")) == 404
    assert error_status(KeyError("x")) == 500
    assert (
        orjson.loads(error_body(NotFoundError("no such model")))["error"]["message"]
        == "no such model"
    )
    assert describe_failure(ForwardOnlyError("frozen")).category == "user"
    assert describe_failure(KeyError("x")).category == "server"
