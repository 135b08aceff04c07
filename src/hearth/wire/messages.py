"""Requests and responses, the same over the network as to an app in this very process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any
from urllib.parse import unquote, urlencode, urlsplit

import httpx

from hearth.wire.asgi import NO_DISCONNECT


@dataclass(frozen=True)
class HttpRequest:
    """What is sent to a platform. ``path`` begins after its base URL."""

    method: str
    path: str
    body: bytes | None = None
    _: KW_ONLY
    params: Mapping[str, str] | None = None
    headers: Mapping[str, str] | None = None
    """Beside those of the platform's client."""
    timeout_s: float = 60.0
    waits: bool = False
    """Whether it waits for a platform that has answered before and cannot be reached now."""


@dataclass(frozen=True)
class HttpResponse:
    """A whole response, whatever its status. It is small because every completion makes one."""

    status_code: int
    headers: Mapping[str, str]
    """Names in lower case."""
    content: bytes
    method: str
    """That of the request."""
    url: str
    """That of the request."""

    @property
    def is_success(self) -> bool:
        """Whether the status is 2xx."""
        return 200 <= self.status_code < 300


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
