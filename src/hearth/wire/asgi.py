"""What our ASGI apps and those who ask them agree on, beside paths and bodies. Only the standard
library, since vLLM's servers import it too."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
"""An ASGI app."""

TOKEN_HEADER = b"x-hearth-worker-token"
"""Shows a worker, or a server of a worker's, on the network that its own platform asks."""
CLIENT_HEADER = b"x-hearth-client"
"""Tells a worker whose request it is; only the gateway sets it."""
NO_DISCONNECT = "hearth.no_disconnect"
"""ASGI extension of a request inside one process: whoever gives it up cancels the app's task."""


class TokenCheck:
    """An app that answers only who shows a token."""

    def __init__(self, app: App, token: str) -> None:
        self._app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as the app does; 401 without the token."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        shown = [value for name, value in scope["headers"] if name == TOKEN_HEADER]
        # The app hears nothing of it.
        headers = [pair for pair in scope["headers"] if pair[0] != TOKEN_HEADER]
        if len(shown) == 1 and secrets.compare_digest(shown[0], self._token):
            await self._app({**scope, "headers": headers}, receive, send)
            return
        await send({"type": "http.response.start", "status": 401, "headers": []})
        await send({"type": "http.response.body", "body": b""})
