"""A proxy before a platform that loses, cuts, doubles and delays what passes through it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import re
import threading
from collections import Counter
from dataclasses import dataclass

KINDS = ("refused", "request cut", "answer lost", "answer cut", "doubled", "late", "silent")
_LATE_S = 0.5
_SILENT_S = 1.0
_LONGEST_HEAD = 2**18


@dataclass(frozen=True)
class _Request:
    head: bytes
    body: bytes

    @property
    def content(self) -> bytes:
        return self.head + self.body


class FlakyProxy:
    """Passes requests on to a port of this machine, each over a connection of its own.

    ``share`` of them are disturbed, in each of the ``KINDS`` in turn; it may be changed at any
    time. In a ``with`` it listens at ``url``.
    """

    def __init__(self, port: int, seed: int, share: float = 0.0, own_port: int = 0) -> None:
        self.share = share
        self.counts = Counter[str]()
        """Disturbed requests by kind."""
        self.passed = 0
        """Requests in all."""
        self._port, self._own_port = port, own_port
        self._tasks: set[asyncio.Task[None] | None] = set()
        """Kept, so that none is collected while it waits."""
        self._random = random.Random(seed)
        self._kinds = itertools.cycle(KINDS)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> FlakyProxy:
        self._thread.start()
        starting = asyncio.start_server(
            self._serve, "127.0.0.1", self._own_port, limit=_LONGEST_HEAD
        )
        self._server = asyncio.run_coroutine_threadsafe(starting, self._loop).result(10)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *_: object) -> None:
        async def end() -> None:
            self._server.close()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self._tasks.add(task)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            request = await _read_request(reader)
            self.passed += 1
            kind = next(self._kinds) if self._random.random() < self.share else ""
            if kind:
                self.counts[kind] += 1
            await self._answer(request, kind, writer)
        writer.close()
        self._tasks.discard(task)

    async def _answer(self, request: _Request, kind: str, writer: asyncio.StreamWriter) -> None:
        if kind == "refused":
            writer.transport.abort()
        elif kind == "silent":
            await asyncio.sleep(_SILENT_S)
            writer.transport.abort()
        elif kind == "request cut":
            half = request.head + request.body[: len(request.body) // 2]
            await self._ask(half if request.body else request.head[:-2], is_whole=False)
            writer.transport.abort()
        elif kind in ("answer lost", "answer cut"):
            answer = await self._ask(request.content)
            if kind == "answer cut":
                writer.write(answer[: len(answer) // 2])
                await writer.drain()
            writer.transport.abort()
        else:
            if kind == "doubled":
                await self._ask(request.content)
            if kind == "late":
                await asyncio.sleep(_LATE_S)
            await self._pass_on(request.content, writer)

    async def _ask(self, content: bytes, *, is_whole: bool = True) -> bytes:
        """The platform's answer; b"" where it gets half a request and then nothing."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            writer.write(content)
            await writer.drain()
            return await reader.read() if is_whole else b""
        finally:
            writer.transport.abort()

    async def _pass_on(self, content: bytes, client: asyncio.StreamWriter) -> None:
        """Ask, and give the answer to the client as it comes; it says that it is the last one."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            writer.write(content)
            client.write(await reader.readline() + b"connection: close\r\n")
            while piece := await reader.read(2**16):
                client.write(piece)
                await client.drain()
        finally:
            writer.close()


async def _read_request(reader: asyncio.StreamReader) -> _Request:
    """A whole request, which asks for its connection to be closed after the answer."""
    lines = (await reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
    kept = [line for line in lines if not line.lower().startswith(b"connection:")]
    head = b"\r\n".join([*kept, b"connection: close"]) + b"\r\n\r\n"
    length = re.search(rb"\r\ncontent-length: *(\d+)", head, re.IGNORECASE)
    return _Request(head, await reader.readexactly(int(length[1])) if length else b"")
