"""Streams the completions of one request, and answers with events.

Tokens come from the backend's thread. They are decoded here, on the event loop that waits for them,
so a streamed request costs the backend only a list append per token.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hearth.inference.backend import (
    SampledSequence,
    SampledToken,
    SampleRequest,
    Tokenizer,
    TokenListener,
)
from hearth.inference.texts import TextOf, text_decoder

logger = logging.getLogger(__name__)

_UNKNOWN = "\ufffd"
_LONGEST_PARTIAL = 3
"""Bytes of an unfinished UTF-8 character, each of which may show as U+FFFD."""
_WINDOW = 16
"""A token's text depends on its predecessors: at least so many are decoded with it."""


@dataclass
class StreamPiece:
    """The new part of one completion."""

    index: int
    text: str = ""
    tokens: list[SampledToken] = field(default_factory=lambda: [])
    """Those whose text is complete; without a tokenizer every new one."""
    is_first: bool = False
    prompt_logprobs: list[float | None] | None = None
    """Of the prompt, in the first piece, if they were requested."""
    end: SampledSequence | None = None
    """The whole completion, in its last piece."""


class TextPieces:
    """The text of a growing completion in pieces, which together are its whole text.

    Text that the next token may change is held back: the bytes of an unfinished character, and the
    possible beginning of a stop string.
    """

    def __init__(self, decode: TextOf, stops: Sequence[str]) -> None:
        self._decode = decode
        self._stops = stops
        self._tokens: list[int] = []
        self._num_decoded = 0
        self._mark = 0
        self._sent = ""
        self._held = ""
        self._partial = False

    @property
    def holds(self) -> bool:
        """Whether some text is held back."""
        return self._partial or bool(self._held)

    def push(self, token: int) -> str:
        """The next piece, once ``token`` is appended."""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        stable = _without_partial(text)
        self._partial = len(stable) < len(text)
        self._held += stable[self._num_decoded :]
        self._num_decoded = len(stable)
        if not self._partial:
            self._shorten()
        return self._release()

    def finish(self, text: str) -> str:
        """The last piece of the whole ``text``."""
        rest = text[len(self._sent) :] if text.startswith(self._sent) else self._held
        self._sent += rest
        self._held, self._partial = "", False
        return rest

    def _shorten(self) -> None:
        """Drop old tokens, at a place between two characters."""
        if self._mark == 0 and len(self._tokens) >= _WINDOW:
            self._mark = len(self._tokens)
        elif self._mark and len(self._tokens) >= self._mark + _WINDOW:
            self._tokens = self._tokens[self._mark :]
            self._num_decoded = len(self._decode(self._tokens))
            self._mark = 0

    def _release(self) -> str:
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        piece = self._held[: len(self._held) - keep]
        self._held = self._held[len(piece) :]
        self._sent += piece
        return piece


class CompletionStream:
    """The completions of one request, submitted together and streamed.

    Belongs to the running event loop. ``close`` cancels completions that still run.

    Raises:
        HearthError: as ``submit``.
    """

    def __init__(
        self,
        requests: Sequence[SampleRequest],
        submit: Callable[[Sequence[SampleRequest]], list[Future[SampledSequence]]],
        tokenizer: Tokenizer | None,
    ) -> None:
        self._inbox = _Inbox()
        self._num_running = len(requests)
        self._choices = [
            _Progress(index, request, tokenizer) for index, request in enumerate(requests)
        ]
        self._futures = submit(
            [
                replace(request, listener=self._inbox.listener(index))
                for index, request in enumerate(requests)
            ]
        )
        for index, future in enumerate(self._futures):
            future.add_done_callback(lambda done, index=index: self._inbox.put((index, done)))

    async def next(self) -> list[StreamPiece]:
        """The new piece of each completion since the last call; empty when all have ended.

        Raises:
            ClientDisconnect: ``leave`` was called.
            HearthError: a completion failed.
        """
        pieces: dict[int, StreamPiece] = {}
        while self._num_running and not pieces:
            for index, event in await self._inbox.wait_for_events():
                if index is None:
                    raise ClientDisconnect
                piece = self._choices[index].add_event(event, pieces.get(index))
                if piece is not None:
                    pieces[index] = piece
                if isinstance(event, Future):
                    self._num_running -= 1
        return list(pieces.values())

    def leave(self) -> None:
        """Have ``next`` raise ``ClientDisconnect``."""
        self._inbox.put((None, None))

    def close(self) -> None:
        """Cancel the completions that still run."""
        for future in self._futures:
            future.cancel()


