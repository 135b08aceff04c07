"""Conversations as prompts, and draws as answers to them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from hearth.errors import RequestError
from hearth.inference.backend import SampledSequence, Tokenizer
from hearth.inference.events import as_chat, chat_raw_output, wants_chat_rows
from hearth.inference.responses import token_rows, usage_of
from hearth.inference.tool_calls import Read, chat_finish_reason, read_tool_calls, tool_call
from hearth.telemetry import new_request_id
from hearth.wire.chat import ChatChoice, ChatLogprobs, ChatMessage, ChatRequest, ChatResponse
from hearth.wire.routing import encode_routing


def chat_prompt(request: ChatRequest, tokenizer: Tokenizer | None) -> list[int]:
    """Token ids of the conversation, rendered with the tokenizer's chat template.

    Raises:
        RequestError: a message has parts that are no text, or the template refuses it or is not
            there.
    """
    if tokenizer is None:
        raise RequestError(
            "messages must go to a deployment with a tokenizer, got one without: use "
            "/v1/completions with token ids"
        )
    messages = [_message(one, place) for place, one in enumerate(request.messages)]
    tools = request.offered_tools or None
    options = dict(request.chat_template_kwargs or {})
    options |= {"tools": tools, "add_generation_prompt": True}
    options |= {"tokenize": True, "return_dict": False}
    try:
        return list(tokenizer.apply_chat_template(messages, **options))
    # A template is a program from a model's folder: it may raise anything.
    except Exception as error:
        raise RequestError(
            f"messages must fit the model's chat template, got {type(error).__name__}: {error}"
        ) from error


def chat_response(
    request: ChatRequest,
    prompt: list[int],
    drawn: Sequence[SampledSequence],
    *,
    model_name: str,
    tokenizer: Tokenizer | None,
    metrics: dict[str, str],
) -> ChatResponse:
    """The response to ``request``; its version is the oldest that drew one of its tokens."""
    oldest = min(drawn, key=lambda one: one.weight_version)
    return ChatResponse.model_construct(
        id=f"chatcmpl-{new_request_id()}",
        created=int(time.time()),
        model=request.model or model_name,
        choices=[
            _choice(request, prompt, one, index, tokenizer) for index, one in enumerate(drawn)
        ],
        usage=usage_of([prompt], drawn),
        weight_version=oldest.weight_version,
        snapshot_identity=oldest.snapshot_identity,
        perf_metrics=metrics if request.perf_metrics_in_response else None,
    )


def _choice(
    request: ChatRequest,
    prompt: list[int],
    drawn: SampledSequence,
    index: int,
    tokenizer: Tokenizer | None,
) -> ChatChoice:
    logprobs = None
    if wants_chat_rows(request):
        tops = drawn.top_logprobs or [None] * len(drawn.token_ids)
        rows = token_rows(
            drawn.token_ids,
            drawn.logprobs,
            drawn.sampling_logprobs,
            tops,
            tokenizer,
            encode_routing(drawn.routing) if drawn.routing else None,
        )
        logprobs = ChatLogprobs.model_construct(content=as_chat(rows))
    message = _answer(request, prompt, drawn.text, index)
    return ChatChoice.model_construct(
        index=index,
        message=message,
        finish_reason=chat_finish_reason(drawn.finish_reason, has_calls=bool(message.tool_calls)),
        logprobs=logprobs,
        raw_output=chat_raw_output(request, prompt, drawn),
    )


def _answer(request: ChatRequest, prompt: list[int], text: str, index: int) -> ChatMessage:
    """The message of answer ``index``; its calls are read only if tools were offered."""
    read = read_tool_calls(text) if request.offered_tools else Read(text)
    if not read.calls:
        return ChatMessage.model_construct(content=text)
    calls = [tool_call(one, prompt, index, place) for place, one in enumerate(read.calls)]
    return ChatMessage.model_construct(content=read.content or None, tool_calls=calls)


def _message(message: Mapping[str, Any], place: int) -> dict[str, Any]:
    """A message as templates take it: its content one text, its tool calls' arguments objects."""
    role = message.get("role")
    if not isinstance(role, str):
        raise RequestError(f"messages.{place}.role must be a text, got {role!r}")
    plain = {name: value for name, value in message.items() if value is not None}
    plain["content"] = _text(message.get("content"), place)
    if isinstance(calls := plain.get("tool_calls"), list):
        plain["tool_calls"] = [_tool_call(call, place) for call in calls]
    return plain


def _text(content: Any, place: int) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    texts: list[str] = []
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise RequestError(
                f"messages.{place}.content must be a text or parts of type 'text', got "
                f"{str(part)[:80]!r}: this deployment reads text only"
            )
        texts.append(str(part.get("text", "")))
    return "".join(texts)


def _tool_call(call: Any, place: int) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = orjson.loads(function["arguments"] or b"{}")
    except orjson.JSONDecodeError as error:
        raise RequestError(
            f"messages.{place}.tool_calls arguments must be JSON, got "
            f"{function['arguments'][:80]!r}: {error}"
        ) from None
    return {**call, "function": {**function, "arguments": arguments}}
