"""Pieces of streamed draws as the events of OpenAI's completions and chat."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from hearth.inference.backend import SampledSequence, SampledToken, Tokenizer
from hearth.inference.requests import wants_logprobs
from hearth.inference.responses import choice_logprobs, perf_metrics, token_rows, usage_of
from hearth.inference.streaming import StreamPiece
from hearth.inference.tool_calls import Read, ToolCallReader, chat_finish_reason, tool_call
from hearth.telemetry import new_request_id
from hearth.wire.chat import (
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatFinishReason,
    ChatLogprobs,
    ChatRequest,
    FunctionCall,
    ToolCallDelta,
)
from hearth.wire.completions import (
    ChoiceLogprobs,
    ChunkChoice,
    CompletionCall,
    CompletionChunk,
    DrawFields,
    RawOutput,
    TokenLogprob,
)
from hearth.wire.routing import encode_routing

Chunk = CompletionChunk | ChatChunk


class _Events(ABC):
    """What both kinds have in common. Called with each round of pieces; gives the bodies."""

    def __init__(
        self,
        fields: DrawFields,
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
                yield self._finished(chunk, piece.end).dump()
        options = self._fields.stream_options
        if self._all_ended() and options is not None and options.include_usage:
            usage = self._empty()
            usage.usage = usage_of(self._prompts, self._ended)
            yield usage.dump()

    @abstractmethod
    def _empty(self) -> Chunk: ...

    @abstractmethod
    def _chunk(self, piece: StreamPiece) -> Chunk | None:
        """The event of a piece; None while it says nothing."""

    def _finished(self, chunk: Chunk, end: SampledSequence | None) -> Chunk:
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

    def _rows(self, tokens: Sequence[SampledToken]) -> list[TokenLogprob]:
        return token_rows(
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


class CompletionEvents(_Events):
    """Events of ``/v1/completions``; with ``echo`` the first of a choice begins with its prompt."""

    def __init__(
        self,
        call: CompletionCall,
        prompts: Sequence[list[int]],
        *,
        model_name: str,
        tokenizer: Tokenizer | None,
    ) -> None:
        super().__init__(call, prompts, model_name=model_name, tokenizer=tokenizer)
        self._call = call

    def _empty(self) -> CompletionChunk:
        return CompletionChunk(
            id=f"cmpl-{self._id}", created=self._created, model=self._model, choices=[]
        )

    def _chunk(self, piece: StreamPiece) -> CompletionChunk | None:
        echoes = piece.is_first and self._call.echo
        rows = wants_logprobs(self._call) and bool(piece.tokens)
        if not (piece.end or piece.text or rows or echoes):
            return None
        text = piece.text
        if echoes and self._tokenizer is not None:
            prompt = self._prompts[piece.index // self._call.n]
            text = self._tokenizer.decode(prompt, skip_special_tokens=True) + text
        chunk = self._empty()
        chunk.choices.append(
            ChunkChoice.model_construct(
                index=piece.index,
                text=text,
                finish_reason=piece.end.finish_reason if piece.end else None,
                logprobs=self._logprobs(piece, echoes) if wants_logprobs(self._call) else None,
            )
        )
        return chunk

    def _logprobs(self, piece: StreamPiece, echoes: bool) -> ChoiceLogprobs:
        prompt = self._prompts[piece.index // self._call.n] if echoes else []
        unknown = [None] * len(prompt)
        scores = (piece.prompt_logprobs or unknown) if echoes else []
        rows = token_rows(prompt, scores, unknown, unknown, self._tokenizer)
        rows += self._rows(piece.tokens)
        logprobs = [*scores, *(token.logprob for token in piece.tokens)]
        with_top = any(token.top is not None for token in piece.tokens)
        return choice_logprobs(rows, logprobs, with_top=with_top)


class ChatEvents(_Events):
    """Events of ``/v1/chat/completions``; the first of an answer tells its role."""

    def __init__(
        self,
        request: ChatRequest,
        prompt: list[int],
        *,
        model_name: str,
        tokenizer: Tokenizer | None,
    ) -> None:
        super().__init__(request, [prompt], model_name=model_name, tokenizer=tokenizer)
        self._request = request
        self._readers: defaultdict[int, ToolCallReader] = defaultdict(ToolCallReader)
        self._num_calls: Counter[int] = Counter()

    def _empty(self) -> ChatChunk:
        return ChatChunk(
            id=f"chatcmpl-{self._id}", created=self._created, model=self._model, choices=[]
        )

    def _chunk(self, piece: StreamPiece) -> ChatChunk | None:
        end = piece.end
        read = self._read(piece)
        logprobs = self._logprobs(piece)
        if not (end or piece.is_first or read.content or read.calls or logprobs):
            return None
        calls = self._numbered(piece.index, read.calls)
        chunk = self._empty()
        chunk.choices.append(
            ChatChunkChoice.model_construct(
                index=piece.index,
                delta=ChatDelta.model_construct(
                    role="assistant" if piece.is_first else None,
                    content=read.content if read.content or piece.is_first else None,
                    tool_calls=calls or None,
                ),
                finish_reason=self._reason(piece),
                logprobs=logprobs,
                raw_output=chat_raw_output(self._request, self._prompts[0], end) if end else None,
            )
        )
        return chunk

    def _read(self, piece: StreamPiece) -> Read:
        """The piece's text, and its calls if tools were offered."""
        if not self._request.offered_tools:
            return Read(piece.text)
        reader = self._readers[piece.index]
        read = reader.push(piece.text)
        if piece.end is not None:
            read.content += reader.finish().content
        return read

    def _numbered(self, choice: int, calls: list[FunctionCall]) -> list[ToolCallDelta]:
        """The calls with their places among all of the answer's."""
        first = self._num_calls[choice]
        self._num_calls[choice] += len(calls)
        told = [
            tool_call(one, self._prompts[0], choice, place)
            for place, one in enumerate(calls, first)
        ]
        return [
            ToolCallDelta.model_construct(index=place, id=one.id, function=one.function)
            for place, one in enumerate(told, first)
        ]

    def _reason(self, piece: StreamPiece) -> ChatFinishReason | None:
        """Why the answer ended, if it has."""
        if piece.end is None:
            return None
        has_calls = self._num_calls[piece.index] > 0
        return chat_finish_reason(piece.end.finish_reason, has_calls=has_calls)

    def _logprobs(self, piece: StreamPiece) -> ChatLogprobs | None:
        if not wants_chat_rows(self._request) or not (piece.tokens or piece.end):
            return None
        return ChatLogprobs.model_construct(content=as_chat(self._rows(piece.tokens)))