class EventResponse(Response):
    """A stream of server-sent events, made by ``events`` from ``first`` and all later pieces."""

    media_type = "text/event-stream"

    def __init__(
        self,
        stream: CompletionStream,
        first: list[StreamPiece],
        *,
        events: Callable[[list[StreamPiece]], Iterable[bytes]],
        fault: Callable[[Exception], bytes],
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache"})
        self._stream = stream
        self._first = first
        self._events = events
        self._fault = fault

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until all completions have ended or the client leaves, which cancels them."""
        # The body has been read, so the only message left is the disconnect.
        disconnect = asyncio.ensure_future(receive())
        disconnect.add_done_callback(lambda _: self._stream.leave())
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._send_all(send)
        except (ClientDisconnect, OSError):
            logger.debug("a client disconnected during its stream")
        finally:
            disconnect.cancel()
            self._stream.close()

    async def _send_all(self, send: Send) -> None:
        pieces, last = self._first, b"[DONE]"
        while pieces:
            for event in self._events(pieces):
                await send(_event(event, more=True))
            try:
                pieces = await self._stream.next()
            except ClientDisconnect:
                raise
            except Exception as error:
                logger.exception("a stream ended early")
                pieces, last = [], self._fault(error)
        await send(_event(last, more=False))


class _Inbox:
    """Events from any thread to one event loop, which is woken once for several events."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ready = asyncio.Event()
        self._events: deque[tuple[int | None, Any]] = deque()
        self._is_woken = False

    def listener(self, index: int) -> TokenListener:
        """A listener that puts the tokens of one completion here."""

        def put_prompt(logprobs: list[float | None] | None) -> None:
            if logprobs is not None:
                self.put((index, logprobs))

        return TokenListener(put_prompt, lambda token: self.put((index, token)))

    def put(self, event: tuple[int | None, Any]) -> None:
        self._events.append(event)
        if self._is_woken:
            return
        self._is_woken = True
        try:
            self._loop.call_soon_threadsafe(self._ready.set)
        except RuntimeError:
            # The loop was closed with its requests.
            logger.debug("an event came after the end of its loop")

    async def wait_for_events(self) -> list[tuple[int | None, Any]]:
        await self._ready.wait()
        self._ready.clear()
        # Before the events are read: a later event wakes the loop again.
        self._is_woken = False
        return [self._events.popleft() for _ in range(len(self._events))]


class _Progress:
    """One completion: its tokens and text that are not in a piece yet."""

    def __init__(self, index: int, request: SampleRequest, tokenizer: Tokenizer | None) -> None:
        self._index = index
        self._is_new = True
        self._prompt_logprobs: list[float | None] | None = None
        self._waiting: list[SampledToken] = []
        self._texts = None
        if tokenizer is not None:
            self._texts = TextPieces(text_decoder(tokenizer, request.visible_tokens), request.stop)

    def add_event(self, event: Any, piece: StreamPiece | None) -> StreamPiece | None:
        """``piece``, or a new one, with the event added; None while its text is held back."""
        if isinstance(event, SampledToken):
            return self._add_token(event, piece)
        if isinstance(event, Future):
            return self._add_end(event.result(), piece)
        self._prompt_logprobs = event
        return piece

    def _add_token(self, token: SampledToken, piece: StreamPiece | None) -> StreamPiece | None:
        self._waiting.append(token)
        text = self._texts.push(token.token_id) if self._texts is not None else ""
        if self._texts is not None and self._texts.holds and not text:
            return piece
        return self._add(piece, text)

    def _add_end(self, completion: SampledSequence, piece: StreamPiece | None) -> StreamPiece:
        if self._prompt_logprobs is None and self._is_new:
            self._prompt_logprobs = completion.prompt_logprobs
        text = self._texts.finish(completion.text) if self._texts is not None else ""
        piece = self._add(piece, text)
        piece.end = completion
        return piece

    def _add(self, piece: StreamPiece | None, text: str) -> StreamPiece:
        if piece is None:
            piece = StreamPiece(
                self._index, is_first=self._is_new, prompt_logprobs=self._prompt_logprobs
            )
            self._is_new, self._prompt_logprobs = False, None
        piece.text += text
        piece.tokens += self._waiting
        self._waiting = []
        return piece


def _without_partial(text: str) -> str:
    """``text`` without replacement characters at its end, which the next token may complete."""
    cut = len(text)
    while cut > 0 and len(text) - cut < _LONGEST_PARTIAL and text[cut - 1] == _UNKNOWN:
        cut -= 1
    return text[:cut]


def _overlap(text: str, stop: str) -> int:
    """Length of the end of ``text`` from the first ``stop`` on, or that ``stop`` begins with."""
    place = text.find(stop)
    if place >= 0:
        return len(text) - place
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


def _event(data: bytes, *, more: bool) -> dict[str, Any]:
    body = b"data: " + data + b"\n\n"
    return {"type": "http.response.body", "body": body, "more_body": more}
