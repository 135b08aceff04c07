"""A client's request: how the answer is to look, and how the deployment is to draw it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import orjson

from hearth.errors import RequestError
from hearth.wire.base import Record
from hearth.wire.completions import StreamOptions


class AnswerForm(Record):
    """The fields of a request that say how the answer is told, not how it is drawn."""

    n: int = 1
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    logprobs: bool = False
    raw_output: bool = False


@dataclass(frozen=True)
class ClientRequest:
    """A request as it came; null is absent, as OpenAI's API has it."""

    fields: Mapping[str, Any]
    form: AnswerForm


def read_request(body: bytes) -> ClientRequest:
    """The request of a body. What says how to draw is the deployment's to judge.

    Raises:
        RequestError: it is no JSON object, a field of its form breaks its type, or it asks for
            more than one answer.
    """
    try:
        content: Any = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"body must be JSON, got {body[:40]!r}: {error}") from None
    if not isinstance(content, dict):
        raise RequestError(f"body must be a JSON object, got {str(content)[:80]!r}")
    given = cast("dict[str, Any]", content)
    fields = {name: value for name, value in given.items() if value is not None}
    form = AnswerForm.checked(fields)
    if form.n != 1:
        raise RequestError(
            f"n must be 1, got {form.n}: a session is one trajectory; ask again for another "
            "answer, or open another session"
        )
    return ClientRequest(fields, form)


def forwarded(
    fields: Mapping[str, Any], form: AnswerForm, *, model: str, seed: int | None
) -> bytes:
    """The body for the deployment: one answer, whole, with ids and logprobs.

    ``seed`` holds where the client gave none.
    """
    drawn = {name: value for name, value in fields.items() if name not in AnswerForm.model_fields}
    if seed is not None:
        drawn.setdefault("seed", seed)
    # An object per token costs both sides more than all the rest of an answer.
    needs_objects = form.logprobs or bool(fields.get("top_logprobs"))
    drawn["logprob_format"] = "objects" if needs_objects else "arrays"
    return orjson.dumps(drawn | {"model": model, "raw_output": True, "logprobs": True})
