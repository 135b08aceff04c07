"""Renders conversations as prompts, and makes chat responses of completions."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

import orjson

from hearth.errors import RequestError
from hearth.inference.backend import SampledSequence, Tokenizer
from hearth.inference.events import as_chat, chat_raw_output, wants_logprob_objects
from hearth.inference.responses import token_logprobs, usage_of
from hearth.inference.texts import check_length
from hearth.inference.tool_calls import ParsedText, chat_finish_reason, start_reader, tool_call
from hearth.telemetry import new_request_id
from hearth.wire.chat import (
    ChatChoice,
    ChatLogprobs,
    ChatMessage,
    ChatRequest,
    ChatResponse,
    TokenizeRequest,
)
from hearth.wire.routing import encode_routing

_VARIABLES = frozenset({"documents"})
"""Arguments of ``apply_chat_template`` that only the template reads."""
_RENDERER_NAMES = frozenset({"self", "messages", "conversations"})
"""What transformers passes to the template itself."""


def read_tokenize(body: bytes) -> TokenizeRequest:
    """The request of a body.

    Raises:
        RequestError: it has no text and no conversation, or both, or asks for what a tokenizer here
            does not do.
    """
    request = TokenizeRequest.parse(body)
    if (request.prompt is None) == (request.messages is None):
        raise RequestError("prompt or messages must be given, got none or both")
    is_text = request.prompt is not None
    if request.add_special_tokens not in (None, is_text):
        raise RequestError(
            f"add_special_tokens must be absent or {str(is_text).lower()} here, got "
            f"{request.add_special_tokens}: a text gets them, a conversation's template has them"
        )
    if not request.add_generation_prompt:
        raise RequestError("add_generation_prompt must be true, got false: an answer follows")
    return request


def tokenize(
    request: TokenizeRequest, tokenizer: Tokenizer | None, *, most_bytes: int
) -> list[int]:
    """Token ids of a text or a conversation.

    Raises:
        RequestError: as ``chat_prompt``, for a text as well.
    """
    if request.messages is not None:
        asked = request.model_dump(include={"messages", "tools", "chat_template_kwargs"})
        return chat_prompt(ChatRequest.from_dict(asked), tokenizer, most_bytes=most_bytes)
    if tokenizer is None:
        raise RequestError("prompt must go to a deployment with a tokenizer, got one without")
    text = request.prompt or ""
    check_length("prompt", text, most_bytes)
    return tokenizer.encode(text)


def chat_prompt(request: ChatRequest, tokenizer: Tokenizer | None, *, most_bytes: int) -> list[int]:
    """Token ids of the conversation, rendered with the tokenizer's chat template.

    Raises:
        RequestError: a message has parts that are not text, ``chat_template_kwargs`` has an
            argument of the tokenizer's own, the template refuses the conversation or is missing,
            or the rendered text has more than ``most_bytes`` bytes.
    """
    if tokenizer is None:
        raise RequestError(
            "messages must go to a deployment with a tokenizer, got one without: use "
            "/v1/completions with token ids"
        )
    messages = [_read_message(message, place) for place, message in enumerate(request.messages)]
    options = dict(request.chat_template_kwargs or {})
    _check_variables(options, tokenizer)
    options |= {"tools": request.offered_tools or None, "add_generation_prompt": True}
    try:
        # Rendered twice, since not every tokenizer reads its special tokens in a text.
        text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
        check_length("messages", text, most_bytes)
        return list(
            tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
        )
    except RequestError:
        raise
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
        prompt_token_ids=prompt if request.return_token_ids else None,
    )


def _check_variables(options: Mapping[str, Any], tokenizer: Tokenizer) -> None:
    """Refuse what is no variable of the template but an argument of the tokenizer's.

    Such an argument would choose another template, padding or the form of the ids.
    """
    own = signature(tokenizer.apply_chat_template).parameters.keys() | _RENDERER_NAMES
    for name in sorted(options.keys() & own - _VARIABLES):
        raise RequestError(
            f"chat_template_kwargs.{name} must be absent, got {str(options[name])[:80]!r}: only "
            "variables of the model's own template may be given"
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
    reader = start_reader(request, prompt, tokenizer)
    parsed = reader.read(completion.text) if reader else ParsedText(completion.text)
    message = _message(parsed, prompt, index)
    return ChatChoice.model_construct(
        index=index,
        message=message,
        finish_reason=chat_finish_reason(
            completion.finish_reason, has_calls=bool(message.tool_calls)
        ),
        logprobs=logprobs,
        raw_output=chat_raw_output(request, prompt, completion),
        token_ids=completion.token_ids if request.return_token_ids else None,
    )


def _message(parsed: ParsedText, prompt: list[int], index: int) -> ChatMessage:
    """The message of answer ``index``."""
    if not parsed.calls:
        return ChatMessage.model_construct(content=parsed.content)
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
