"""Connections to a served platform: so many at once, and none that says nothing.

A key is checked when a request's head is there. Before that anybody may connect, so connections are
counted. A head that does not come within ``HEAD_S`` seconds ends its connection, and so does a body
of which less than ``LEAST_BODY`` bytes come within them.
"""

from __future__ import annotations

import asyncio
import resource
from typing import cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from hearth.errors import HearthError, RequestError, TransportError
from hearth.wire.http import error_body

HEAD_S = 20.0
"""How long a request's head may take, from its connection or its first byte on."""
LEAST_BODY = 2**14
"""Bytes of a body that are to come within ``HEAD_S`` seconds, unless it ends."""
_RESERVED = 256
"""Descriptors that are kept for files, the database and what is imported."""
_PER_CONNECTION = 2
"""Descriptors of a request under way: the client's connection, and one to a worker."""
_REFUSAL = (
    b"HTTP/1.1 %b\r\nconnection: close\r\n"
    b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
)


def raise_descriptor_limit() -> int:
    """Raise this process's limit of open files as far as it may; returns the connections it is
    enough for."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    limit = 2**20 if hard == resource.RLIM_INFINITY else hard
    return max(1, (limit - _RESERVED) // _PER_CONNECTION)


def make_protocol(max_connections: int, head_s: float = HEAD_S) -> type[asyncio.Protocol]:
    """The protocol of connections of which there may be ``max_connections``."""

    class Connection(H11Protocol):
        _timer: asyncio.TimerHandle | None = None
        _timed: type | None = None
        """The state of the client that the timer is for."""
        _received = 0
        """Bytes since the timer began."""

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(cast("asyncio.Transport", transport))
            if len(self.connections) > max_connections:
                refusal = TransportError(
                    f"connections must be at most {max_connections} at once: keep connections open "
                    "and use them again, or try again later"
                )
                self._refuse(b"503 Service Unavailable\r\nretry-after: 1", refusal)
                return
            self._start_timer(h11.IDLE)

        def data_received(self, data: bytes) -> None:
            self._received += len(data)
            super().data_received(data)
            self._watch()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            # What came behind a request may be the beginning of another.
            self._watch()

        def send_400_response(self, msg: str) -> None:
            refusal = RequestError("request must be HTTP/1.1, got bytes that are not: end it here")
            self._refuse(b"400 Bad Request", refusal)

        def connection_lost(self, exc: Exception | None) -> None:
            self._end_timer()
            super().connection_lost(exc)

        def _watch(self) -> None:
            """Time what the client is to say next."""
            state = self.conn.their_state
            if state is h11.SEND_BODY or (state is h11.IDLE and self.conn.trailing_data[0]):
                if self._timed is not state:
                    self._start_timer(state)
            elif state is not h11.IDLE or self._timed is not state:
                self._end_timer()

        def _start_timer(self, state: type) -> None:
            self._end_timer()
            self._timed, self._received = state, 0
            self._timer = self.loop.call_later(head_s, self._end_slow)

        def _end_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._timed = None

        def _end_slow(self) -> None:
            """The time is over: go on with a body that comes, or that its reader holds up."""
            if self._timed is h11.IDLE:
                self.transport.close()
            elif self.flow.read_paused or self._received >= LEAST_BODY:
                self._start_timer(h11.SEND_BODY)
            else:
                refusal = TransportError(
                    f"body must come with {LEAST_BODY} bytes in {head_s:g} s at least, got "
                    f"{self._received}: send it again over a faster connection"
                )
                self._refuse(b"408 Request Timeout", refusal)

        def _refuse(self, status: bytes, error: HearthError) -> None:
            """Answer with ``error`` if nothing was answered yet, and close.

            A request under way ends as if its client had left: nothing can be sent after this.
            """
            if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                body = error_body(error)
                self.transport.write(_REFUSAL % (status, len(body), body))
            if self.cycle is not None and not self.cycle.response_complete:
                self.cycle.disconnected = True
                self.cycle.message_event.set()
            self.transport.close()

    return Connection
