"""The draws of one request as they are drawn, and an answer made of events.

Tokens come from the backend's thread and texts are made of them here, on the event loop that waits
for them, so that a request that streams costs the backend no more than a list append per token.
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

from hearth.inference.backend import SampledSequence, SampledToken, SampleRequest, Tokenizer
from hearth.inference.texts import TextOf, text_decoder

logger = logging.getLogger(__name__)

_UNKNOWN = "\ufffd"
_LONGEST_PARTIAL = 3
"""Bytes of an unfinished UTF-8 character, each of which may show as U+FFFD."""
_WINDOW = 16
"""At least so many tokens are decoded with a new one, for what its text owes to them."""


@dataclass
class StreamPiece:
    """What is new of one completion."""

    index: int
    text: str = ""
    tokens: list[SampledToken] = field(default_factory=lambda: [])
    """Those whose text is told by now; without a tokenizer every new one."""
    is_first: bool = False
    prompt_logprobs: list[float | None] | None = None
    """Of the prompt, in the first piece, if they were asked for."""
    end: SampledSequence | None = None
    """The whole completion, in its last piece."""


class TextPieces:
    """The text of a growing completion, piece by piece; all pieces together are its whole text.

    Held back is what the next token may still change: the bytes of an unfinished character, and
    text that may be the beginning of a stop string.
    """

    def __init__(self, decode: TextOf, stops: Sequence[str]) -> None:
        self._decode = decode
        self._stops = stops
        self._tokens: list[int] = []
        self._told = 0
        self._mark = 0
        self._sent = ""
        self._held = ""
        self._partial = False

    @property
    def holds(self) -> bool:
        """Whether some text waits for the next token."""
        return self._partial or bool(self._held)

    def push(self, token: int) -> str:
        """The text that the next token lets out."""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        stable = _without_partial(text)
        self._partial = len(stable) < len(text)
        self._held += stable[self._told :]
        self._told = len(stable)
        if not self._partial:
            self._forget()
        return self._let_out()

    def finish(self, text: str) -> str:
        """What is left of the whole ``text``."""
        rest = text[len(self._sent) :] if text.startswith(self._sent) else self._held
        self._sent += rest
        self._held, self._partial = "", False
        return rest

    def _forget(self) -> None:
        """Keep few tokens to decode, from a place between two characters on."""
        if self._mark == 0 and len(self._tokens) >= _WINDOW:
            self._mark = len(self._tokens)
        elif self._mark and len(self._tokens) >= self._mark + _WINDOW:
            self._tokens = self._tokens[self._mark :]
            self._told = len(self._decode(self._tokens))
            self._mark = 0

    def _let_out(self) -> str:
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        piece = self._held[: len(self._held) - keep]
        self._held = self._held[len(piece) :]
        self._sent += piece
        return piece


class CompletionStream:
    """The draws of one request, submitted at once and told as they come.

    Belongs to the running event loop. ``close`` ends whatever is still being drawn.

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
        self._left = len(requests)
        self._choices = [_Progress(index, one, tokenizer) for index, one in enumerate(requests)]
        listening = [
            replace(one, listener=_Listener(self._inbox, index))
            for index, one in enumerate(requests)
        ]
        self._futures = submit(listening)
        for index, future in enumerate(self._futures):
            future.add_done_callback(lambda done, index=index: self._inbox.put((index, done)))

    async def next(self) -> list[StreamPiece]:
        """What is new since the last call, by completion; empty when all have ended.

        Raises:
            ClientDisconnect: ``leave`` was called.
            HearthError: a completion failed.
        """
        pieces: dict[int, StreamPiece] = {}
        while self._left and not pieces:
            for index, event in await self._inbox.take():
                if index is None:
                    raise ClientDisconnect
                piece = self._choices[index].take(event, pieces.get(index))
                if piece is not None:
                    pieces[index] = piece
                if isinstance(event, Future):
                    self._left -= 1
        return list(pieces.values())

    def leave(self) -> None:
        """Nobody waits for the answer any more."""
        self._inbox.put((None, None))

    def close(self) -> None:
        """End the draws that have not ended."""
        for future in self._futures:
            future.cancel()


