"""HTTP/1.1 connections to a server that are kept for later requests.

httpx's own pool looks at every open connection for every request: with 256 requests in flight that
was half of a client's time. Here a request costs the same however many others there are.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import deque
from collections.abc import AsyncGenerator, Iterable
from functools import cached_property
from typing import Any, cast

import h11
import httpx

_MOST_IDLE = 256
"""Connections that are kept while nobody uses them."""
_MOST_HELD = 2**18
"""Bytes of an answer that wait to be read, about; more stay with the server."""
_ROOM_S = 0.005
"""Between two attempts to connect where a server's queue is full."""
_MOST_HEADERS = 2**17
"""Bytes of a response's head, at most."""
SocketOption = tuple[int, int, int]


class KeptConnections(httpx.AsyncBaseTransport):
    """A transport of ``httpx.AsyncClient``, without proxies: to a Unix socket's ``path`` or hosts.

    It belongs to one event loop. ``options`` are set on sockets of hosts.
    """

    def __init__(self, path: str | None = None, options: Iterable[SocketOption] = ()) -> None:
        self._path = path
        self._options = tuple(options)
        self._idle: dict[bytes, deque[_Connection]] = {}
        """By origin, the one that was used last at the end."""
        self._used: set[_Connection] = set()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """The response with its head; its body is read as it comes.

        Raises:
            httpx.TransportError: there is none.
        """
        limits = request.extensions.get("timeout", {})
        origin = request.url.raw_scheme + request.url.netloc
        connection = self._take_idle(origin) or await self._open(request.url, limits)
        self._used.add(connection)
        try:
            head = await connection.exchange(request, limits)
        except BaseException:
            self._drop(connection)
            raise
        body = _Body(self, origin, connection)
        return httpx.Response(head.status_code, headers=head.headers.raw_items(), stream=body)

    async def aclose(self) -> None:
        """Close all connections; responses that are not whole fail."""
        for connections in self._idle.values():
            for connection in connections:
                connection.close()
        for connection in self._used:
            connection.close()
        self._idle.clear()
        self._used.clear()

    def give_back(self, origin: bytes, connection: _Connection) -> None:
        """Keep a connection whose response has been read, or close it."""
        self._used.discard(connection)
        idle = self._idle.setdefault(origin, deque())
        while idle and not idle[0].is_usable:
            idle.popleft().close()
        if len(idle) < _MOST_IDLE and connection.begin_next():
            idle.append(connection)
        else:
            connection.close()

    def _take_idle(self, origin: bytes) -> _Connection | None:
        idle = self._idle.get(origin)
        while idle:
            connection = idle.pop()
            if connection.is_usable:
                return connection
            connection.close()
        return None

    def _drop(self, connection: _Connection) -> None:
        self._used.discard(connection)
        connection.close()

    @cached_property
    def _certificates(self) -> ssl.SSLContext:
        return httpx.create_ssl_context()

    async def _open(self, url: httpx.URL, limits: dict[str, float | None]) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(limits.get("connect")):
                if self._path is not None:
                    end = await _connect(self._path)
                    _, stream = await loop.create_unix_connection(_Stream, sock=end)
                else:
                    secure = self._certificates if url.scheme == "https" else None
                    port = url.port or (443 if secure else 80)
                    _, stream = await loop.create_connection(_Stream, url.host, port, ssl=secure)
                    for option in self._options:
                        stream.transport.get_extra_info("socket").setsockopt(*option)
        except TimeoutError as error:
            raise httpx.ConnectTimeout(str(error)) from error
        except OSError as error:
            raise httpx.ConnectError(str(error)) from error
        return _Connection(stream)


async def _connect(path: str) -> socket.socket:
    """A Unix socket's end; asyncio takes one for connected that the server has no room for yet."""
    end = socket.socket(socket.AF_UNIX)
    end.setblocking(False)
    try:
        while True:
            try:
                end.connect(path)
            except BlockingIOError:
                await asyncio.sleep(_ROOM_S)
            else:
                return end
    except BaseException:
        end.close()
        raise


