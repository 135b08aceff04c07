"""Renders conversations as prompts, and makes chat responses of completions."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from hearth.errors import RequestError
from hearth.inference.backend import SampledSequence, Tokenizer
from hearth.inference.events import as_chat, chat_raw_output, wants_logprob_objects
from hearth.inference.responses import token_logprobs, usage_of
from hearth.inference.tool_calls import ParsedText, chat_finish_reason, read_tool_calls, tool_call
from hearth.telemetry import new_request_id
from hearth.wire.chat import ChatChoice, ChatLogprobs, ChatMessage, ChatRequest, ChatResponse
from hearth.wire.routing import encode_routing


def chat_prompt(request: ChatRequest, tokenizer: Tokenizer | None) -> list[int]:
    """Token ids of the conversation, rendered with the tokenizer's chat template.

    Raises:
        RequestError: a message has parts that are not text, or the template refuses it or is
            missing.
    """
    if tokenizer is None:
        raise RequestError(
            "messages must go to a deployment with a tokenizer, got one without: use "
            "/v1/completions with token ids"
        )
    messages = [_read_message(message, place) for place, message in enumerate(request.messages)]
    tools = request.offered_tools or None
    options = dict(request.chat_template_kwargs or {})
    options |= {"tools": tools, "add_generation_prompt": True}
    options |= {"tokenize": True, "return_dict": False}
    try:
        return list(tokenizer.apply_chat_template(messages, **options))
    # A template is a program from a model's folder and may raise any error.
    except Exception as error:
        raise RequestError(
            f"messages must fit the model's chat template, got {type(error).__name__}: {error}"
        ) from error


def chat_response(
    request: ChatRequest,
    prompt: list[int],
    completions: Sequence[SampledSequence],
    *,
    model_name: str,
    tokenizer: Tokenizer | None,
    metrics: dict[str, str],
) -> ChatResponse:
    """The response to ``request``; its version is the oldest that sampled one of its tokens."""
    oldest = min(completions, key=lambda completion: completion.weight_version)
    return ChatResponse.model_construct(
        id=f"chatcmpl-{new_request_id()}",
        created=int(time.time()),
        model=request.model or model_name,
        choices=[
            _choice(request, prompt, completion, index, tokenizer)
            for index, completion in enumerate(completions)
        ],
        usage=usage_of([prompt], completions),
        weight_version=oldest.weight_version,
        snapshot_identity=oldest.snapshot_identity,
        perf_metrics=metrics if request.perf_metrics_in_response else None,
    )


def _choice(
    request: ChatRequest,
    prompt: list[int],
    completion: SampledSequence,
    index: int,
    tokenizer: Tokenizer | None,
) -> ChatChoice:
    logprobs = None
    if wants_logprob_objects(request):
        tops = completion.top_logprobs or [None] * len(completion.token_ids)
        content = token_logprobs(
            completion.token_ids,
            completion.logprobs,
            completion.sampling_logprobs,
            tops,
            tokenizer,
            encode_routing(completion.routing) if completion.routing else None,
        )
        logprobs = ChatLogprobs.model_construct(content=as_chat(content))
    message = _answer(request, prompt, completion.text, index)
    return ChatChoice.model_construct(
        index=index,
        message=message,
        finish_reason=chat_finish_reason(
            completion.finish_reason, has_calls=bool(message.tool_calls)
        ),
        logprobs=logprobs,
        raw_output=chat_raw_output(request, prompt, completion),
    )


def _answer(request: ChatRequest, prompt: list[int], text: str, index: int) -> ChatMessage:
    """The message of answer ``index``; its calls are read only if tools were offered."""
    parsed = read_tool_calls(text) if request.offered_tools else ParsedText(text)
    if not parsed.calls:
        return ChatMessage.model_construct(content=text)
    calls = [tool_call(call, prompt, index, place) for place, call in enumerate(parsed.calls)]
    return ChatMessage.model_construct(content=parsed.content or None, tool_calls=calls)


def _read_message(message: Mapping[str, Any], place: int) -> dict[str, Any]:
    """A message for templates: its content as one text, its tool calls' arguments as objects."""
    role = message.get("role")
    if not isinstance(role, str):
        raise RequestError(f"messages.{place}.role must be a text, got {role!r}")
    plain = {name: value for name, value in message.items() if value is not None}
    plain["content"] = _text(message.get("content"), place)
    if isinstance(calls := plain.get("tool_calls"), list):
        plain["tool_calls"] = [_read_tool_call(call, place) for call in calls]
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


def _read_tool_call(call: Any, place: int) -> Any:
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
