"""Chat with a deployment, in OpenAI's form: conversations in, answers out."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from hearth.wire.base import Record
from hearth.wire.completions import RawOutput, SamplingFields, TokenLogprob, Usage

ChatFinishReason = Literal["stop", "length", "tool_calls"]
"""``tool_calls`` is a stop after at least one call."""


class ChatRequest(SamplingFields):
    """A conversation, ``n`` answers, rendered with the model's own chat template.

    ``max_tokens`` is the older name of ``max_completion_tokens``; without either an answer may
    fill the context. ``tools`` and ``chat_template_kwargs`` are handed to the template; with
    ``tools`` the calls in an answer are told as ``tool_calls``. ``logprob_format`` is that of
    completions.

    Example: ``{"model": "accounts/me/deployments/d", "messages": [{"role": "user", "content":
    "2 + 3 ="}], "max_completion_tokens": 16, "temperature": 0}``
    """

    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    logprob_format: Literal["objects", "arrays"] = "objects"

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """The tools that the model is shown."""
        return [] if self.tool_choice == "none" else self.tools or []


class TokenizeRequest(Record):
    """Asks for the token ids of a text, or of a conversation as a chat request renders it.

    ``add_special_tokens`` is what the tokenizer does anyhow: true for a text, false for a
    conversation, whose template has them.
    """

    model: str = ""
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class TokenizeResponse(Record):
    """The ids, and the length of the context that they are to fit."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class FunctionCall(Record):
    """A call of one of the tools; ``arguments`` are the text of a JSON object."""

    name: str
    arguments: str


class ToolCall(Record):
    """A function call with the id that its result names."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Record):
    """What the model answered, special tokens left out. ``content`` is null beside calls alone."""

    role: Literal["assistant"] = "assistant"
    content: str | None = None
    tool_calls: list[ToolCall] | None = None

    @model_serializer(mode="wrap")
    def _with_nulls(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {"content": None} | plain(self)


class ChatLogprobs(Record):
    """Per-token logprobs as chat has them."""

    content: list[TokenLogprob]


class ChatChoice(Record):
    """One answer. ``raw_output`` tells the prompt's ids as well."""

    index: int
    message: ChatMessage
    finish_reason: ChatFinishReason
    logprobs: ChatLogprobs | None = None
    raw_output: RawOutput | None = None
    token_ids: list[int] | None = None


class ChatResponse(Record):
    """All answers of one chat request, and the weight version that sampled them."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    weight_version: int
    snapshot_identity: str | None = None
    perf_metrics: dict[str, str] | None = None
    prompt_token_ids: list[int] | None = None


class ToolCallDelta(ToolCall):
    """A whole call; ``index`` counts the calls of one answer."""

    index: int


class ChatDelta(Record):
    """What is new in a streamed answer."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(Record):
    """The next piece of one answer; ``finish_reason`` and ``raw_output`` come with its last."""

    index: int
    delta: ChatDelta
    finish_reason: ChatFinishReason | None = None
    logprobs: ChatLogprobs | None = None
    raw_output: RawOutput | None = None
    token_ids: list[int] | None = None

    @model_serializer(mode="wrap")
    def _with_nulls(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {"finish_reason": None} | plain(self)


class ChatChunk(Record):
    """One event of a streamed answer. Those that end a choice tell its weight version."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    weight_version: int | None = None
    snapshot_identity: str | None = None
    perf_metrics: dict[str, str] | None = None
    prompt_token_ids: list[int] | None = None
    """In the first event of each answer."""