def wants_chat_rows(request: ChatRequest) -> bool:
    """Whether an object per token is to be told."""
    return bool(request.logprobs) and request.logprob_format == "objects"


def chat_raw_output(
    request: ChatRequest, prompt: list[int], drawn: SampledSequence
) -> RawOutput | None:
    """The ids behind an answer, those of the rendered conversation included, if asked for."""
    arrays = bool(request.logprobs) and request.logprob_format == "arrays"
    if not (request.raw_output or arrays):
        return None
    return RawOutput.model_construct(
        completion_token_ids=drawn.token_ids,
        prompt_token_ids=prompt,
        logprobs=drawn.logprobs if arrays else None,
        sampling_logprobs=drawn.sampling_logprobs if arrays else None,
        versions=drawn.versions,
        routing_matrices=encode_routing(drawn.routing) if arrays and drawn.routing else None,
    )


def as_chat(rows: list[TokenLogprob]) -> list[TokenLogprob]:
    """``rows`` as chat has them: with the bytes of each text, and never without a top list."""
    for row in rows:
        row.bytes = _utf8(row.token)
        row.top_logprobs = row.top_logprobs or []
        for top in row.top_logprobs:
            top.bytes = _utf8(top.token)
    return rows


def _utf8(text: str) -> list[int] | None:
    return None if "\ufffd" in text else list(text.encode())
