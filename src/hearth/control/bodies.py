"""A request's body on its way through the gateway: limited, counted while it is here, streamed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from starlette.requests import ClientDisconnect

from hearth.errors import RequestError, TooLargeError
from hearth.wire.asgi import Message, Receive, Scope
from hearth.wire.room import Room


class Body:
    """The body of one request.

    Its bytes count as in flight from here on, those that its header announces at once, until the
    last of them has been passed on or ``release`` is called.

    Raises:
        RequestError: its length is announced in two ways, which may differ.
        TooLargeError: it announces more than ``limit`` bytes; later, it has more.
        BusyError: there is no room for it; later, for what it did not announce.
    """

    def __init__(
        self, scope: Scope, receive: Receive, *, limit: int, room: Room, client: str
    ) -> None:
        self._receive = receive
        self._limit = limit
        self._room = room
        self._client = client
        self._held: list[bytes] = []
        """Read, but not passed on."""
        self._has_held = False
        self.is_whole = False
        """Whether it has been read to its end."""
        self.size = 0
        """Bytes that have been read."""
        self.passed_on = asyncio.Event()
        self._taken = 0
        headers = dict(scope["headers"])
        length = headers.get(b"content-length", b"")
        if length and b"transfer-encoding" in headers:
            raise RequestError(
                "content-length must be absent with transfer-encoding, got both: send one of them"
            )
        if length.isdigit():
            self._take(int(length))

    async def read(self, most: int) -> bytes:
        """What has been read after its end or more than ``most`` bytes; it can be received again.

        Raises:
            ClientDisconnect: the client has left.
        """
        while not self.is_whole and self.size <= most:
            message = await self._next()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            self._held.append(message.get("body", b""))
            self._has_held = True
        if len(self._held) > 1:
            self._held = [b"".join(self._held)]
        return self._held[0] if self._held else b""

    async def receive(self) -> Message:
        """ASGI's ``receive``, from the start of the body."""
        message: Message
        if self._has_held:
            body, self._held, self._has_held = b"".join(self._held), [], False
            message = {"type": "http.request", "body": body, "more_body": not self.is_whole}
        else:
            message = await self._next()
        if not message.get("more_body"):
            self.release()
        return message

    async def stream(self) -> AsyncIterator[bytes]:
        """The body in pieces.

        Raises:
            ClientDisconnect: the client has left within it.
        """
        is_last = False
        while not is_last:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            is_last = not message.get("more_body")
            yield message.get("body", b"")

    def release(self) -> None:
        """Count nothing of it as in flight any more."""
        self._room.give_back(self._client, self._taken)
        self._taken = 0
        self.passed_on.set()

    async def _next(self) -> Message:
        message = await self._receive()
        if self.is_whole or message["type"] == "http.disconnect":
            return message
        self.size += len(message.get("body", b""))
        self.is_whole = not message.get("more_body")
        self._take(self.size - self._taken)
        return message

    def _take(self, more: int) -> None:
        if self._taken + more > self._limit:
            raise TooLargeError(
                f"body must be at most {self._limit} bytes: send fewer datums per request"
            )
        if more > 0:
            self._room.take(self._client, more)
            self._taken += more
