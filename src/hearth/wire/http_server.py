"""The HTTP server of all our apps: uvicorn, which ends within seconds whatever its clients do."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

import httpx
import uvicorn
from starlette.requests import ClientDisconnect

from hearth.wire.asgi import App, Receive, Scope, Send

logger = logging.getLogger(__name__)

_NOTICE_S = 1.0
"""How long a request may go on after its connection was closed."""


class HttpServer(uvicorn.Server):
    """Serves one app.

    When it ends, requests that are under way have ``drain_s``. Then their connections are closed,
    as if their clients had left, and a second later they are cancelled. A client that leaves or
    stalls therefore costs neither a traceback nor the wait of a server that ends. ``options`` are
    of ``uvicorn.Config``.
    """

    def __init__(self, app: App, *, drain_s: float, **options: Any) -> None:
        config = uvicorn.Config(
            self._answer,
            interface="asgi3",
            ws="none",
            access_log=False,
            # Far enough behind the end of the drain that uvicorn's own never comes.
            timeout_graceful_shutdown=int(drain_s + 10 * _NOTICE_S),
            **options,
        )
        super().__init__(config)
        self._app = app
        self._drain_s = drain_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to answer."""
        asyncio.get_running_loop().set_exception_handler(_log_loop_error)
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer the requests that are under way, then end."""
        draining = asyncio.create_task(self._drain())
        await super().shutdown(sockets)
        draining.cancel()

    async def _drain(self) -> None:
        await asyncio.sleep(self._drain_s)
        for connection in list(self.server_state.connections):
            transport: asyncio.Transport = connection.transport
            transport.abort()
        await asyncio.sleep(_NOTICE_S)
        for request in list(self.server_state.tasks):
            request.cancel()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except ClientDisconnect:
            pass
        except httpx.TransportError as error:
            # uvicorn then closes the connection within the answer, which is how its client knows.
            logger.warning("the answer to %s broke off: %s", scope.get("path"), error)
        except asyncio.CancelledError:
            if not self.should_exit:
                raise


def _log_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log what no task has caught.

    anyio waits for a Unix socket with ``Future.set_result``. Where the wait is cancelled as bytes
    arrive, that call comes too late, and nothing is lost by it (compare agronholm/anyio#1267).
    """
    is_late = isinstance(context.get("exception"), asyncio.InvalidStateError)
    if not is_late or "Future.set_result" not in str(context.get("handle")):
        loop.default_exception_handler(context)