class _Stream(asyncio.Protocol):
    """The bytes of one connection. What came before it broke is read before the error is raised."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self.is_over = False
        """Whether nothing more comes."""
        self._error: Exception | None = None
        self._held: list[bytes] = []
        self._size = 0
        self._is_full = False
        self._reading: asyncio.Future[None] | None = None
        self._writing: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._held.append(data)
        self._size += len(data)
        if self._size > _MOST_HELD and not self._is_full:
            self._is_full = True
            self.transport.pause_reading()
        _wake(self._reading)

    def eof_received(self) -> None:
        self.is_over = True
        _wake(self._reading)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_over, self._error = True, exc
        _wake(self._reading)
        _wake(self._writing)

    def pause_writing(self) -> None:
        self._writing = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        _wake(self._writing)
        self._writing = None

    async def read(self) -> bytes:
        """What has come, at least a byte; b"" at the end."""
        while not self._held and not self.is_over:
            self._reading = asyncio.get_running_loop().create_future()
            await self._reading
        data, self._held, self._size = b"".join(self._held), [], 0
        if self._is_full and not self.is_over:
            self._is_full = False
            self.transport.resume_reading()
        if not data and self._error is not None:
            raise self._error
        return data

    async def write(self, data: bytes) -> None:
        """Send it, and wait while much is on its way."""
        if not self.is_over:
            self.transport.write(data)
        if self._writing is not None:
            await self._writing


def _wake(waiting: asyncio.Future[None] | None) -> None:
    if waiting is not None and not waiting.done():
        waiting.set_result(None)


class _Connection:
    """One request after the other."""

    def __init__(self, stream: _Stream) -> None:
        self._stream = stream
        self._state = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MOST_HEADERS)
        self._read_s: float | None = None
        """How long the next bytes may take."""

    @property
    def is_usable(self) -> bool:
        """Whether the server has not closed it."""
        return not (self._stream.is_over or self._stream.transport.is_closing())

    async def exchange(
        self, request: httpx.Request, limits: dict[str, float | None]
    ) -> h11.Response:
        """Send a request, and read its response's head.

        A server may answer, and close, before it has read all of a body.
        """
        self._read_s = limits.get("read")
        try:
            await self._send(request, limits.get("write"))
        except TimeoutError as error:
            raise httpx.WriteTimeout(str(error)) from error
        except h11.LocalProtocolError as error:
            raise httpx.LocalProtocolError(str(error)) from error
        while True:
            event = await self._next_event()
            if isinstance(event, h11.Response):
                return event

    async def _send(self, request: httpx.Request, timeout_s: float | None) -> None:
        head = h11.Request(
            method=request.method, target=request.url.raw_path, headers=request.headers.raw
        )
        waiting = self._state.send(head) or b""
        async for chunk in cast("httpx.AsyncByteStream", request.stream):
            # The head goes with the body's first bytes: one call of the system for both.
            waiting += self._state.send(h11.Data(data=chunk)) or b""
            async with asyncio.timeout(timeout_s):
                await self._stream.write(waiting)
            waiting = b""
        waiting += self._state.send(h11.EndOfMessage()) or b""
        if waiting:
            await self._stream.write(waiting)

    async def read_body(self) -> AsyncGenerator[bytes, None]:
        """The rest of the response."""
        while not isinstance(event := await self._next_event(), h11.EndOfMessage):
            if isinstance(event, h11.Data):
                yield bytes(event.data)

    async def _next_event(self) -> Any:
        while True:
            try:
                event = self._state.next_event()
            except h11.RemoteProtocolError as error:
                raise httpx.RemoteProtocolError(str(error)) from error
            if event is not h11.NEED_DATA:
                return event
            try:
                async with asyncio.timeout(self._read_s):
                    data = await self._stream.read()
            except TimeoutError as error:
                raise httpx.ReadTimeout(str(error)) from error
            except OSError as error:
                raise httpx.ReadError(str(error)) from error
            if not data and self._state.their_state == h11.SEND_RESPONSE:
                raise httpx.RemoteProtocolError("the server closed the connection")
            self._state.receive_data(data)

    def begin_next(self) -> bool:
        """Whether it may take another request."""
        if self._state.our_state is not h11.DONE or self._state.their_state is not h11.DONE:
            return False
        self._state.start_next_cycle()
        return self.is_usable

    def close(self) -> None:
        """Close it at once."""
        self._stream.transport.abort()


class _Body(httpx.AsyncByteStream):
    """A response's body, after which its connection is kept."""

    def __init__(self, pool: KeptConnections, origin: bytes, connection: _Connection) -> None:
        self._pool = pool
        self._origin = origin
        self._connection = connection
        self._is_closed = False

    async def __aiter__(self) -> AsyncGenerator[bytes, None]:
        async for chunk in self._connection.read_body():
            yield chunk

    async def aclose(self) -> None:
        """Give the connection back; one in the middle of its body is closed."""
        if not self._is_closed:
            self._is_closed = True
            self._pool.give_back(self._origin, self._connection)
