"""Makes the events of OpenAI's completions and chat from the parts of a stream."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from hearth.inference.backend import SampledSequence, SampledToken, Tokenizer
from hearth.inference.requests import wants_logprobs
from hearth.inference.responses import choice_logprobs, perf_metrics, token_logprobs, usage_of
from hearth.inference.streaming import StreamPiece
from hearth.inference.tool_calls import (
    ParsedText,
    ToolCallReader,
    chat_finish_reason,
    start_reader,
    tool_call,
)
from hearth.telemetry import new_request_id
from hearth.wire import chat, completions
from hearth.wire.routing import encode_routing

Chunk = completions.CompletionChunk | chat.ChatChunk
Fields = TypeVar("Fields", completions.CompletionCall, chat.ChatRequest)


class _Events(ABC, Generic[Fields]):
    """What both kinds share. Called with each list of pieces; yields the events' bodies."""

    def __init__(
        self,
        fields: Fields,
        prompts: Sequence[list[int]],
        *,
        model_name: str,
        tokenizer: Tokenizer | None,
    ) -> None:
        self._fields = fields
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._model = fields.model or model_name
        self._id = new_request_id()
        self._created = int(time.time())
        self._start_s = time.perf_counter()
        self._ended: list[SampledSequence] = []

    def __call__(self, pieces: Sequence[StreamPiece]) -> Iterator[bytes]:
        """One event per completion that has something new; the token counts last."""
        for piece in pieces:
            if piece.end is not None:
                self._ended.append(piece.end)
            chunk = self._chunk(piece)
            if chunk is not None:
                yield self._add_end(chunk, piece.end).dump()
        options = self._fields.stream_options
        if self._all_ended() and options is not None and options.include_usage:
            usage = self._empty()
            usage.usage = usage_of(self._prompts, self._ended)
            yield usage.dump()

    @abstractmethod
    def _empty(self) -> Chunk: ...

    @abstractmethod
    def _chunk(self, piece: StreamPiece) -> Chunk | None:
        """The event of a piece; None if it would be empty."""

    def _add_end(self, chunk: Chunk, end: SampledSequence | None) -> Chunk:
        if end is None:
            return chunk
        chunk.weight_version = end.weight_version
        chunk.snapshot_identity = end.snapshot_identity
        if self._all_ended() and self._fields.perf_metrics_in_response:
            elapsed_s = time.perf_counter() - self._start_s
            chunk.perf_metrics = perf_metrics(self._prompts, self._ended, elapsed_s)
        return chunk

    def _all_ended(self) -> bool:
        return len(self._ended) == self._fields.n * len(self._prompts)

    def _token_ids(self, piece: StreamPiece) -> list[int] | None:
        """Those of a piece, if ids were requested."""
        asked = self._fields.return_token_ids
        return [token.token_id for token in piece.tokens] if asked else None

    def _prompt_token_ids(self, piece: StreamPiece) -> list[int] | None:
        """Those of the prompt with the first piece of its answer, if ids were requested."""
        asked = self._fields.return_token_ids and piece.is_first
        return self._prompts[piece.index // self._fields.n] if asked else None

    def _token_logprobs(self, tokens: Sequence[SampledToken]) -> list[completions.TokenLogprob]:
        return token_logprobs(
            [token.token_id for token in tokens],
            [token.logprob for token in tokens],
            [token.sampling_logprob for token in tokens],
            [token.top for token in tokens],
            self._tokenizer,
            [
                "" if token.routing is None else encode_routing([token.routing])[0]
                for token in tokens
            ],
        )


class CompletionEvents(_Events[completions.CompletionCall]):
    """Events of ``/v1/completions``; with ``echo`` the first of a choice begins with its prompt."""

    def __init__(
        self,
        call: completions.CompletionCall,
        prompts: Sequence[list[int]],
        *,
        model_name: str,
        tokenizer: Tokenizer | None,
    ) -> None:
        super().__init__(call, prompts, model_name=model_name, tokenizer=tokenizer)
        self._offsets: Counter[int] = Counter()
        """Characters of each choice's tokens so far."""

    def _empty(self) -> completions.CompletionChunk:
        return completions.CompletionChunk(
            id=f"cmpl-{self._id}", created=self._created, model=self._model, choices=[]
        )

    def _chunk(self, piece: StreamPiece) -> completions.CompletionChunk | None:
        echoes = piece.is_first and self._fields.echo
        tells_tokens = wants_logprobs(self._fields) or self._fields.return_token_ids
        if not (piece.end or piece.text or (tells_tokens and piece.tokens) or echoes):
            return None
        text = piece.text
        if echoes and self._tokenizer is not None:
            prompt = self._prompts[piece.index // self._fields.n]
            text = self._tokenizer.decode(prompt, skip_special_tokens=True) + text
        chunk = self._empty()
        chunk.choices.append(
            completions.ChunkChoice.model_construct(
                index=piece.index,
                text=text,
                finish_reason=piece.end.finish_reason if piece.end else None,
                logprobs=self._logprobs(piece, echoes) if wants_logprobs(self._fields) else None,
                token_ids=self._token_ids(piece),
                prompt_token_ids=self._prompt_token_ids(piece),
            )
        )
        return chunk

    def _logprobs(self, piece: StreamPiece, echoes: bool) -> completions.ChoiceLogprobs:
        prompt = self._prompts[piece.index // self._fields.n] if echoes else []
        unknown = [None] * len(prompt)
        scores = (piece.prompt_logprobs or unknown) if echoes else []
        content = token_logprobs(prompt, scores, unknown, unknown, self._tokenizer)
        content += self._token_logprobs(piece.tokens)
        logprobs = [*scores, *(token.logprob for token in piece.tokens)]
        with_top = any(token.top is not None for token in piece.tokens)
        offset = self._offsets[piece.index]
        self._offsets[piece.index] += sum(len(token.token) for token in content)
        return choice_logprobs(self._fields, content, logprobs, with_top=with_top, offset=offset)


class ChatEvents(_Events[chat.ChatRequest]):
    """Events of ``/v1/chat/completions``; the first of an answer has its role."""

    def __init__(
        self,
        request: chat.ChatRequest,
        prompt: list[int],
        *,
        model_name: str,
        tokenizer: Tokenizer | None,
    ) -> None:
        super().__init__(request, [prompt], model_name=model_name, tokenizer=tokenizer)
        self._readers: dict[int, ToolCallReader | None] = {}
        self._num_calls: Counter[int] = Counter()

    def _empty(self) -> chat.ChatChunk:
        return chat.ChatChunk(
            id=f"chatcmpl-{self._id}", created=self._created, model=self._model, choices=[]
        )

    def _chunk(self, piece: StreamPiece) -> chat.ChatChunk | None:
        end = piece.end
        parsed = self._parse(piece)
        logprobs = self._logprobs(piece)
        token_ids = self._token_ids(piece)
        has_news = parsed.content or parsed.calls or logprobs or token_ids
        if not (end or piece.is_first or has_news):
            return None
        calls = self._number_calls(piece.index, parsed.calls)
        chunk = self._empty()
        chunk.prompt_token_ids = self._prompt_token_ids(piece)
        chunk.choices.append(
            chat.ChatChunkChoice.model_construct(
                index=piece.index,
                delta=chat.ChatDelta.model_construct(
                    role="assistant" if piece.is_first else None,
                    content=parsed.content if parsed.content or piece.is_first else None,
                    tool_calls=calls or None,
                ),
                finish_reason=self._finish_reason(piece),
                logprobs=logprobs,
                raw_output=chat_raw_output(self._fields, self._prompts[0], end) if end else None,
                token_ids=token_ids,
            )
        )
        return chunk

    def _parse(self, piece: StreamPiece) -> ParsedText:
        """The piece's text, and its calls if tools were offered."""
        if piece.index not in self._readers:
            reader = start_reader(self._fields, self._prompts[0], self._tokenizer)
            self._readers[piece.index] = reader
        reader = self._readers[piece.index]
        if reader is None:
            return ParsedText(piece.text)
        return reader.push(piece.text) if piece.end is None else reader.read(piece.text)

    def _number_calls(
        self, choice: int, functions: list[chat.FunctionCall]
    ) -> list[chat.ToolCallDelta]:
        """The calls with their places among all calls of the answer."""
        first = self._num_calls[choice]
        self._num_calls[choice] += len(functions)
        deltas: list[chat.ToolCallDelta] = []
        for place, function in enumerate(functions, first):
            call = tool_call(function, self._prompts[0], choice, place)
            deltas.append(
                chat.ToolCallDelta.model_construct(index=place, id=call.id, function=call.function)
            )
        return deltas

    def _finish_reason(self, piece: StreamPiece) -> chat.ChatFinishReason | None:
        """Why the answer ended, if it has."""
        if piece.end is None:
            return None
        has_calls = self._num_calls[piece.index] > 0
        return chat_finish_reason(piece.end.finish_reason, has_calls=has_calls)

    def _logprobs(self, piece: StreamPiece) -> chat.ChatLogprobs | None:
        if not wants_logprob_objects(self._fields) or not (piece.tokens or piece.end):
            return None
        return chat.ChatLogprobs.model_construct(
            content=as_chat(self._token_logprobs(piece.tokens))
        )


def wants_logprob_objects(request: chat.ChatRequest) -> bool:
    """Whether the answer has an object per token."""
    return bool(request.logprobs) and request.logprob_format == "objects"


def chat_raw_output(
    request: chat.ChatRequest, prompt: list[int], completion: SampledSequence
) -> completions.RawOutput | None:
    """The token ids of an answer and its rendered conversation, if they were requested."""
    arrays = bool(request.logprobs) and request.logprob_format == "arrays"
    if not (request.raw_output or arrays):
        return None
    return completions.RawOutput.model_construct(
        completion_token_ids=completion.token_ids,
        prompt_token_ids=prompt,
        logprobs=completion.logprobs if arrays else None,
        sampling_logprobs=completion.sampling_logprobs if arrays else None,
        versions=completion.versions,
        routing_matrices=encode_routing(completion.routing)
        if arrays and completion.routing
        else None,
    )


def as_chat(content: list[completions.TokenLogprob]) -> list[completions.TokenLogprob]:
    """``content`` in chat's format: with the bytes of each text, and always with a top list."""
    for token in content:
        token.bytes = _utf8(token.token)
        token.top_logprobs = token.top_logprobs or []
        for top in token.top_logprobs:
            top.bytes = _utf8(top.token)
    return content


def _utf8(text: str) -> list[int] | None:
    return None if "\ufffd" in text else list(text.encode())
