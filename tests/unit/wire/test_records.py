import orjson
import pytest

from hearth.errors import ForwardOnlyError, NotFoundError, RequestError
from hearth.wire.completions import CompletionRequest
from hearth.wire.faults import failed_future, fault_body, status_of
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
    assert status_of(NotFoundError("x")) == 404
    assert status_of(KeyError("x")) == 500
    assert fault_body(NotFoundError("no such model"))["error"]["message"] == "no such model"
    assert failed_future(ForwardOnlyError("frozen")).category == "user"
    assert failed_future(KeyError("x")).category == "server"