class EventResponse(Response):
    """A stream of server-sent events, ``first`` and then what ``events`` makes of each piece."""

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
        """Send until all is drawn or the client leaves; what is left then is not drawn."""
        # The body is read, so all that can still come is the client's leaving.
        leaving = asyncio.ensure_future(receive())
        leaving.add_done_callback(lambda _: self._stream.leave())
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._send_all(send)
        except (ClientDisconnect, OSError):
            logger.debug("a client left amid its stream")
        finally:
            leaving.cancel()
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
    """Events from any thread to one event loop; one wake-up for all that came meanwhile."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ready = asyncio.Event()
        self._events: deque[tuple[int | None, Any]] = deque()
        self._is_called = False

    def put(self, event: tuple[int | None, Any]) -> None:
        self._events.append(event)
        if self._is_called:
            return
        self._is_called = True
        try:
            self._loop.call_soon_threadsafe(self._ready.set)
        except RuntimeError:
            # The loop was closed with its requests.
            logger.debug("an event came after the end of its loop")

    async def take(self) -> list[tuple[int | None, Any]]:
        await self._ready.wait()
        self._ready.clear()
        # Before the events are taken: one that comes from now on calls again.
        self._is_called = False
        return [self._events.popleft() for _ in range(len(self._events))]


class _Listener:
    """Puts what it hears of one completion into the inbox."""

    def __init__(self, inbox: _Inbox, index: int) -> None:
        self._inbox = inbox
        self._index = index

    def prefilled(self, prompt_logprobs: list[float | None] | None) -> None:
        if prompt_logprobs is not None:
            self._inbox.put((self._index, prompt_logprobs))

    def drew(self, token: SampledToken) -> None:
        self._inbox.put((self._index, token))


class _Progress:
    """One completion: which of its tokens and texts have not been told."""

    def __init__(self, index: int, request: SampleRequest, tokenizer: Tokenizer | None) -> None:
        self._index = index
        self._is_new = True
        self._prompt_logprobs: list[float | None] | None = None
        self._waiting: list[SampledToken] = []
        self._texts = None
        if tokenizer is not None:
            self._texts = TextPieces(text_decoder(tokenizer, request.shown), request.stop)

    def take(self, event: Any, piece: StreamPiece | None) -> StreamPiece | None:
        """``piece``, or a new one, with what the event adds; None while nothing can be told."""
        if isinstance(event, SampledToken):
            return self._token(event, piece)
        if isinstance(event, Future):
            return self._end(event.result(), piece)
        self._prompt_logprobs = event
        return piece

    def _token(self, token: SampledToken, piece: StreamPiece | None) -> StreamPiece | None:
        self._waiting.append(token)
        text = self._texts.push(token.token_id) if self._texts is not None else ""
        if self._texts is not None and self._texts.holds and not text:
            return piece
        return self._add(piece, text)

    def _end(self, drawn: SampledSequence, piece: StreamPiece | None) -> StreamPiece:
        if self._prompt_logprobs is None and self._is_new:
            self._prompt_logprobs = drawn.prompt_logprobs
        text = self._texts.finish(drawn.text) if self._texts is not None else ""
        piece = self._add(piece, text)
        piece.end = drawn
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
    """``text`` without the marks at its end that the next token may turn into a character."""
    cut = len(text)
    while cut > 0 and len(text) - cut < _LONGEST_PARTIAL and text[cut - 1] == _UNKNOWN:
        cut -= 1
    return text[:cut]


def _overlap(text: str, stop: str) -> int:
    """Length of the end of ``text`` that ``stop`` begins with, or that a whole ``stop`` begins."""
    found = text.find(stop)
    if found >= 0:
        return len(text) - found
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


def _event(data: bytes, *, more: bool) -> dict[str, Any]:
    body = b"data: " + data + b"\n\n"
    return {"type": "http.response.body", "body": body, "more_body": more}
