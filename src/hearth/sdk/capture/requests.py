"""A client's request: the form of its answer, and the request that the deployment gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import orjson

from hearth.errors import RequestError
from hearth.wire.base import Record, show
from hearth.wire.completions import StreamOptions


class AnswerForm(Record):
    """The fields of a request that concern the form of the answer, not the sampling."""

    n: int = 1
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    logprobs: bool = False
    raw_output: bool = False


@dataclass(frozen=True)
class ClientRequest:
    """A request as the client sent it; null means absent, as in OpenAI's API."""

    fields: Mapping[str, Any]
    form: AnswerForm


def read_request(body: bytes) -> ClientRequest:
    """The request of a body. The deployment checks the fields of the sampling.

    Raises:
        RequestError: the body is no JSON object, a field of the form breaks its type, or it asks
            for more than one answer.
    """
    try:
        content: Any = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"body must be JSON, got {body[:40]!r}: {error}") from None
    if not isinstance(content, dict):
        raise RequestError(f"body must be a JSON object, got {show(content)!r}")
    given = cast("dict[str, Any]", content)
    fields = {name: value for name, value in given.items() if value is not None}
    form = AnswerForm.from_dict(fields)
    if form.n != 1:
        raise RequestError(
            f"n must be 1, got {form.n}: a session is one trajectory; ask again for another "
            "answer, or open another session"
        )
    return ClientRequest(fields, form)


def build_body(
    fields: Mapping[str, Any], form: AnswerForm, *, model: str, seed: int | None
) -> bytes:
    """The body for the deployment: one answer, whole, with ids and logprobs.

    ``seed`` holds where the client gave none.

    Raises:
        RequestError: the fields are nested too deep.
    """
    body = {name: value for name, value in fields.items() if name not in AnswerForm.model_fields}
    if seed is not None:
        body.setdefault("seed", seed)
    # An object per token costs both sides more than all the rest of an answer.
    needs_objects = form.logprobs or bool(fields.get("top_logprobs"))
    body["logprob_format"] = "objects" if needs_objects else "arrays"
    try:
        return orjson.dumps(body | {"model": model, "raw_output": True, "logprobs": True})
    except orjson.JSONEncodeError as error:
        # Deeper than orjson writes, though it reads it.
        raise RequestError(f"body must be less than 255 levels deep, got more: {error}") from None
