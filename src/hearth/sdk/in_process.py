"""Requests to an app in this very process: called as the HTTP server would, without one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urlencode, urlsplit

import httpx

from hearth.sdk.messages import HttpRequest, HttpResponse
from hearth.wire.asgi import NO_DISCONNECT

logger = logging.getLogger(__name__)

_CLIENT = ("127.0.0.1", 0)


async def call_app(
    app: Any, request: HttpRequest, url: str, headers: Mapping[str, str]
) -> HttpResponse:
    """The whole response of an ASGI app; an exception before the response starts becomes a 500.

    Cancelling the call cancels the app's work. The request's time limit is ignored.

    Raises:
        httpx.RemoteProtocolError: the app failed in the middle of its response.
    """
    exchange = _Exchange(request.body or b"")
    try:
        await app(_build_scope(request, url, headers), exchange.receive, exchange.send)
    except Exception as error:
        logger.exception("%s %s failed", request.method, url)
        if exchange.status is not None and not exchange.ended.is_set():
            raise httpx.RemoteProtocolError(f"the answer broke off: {error}") from error
    finally:
        exchange.ended.set()
    names = {name.decode("latin-1"): value.decode("latin-1") for name, value in exchange.headers}
    return HttpResponse(
        exchange.status or 500, names, b"".join(exchange.parts), request.method, url
    )


class _Exchange:
    """One request and its answer, as ASGI messages."""

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.status: int | None = None
        self.headers: list[tuple[bytes, bytes]] = []
        self.parts: list[bytes] = []
        self.ended = asyncio.Event()
        self._is_sent = False

    async def receive(self) -> dict[str, Any]:
        if not self._is_sent:
            self._is_sent = True
            return {"type": "http.request", "body": self.body, "more_body": False}
        await self.ended.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Mapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = list(message.get("headers", ()))
            return
        if part := message.get("body", b""):
            self.parts.append(part)
        if not message.get("more_body"):
            self.ended.set()


def _build_scope(request: HttpRequest, url: str, headers: Mapping[str, str]) -> dict[str, Any]:
    parts = urlsplit(url)
    query = "&".join(filter(None, (parts.query, urlencode(request.params or {}))))
    sent = [
        (b"host", parts.netloc.encode()),
        (b"content-length", str(len(request.body or b"")).encode()),
    ]
    sent += [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": parts.scheme,
        "path": unquote(parts.path),
        "raw_path": parts.path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": sent,
        "client": _CLIENT,
        "server": (parts.hostname, parts.port),
        "extensions": {NO_DISCONNECT: {}},
    }
