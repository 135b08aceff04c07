"""The door of a vLLM server: its endpoints can change weights, so that only its worker may ask."""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable
from typing import Any

TOKEN_VARIABLE = "HEARTH_VLLM_TOKEN"
HEADER = "x-hearth-server-token"

App = Callable[[Any, Any, Any], Awaitable[None]]


class Door:
    """ASGI middleware, as ``--middleware`` takes it: a request without the token is answered 401.

    The token is the value of ``HEARTH_VLLM_TOKEN``.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._token = os.environ[TOKEN_VARIABLE].encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "lifespan" or self._is_shown(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            headers = [(b"content-type", b"text/plain")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            body = f"{HEADER} must be the token of this server's deployment".encode()
            await send({"type": "http.response.body", "body": body})

    def _is_shown(self, scope: Any) -> bool:
        shown = next((value for name, value in scope["headers"] if name == HEADER.encode()), b"")
        return hmac.compare_digest(shown, self._token)
