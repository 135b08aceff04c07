"""One ASGI app at one Unix socket, until it is asked to end or nobody asks for it any more."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from hearth.errors import EngineError
from hearth.launch.spec import App, Message, Scope

if TYPE_CHECKING:
    import uvicorn

logger = logging.getLogger(__name__)

_DRAIN_S = 2
"""How long requests that are held (a poll for a result) may delay the end."""
_KEEP_ALIVE_S = 600
"""Longer than any client keeps an idle connection: who closes it must be the client."""
_NOT_YET = (425, 503)
"""Statuses of an app that answers, but still gets ready."""


class Watched:
    """An app, and how long nobody has asked it anything."""

    def __init__(self, app: App, now: Callable[[], float] = time.monotonic) -> None:
        self._app = app
        self._now = now
        self._running = 0
        self._last_s = now()

    async def __call__(
        self,
        scope: Scope,
        receive: Callable[[], asyncio.Future[Message]],
        send: Callable[[Message], asyncio.Future[None]],
    ) -> None:
        """Answer as the app does."""
        self._running += scope["type"] != "lifespan"
        try:
            await self._app(scope, receive, send)
        finally:
            self._running -= scope["type"] != "lifespan"
            self._last_s = self._now()

    def idle_s(self) -> float:
        """Seconds since the last answer; 0 while one is under way."""
        return 0.0 if self._running else self._now() - self._last_s


def serve_app(
    app: App, path: Path, *, health_path: str, orphan_timeout_s: float | None,
    on_ready: Callable[[], None],
) -> None:  # fmt: skip
    """Answer at ``path`` until SIGTERM, or until nobody has asked for ``orphan_timeout_s``.

    ``on_ready`` is called when ``health_path`` has been answered with 200. To be called on the
    main thread, which receives the signals.

    Raises:
        EngineError: the app does not answer.
    """
    import uvicorn

    watched = Watched(app)
    config = uvicorn.Config(
        watched, log_config=None, access_log=False, timeout_graceful_shutdown=_DRAIN_S,
        timeout_keep_alive=_KEEP_ALIVE_S,
    )  # fmt: skip
    server = uvicorn.Server(config)

    def end(*_: object) -> None:
        server.should_exit = True

    # uvicorn takes the signal while it serves, and hands it on to this handler when it is done.
    signal.signal(signal.SIGTERM, end)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    asyncio.run(_serve(server, listener, watched, health_path, orphan_timeout_s, on_ready))


async def _serve(
    server: uvicorn.Server, listener: socket.socket, watched: Watched, health_path: str,
    orphan_timeout_s: float | None, on_ready: Callable[[], None],
) -> None:  # fmt: skip
    path = listener.getsockname()
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    status = 0
    while not serving.done() and status != 200:
        await asyncio.sleep(0.005 if status == 0 else 0.05)
        status = await _status(path, health_path) if server.started else 0
        if status not in (0, 200, *_NOT_YET):
            server.should_exit = True
    if status == 200:
        on_ready()
    while not serving.done():
        await asyncio.wait([serving], timeout=min(1.0, (orphan_timeout_s or 10.0) / 10))
        if orphan_timeout_s is not None and watched.idle_s() > orphan_timeout_s:
            logger.warning("nobody has asked for %.0f s: the worker ends", orphan_timeout_s)
            server.should_exit = True
            orphan_timeout_s = None
    await serving
    if not server.started or status not in (0, 200, *_NOT_YET):
        raise EngineError(f"the worker must answer GET {health_path} with 200, got {status}")


async def _status(path: str, health_path: str) -> int:
    """The status of an answer; 0 where there is none."""
    try:
        reader, writer = await asyncio.open_unix_connection(path)
    except OSError:
        return 0
    try:
        asked = f"GET {health_path} HTTP/1.1\r\nhost: worker\r\nconnection: close\r\n\r\n"
        writer.write(asked.encode())
        words = (await reader.readline()).split()
        return int(words[1]) if len(words) > 1 else 0
    finally:
        writer.close()
