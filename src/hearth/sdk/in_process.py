"""Requests to an app in this very process: called as the HTTP server would, without one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urlencode, urlsplit

import httpx

from hearth.sdk.response import HttpResponse
from hearth.wire.asgi import NO_DISCONNECT

logger = logging.getLogger(__name__)

_CLIENT = ("127.0.0.1", 0)


async def call_app(
    app: Any,
    method: str,
    url: str,
    *,
    headers: Mapping[str, str],
    body: bytes | None = None,
    params: Mapping[str, str] | None = None,
) -> HttpResponse:
    """The whole answer of an ASGI app; an exception before it has begun to answer is its 500.

    Whoever is cancelled here cancels the app's work. No time-out is kept.

    Raises:
        httpx.RemoteProtocolError: the app broke off amid its answer.
    """
    exchange = _Exchange(body or b"")
    try:
        await app(
            _scope(method, url, headers, exchange.body, params), exchange.receive, exchange.send
        )
    except Exception as error:
        logger.exception("%s %s failed", method, url)
        if exchange.status is not None and not exchange.ended.is_set():
            raise httpx.RemoteProtocolError(f"the answer broke off: {error}") from error
    finally:
        exchange.ended.set()
    names = {name.decode("latin-1"): value.decode("latin-1") for name, value in exchange.headers}
    return HttpResponse(exchange.status or 500, names, b"".join(exchange.parts), method, url)


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


def _scope(
    method: str, url: str, headers: Mapping[str, str], body: bytes, params: Mapping[str, str] | None
) -> dict[str, Any]:
    parts = urlsplit(url)
    query = "&".join(filter(None, (parts.query, urlencode(params or {}))))
    sent = [(b"host", parts.netloc.encode()), (b"content-length", str(len(body)).encode())]
    sent += [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
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
