"""A deployment's answer as a captured turn, and in the form that the client asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from hearth.errors import TransportError
from hearth.sdk.capture.requests import AnswerForm
from hearth.sdk.capture.turns import CapturedTurn
from hearth.wire.chat import ChatChoice, ChatResponse

_OWN_FIELDS = ("weight_version", "snapshot_identity")
_OWN_TOKEN_FIELDS = ("token_id", "sampling_logprob", "routing_matrix")


def read_turn(answer: ChatResponse, seed: int | None = None) -> CapturedTurn:
    """The turn that an answer holds, which was sampled with ``seed``.

    Raises:
        TransportError: the answer lacks token ids, or a logprob for each of them.
    """
    choice = answer.choices[0]
    raw = choice.raw_output
    if raw is None or raw.prompt_token_ids is None:
        raise TransportError(
            f"model {answer.model!r} must answer with raw_output token ids, got none: its "
            "completions cannot be trained"
        )
    tokens = raw.completion_token_ids
    logprobs = _read_logprobs(choice)
    if len(logprobs) != len(tokens):
        raise TransportError(
            f"model {answer.model!r} must answer with a sampling_logprob per token, got "
            f"{len(logprobs)} for {len(tokens)} tokens: its completions cannot be trained"
        )
    whole_run = [[answer.weight_version, len(tokens)]] if tokens else []
    return CapturedTurn(
        prompt_tokens=raw.prompt_token_ids,
        completion_tokens=tokens,
        logprobs=logprobs,
        versions=raw.versions or whole_run,
        finish_reason=choice.finish_reason,
        text=choice.message.content or "",
        snapshot_identity=answer.snapshot_identity,
        routing_matrices=_read_routing(choice),
        seed=seed,
    )


def _read_logprobs(choice: ChatChoice) -> list[float]:
    """The sampling logprobs, which come as one list or in an object per token."""
    logprobs = choice.raw_output.sampling_logprobs if choice.raw_output is not None else None
    if logprobs is None:
        tokens = choice.logprobs.content if choice.logprobs is not None else []
        logprobs = [token.sampling_logprob for token in tokens]
    return [logprob for logprob in logprobs if logprob is not None]


def _read_routing(choice: ChatChoice) -> list[str] | None:
    """The experts of each token, which come in the same two ways; None where there are none."""
    matrices = choice.raw_output.routing_matrices if choice.raw_output is not None else None
    if matrices is None:
        tokens = choice.logprobs.content if choice.logprobs is not None else []
        matrices = [token.routing_matrix or "" for token in tokens]
    return matrices if any(matrices) else None


def build_answer(answer: ChatResponse, form: AnswerForm) -> dict[str, Any]:
    """The answer with the fields that the client requested; all of it with ``raw_output``."""
    body = answer.as_dict()
    (choice,) = body["choices"]
    if not form.logprobs:
        choice.pop("logprobs", None)
    if form.raw_output:
        return body
    choice.pop("raw_output", None)
    for name in _OWN_FIELDS:
        body.pop(name, None)
    for token in choice.get("logprobs", {}).get("content", []):
        for name in _OWN_TOKEN_FIELDS:
            token.pop(name, None)
        for top in token.get("top_logprobs", []):
            top.pop("token_id", None)
    return body


def build_events(body: Mapping[str, Any], form: AnswerForm) -> bytes:
    """The body of an answer as a stream of server-sent events."""
    events = [orjson.dumps(chunk) for chunk in _build_chunks(body, form)]
    return b"".join(b"data: " + event + b"\n\n" for event in [*events, b"[DONE]"])


def _build_chunks(body: Mapping[str, Any], form: AnswerForm) -> Iterator[dict[str, Any]]:
    """The message, then why it ended and, if the client asked for it, the usage."""
    common = {name: value for name, value in body.items() if name not in ("choices", "usage")}
    common["object"] = "chat.completion.chunk"
    (choice,) = body["choices"]
    first: dict[str, Any] = {
        "index": 0,
        "delta": _build_delta(choice["message"]),
        "finish_reason": None,
    }
    if "logprobs" in choice:
        first["logprobs"] = choice["logprobs"]
    last: dict[str, Any] = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}
    if "raw_output" in choice:
        last["raw_output"] = choice["raw_output"]
    yield {**common, "choices": [first]}
    yield {**common, "choices": [last]}
    if form.stream_options.include_usage:
        yield {**common, "choices": [], "usage": body["usage"]}


def _build_delta(message: Mapping[str, Any]) -> dict[str, Any]:
    """A whole message as one delta."""
    delta: dict[str, Any] = {**message, "content": message["content"] or ""}
    if "tool_calls" in message:
        calls = enumerate(message["tool_calls"])
        delta["tool_calls"] = [{"index": place, **call} for place, call in calls]
    return delta
