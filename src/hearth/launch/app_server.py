"""Serves one ASGI app at one socket until it is ended, or until it is an orphan."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from hearth.errors import EngineError
from hearth.wire.asgi import TOKEN_HEADER, App, Receive, Scope, Send, TokenCheck
from hearth.wire.http_server import HttpServer

logger = logging.getLogger(__name__)

_DRAIN_S = 2
"""How long requests that are held (a poll for a result) may delay the end."""
_KEEP_ALIVE_S = 600
"""Longer than any client keeps an idle connection: the client must be the one that closes it."""
_NOT_READY = (425, 503)
"""Statuses of an app that answers, but still gets ready."""


class IdleTracker:
    """An app, and how long it has been without a request."""

    def __init__(self, app: App, now: Callable[[], float] = time.monotonic) -> None:
        self._app = app
        self._now = now
        self._running = 0
        self._last_s = now()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as the app does."""
        self._running += scope["type"] != "lifespan"
        try:
            await self._app(scope, receive, send)
        finally:
            self._running -= scope["type"] != "lifespan"
            self._last_s = self._now()

    def touch(self) -> None:
        """Count this moment as an answer."""
        self._last_s = self._now()

    def idle_s(self) -> float:
        """Seconds since the last answer; 0 while one is under way."""
        return 0.0 if self._running else self._now() - self._last_s


class AppServer:
    """One app at one listening socket, from ``run`` until ``end`` or until it is an orphan.

    It ends by itself when the app's ``state.failed``, a future that not every app has, is resolved.
    ``on_ready`` is called when ``health_path`` has been answered with 200. With a ``token`` only
    requests that show it are answered.
    """

    def __init__(
        self,
        app: App,
        listener: socket.socket,
        *,
        health_path: str,
        on_ready: Callable[[], None],
        orphan_timeout_s: float | None = None,
        token: str | None = None,
    ) -> None:
        state = getattr(app, "state", None)
        self._failed: Future[EngineError] | None = getattr(state, "failed", None)
        # Inside of the check: a request without the token keeps no orphan alive.
        self._tracker = IdleTracker(app)
        self._open_listener = listener
        self._health = _health_request(health_path, token)
        self._health_path = health_path
        self._on_ready = on_ready
        self._orphan_timeout_s = orphan_timeout_s
        self._server = HttpServer(
            self._tracker if token is None else TokenCheck(self._tracker, token),
            drain_s=_DRAIN_S,
            log_config=None,
            timeout_keep_alive=_KEEP_ALIVE_S,
        )

    def run(self) -> None:
        """Answer until the end.

        Raises:
            EngineError: the app does not answer, or has failed.
        """
        if self._failed is not None:
            self._failed.add_done_callback(lambda _: self.end())
        asyncio.run(self._serve())
        if self._failed is not None and self._failed.done():
            raise self._failed.result()

    def end(self) -> None:
        """Answer no more, soon; from any thread, or a signal's handler."""
        self._server.should_exit = True

    def touch(self) -> None:
        """Note that its launcher lives, although no request comes: it is no orphan."""
        self._tracker.touch()

    async def _serve(self) -> None:
        server, orphan_timeout_s = self._server, self._orphan_timeout_s
        address = self._open_listener.getsockname()
        serving = asyncio.create_task(server.serve(sockets=[self._open_listener]))
        status = 0
        while not serving.done() and status != 200:
            await asyncio.sleep(0.005 if status == 0 else 0.05)
            status = await _status(address, self._health) if server.started else 0
            if status not in (0, 200, *_NOT_READY):
                server.should_exit = True
        if status == 200:
            self._on_ready()
        while not serving.done():
            await asyncio.wait([serving], timeout=min(1.0, (orphan_timeout_s or 10.0) / 10))
            if orphan_timeout_s is not None and self._tracker.idle_s() > orphan_timeout_s:
                logger.warning("no request for %.0f s: the worker ends", orphan_timeout_s)
                server.should_exit = True
                orphan_timeout_s = None
        await serving
        if not server.started or status not in (0, 200, *_NOT_READY):
            raise EngineError(
                f"the worker must answer GET {self._health_path} with 200, got {status}"
            )


def serve_app(
    app: App,
    path: Path,
    *,
    health_path: str,
    orphan_timeout_s: float | None,
    on_ready: Callable[[], None],
) -> None:
    """Answer at the Unix socket ``path`` until SIGTERM, or ``orphan_timeout_s`` without a request.

    Must be called on the main thread, which receives the signals.

    Raises:
        EngineError: the app does not answer, or has failed.
    """
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    server = AppServer(
        app, listener, health_path=health_path, orphan_timeout_s=orphan_timeout_s, on_ready=on_ready
    )
    # uvicorn takes the signal while it serves, and hands it on to this handler when it is done.
    signal.signal(signal.SIGTERM, lambda *_: server.end())
    server.run()


def listener_at(host: str) -> socket.socket:
    """A socket at a free port of ``host``, for ``AppServer``."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    # asyncio does so only for sockets that it made itself; without it an answer takes 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.bind((host, 0))
    return listener


def _health_request(path: str, token: str | None) -> bytes:
    lines = [f"GET {path} HTTP/1.1", "host: worker", "connection: close"]
    if token is not None:
        lines.append(f"{TOKEN_HEADER.decode()}: {token}")
    return "\r\n".join([*lines, "", ""]).encode()


async def _status(address: str | tuple[str, int], request: bytes) -> int:
    """The status of an answer; 0 where there is none."""
    try:
        if isinstance(address, str):
            reader, writer = await asyncio.open_unix_connection(address)
        else:
            reader, writer = await asyncio.open_connection(*address[:2])
    except OSError:
        return 0
    try:
        writer.write(request)
        words = (await reader.readline()).split()
        return int(words[1]) if len(words) > 1 else 0
    finally:
        writer.close()
