"""HTTP as the SDK speaks it: keys, retries, errors, and apps that live in this very process.

``mount`` gives an ASGI app an origin. Requests to that origin reach the app through memory; all
others go over the network. Nothing else in the SDK knows the difference.
"""

from __future__ import annotations

import asyncio
import random
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx
import orjson

from hearth.errors import (
    AuthError,
    ClosedError,
    ConfigError,
    ConflictError,
    HearthError,
    NotFoundError,
    NotReadyError,
    RequestError,
    TooLargeError,
    TransportError,
)
from hearth.sdk.in_process import call_app
from hearth.sdk.response import HttpResponse

_mounted: dict[str, Any] = {}

TRANSIENT_STATUSES = frozenset({408, 429, 502, 503, 504})
_ERROR_OF_STATUS: dict[int, type[HearthError]] = {
    400: RequestError,
    401: AuthError,
    403: AuthError,
    404: NotFoundError,
    409: ConflictError,
    410: ClosedError,
    413: TooLargeError,
    422: RequestError,
    425: NotReadyError,
}


def origin_of(url: str) -> str:
    """``scheme://host[:port]`` of a URL.

    Raises:
        ConfigError: the URL has no scheme or no host.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"base_url must be an http or https URL, got {url!r}")
    return f"{parts.scheme}://{parts.netloc}"


def mount(base_url: str, app: Any) -> None:
    """Answer requests to the origin of ``base_url`` with this ASGI app, inside this process."""
    _mounted[origin_of(base_url)] = app


def unmount(base_url: str) -> None:
    """Take an app away; later requests to it are ``ClosedError``."""
    _mounted[origin_of(base_url)] = None


@dataclass(frozen=True)
class RetryPolicy:
    """How often and how patiently a request is sent again.

    Delays grow from ``base_s`` by doubling up to ``longest_s``, each jittered by half; a server's
    ``Retry-After`` is a floor. Connection failures count like transient statuses.
    """

    attempts: int = 8
    base_s: float = 0.5
    longest_s: float = 30.0
    statuses: frozenset[int] = TRANSIENT_STATUSES

    def delay_s(self, attempt: int, response: HttpResponse | None) -> float:
        """Seconds to wait after the failed attempt number ``attempt`` (from 0)."""
        delay = min(self.longest_s, self.base_s * 2**attempt) * random.uniform(0.5, 1.0)
        floor = response.headers.get("retry-after", "") if response is not None else ""
        return max(delay, min(self.longest_s, float(floor))) if floor.isdigit() else delay


class Http:
    """Requests to one platform. Must be used on the SDK's loop only."""

    def __init__(self, base_url: str, api_key: str, *, retries: RetryPolicy | None = None) -> None:
        if not api_key:
            raise ConfigError(
                "api_key must be set, got '': export FIREWORKS_API_KEY (any text will do for a "
                "platform on this machine)"
            )
        self.base_url = base_url.rstrip("/")
        self._origin = origin_of(base_url)
        self._headers = {"x-api-key": api_key, "authorization": f"Bearer {api_key}"}
        self._retries = retries or RetryPolicy()
        self._client: httpx.AsyncClient | None = None
        self._closed = False

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` was called, or the platform was taken away."""
        return self._closed or _mounted.get(self._origin, ...) is None

    async def request(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        params: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
        retries: RetryPolicy | None = None,
    ) -> HttpResponse:
        """Send until there is an answer that is not transient.

        Raises:
            HearthError: the class that fits the final status; TransportError where there was none.
        """
        policy = retries or self._retries
        sent = {**self._headers, **(headers or {})}
        if body is not None:
            sent["content-type"] = "application/json"
        last: HttpResponse | None = None
        failure = ""
        for attempt in range(policy.attempts):
            last = None
            try:
                last = await self._send(method, path, sent, body, timeout_s, params)
            except httpx.TransportError as error:
                failure = f"{type(error).__name__}: {error}"
            if last is not None and last.status_code not in policy.statuses:
                return raise_for_status(last)
            if attempt + 1 < policy.attempts:
                await asyncio.sleep(policy.delay_s(attempt, last))
        if last is not None:
            return raise_for_status(last)
        raise TransportError(
            f"{method} {self.base_url}{path} failed {policy.attempts} times, last with {failure}: "
            "is the platform running there?"
        )

    async def send_once(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
    ) -> HttpResponse:
        """One attempt; whatever its status, the answer is returned.

        Raises:
            httpx.TransportError: there was none.
            ClosedError: the platform is gone.
        """
        sent = {**self._headers, "content-type": "application/json", **(headers or {})}
        return await self._send(method, path, sent, body, timeout_s)

    async def post(self, path: str, record: bytes, **options: Any) -> bytes:
        """POST a JSON body and return the answer's body."""
        return (await self.request("POST", path, body=record, **options)).content

    async def _send(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: bytes | None,
        timeout_s: float,
        params: Mapping[str, str] | None = None,
    ) -> HttpResponse:
        app = _mounted.get(self._origin, ...)
        if self._closed or app is None:
            raise ClosedError(
                f"the client of {self.base_url} must be used before it is closed: keep the "
                "training loop inside the `with` block that provisioned it"
            )
        url = self.base_url + path
        if app is not ...:
            return await call_app(app, method, url, headers=headers, body=body, params=params)
        response = await self._live_client().request(
            method, url, content=body, params=params, headers=headers, timeout=timeout_s
        )
        return HttpResponse(response.status_code, response.headers, response.content, method, url)

    def _live_client(self) -> httpx.AsyncClient:
        if self._client is None:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
            self._client = httpx.AsyncClient(limits=limits)
            # Many programs never close; theirs are closed when nobody can use them any more.
            loop = asyncio.get_running_loop()
            weakref.finalize(self, _close_soon, self._client, loop).atexit = False
        return self._client

    async def close(self) -> None:
        """Refuse further requests and close the connections."""
        self._closed = True
        if self._client is not None:
            await self._client.aclose()


def _close_soon(client: httpx.AsyncClient, loop: asyncio.AbstractEventLoop) -> None:
    if not loop.is_closed():
        asyncio.run_coroutine_threadsafe(client.aclose(), loop)


def raise_for_status(answer: HttpResponse) -> HttpResponse:
    """The answer itself, or the error that its status and body describe."""
    if answer.is_success:
        return answer
    raise error_of(answer)


def error_of(refusal: HttpResponse) -> HearthError:
    """The error that a response's status and body describe."""
    kind = _ERROR_OF_STATUS.get(refusal.status_code, TransportError)
    return kind(_message_of(refusal))


def _message_of(answer: HttpResponse) -> str:
    where = f"{answer.method} {urlsplit(answer.url).path}: HTTP {answer.status_code}"
    try:
        body = orjson.loads(answer.content)
        fault = body.get("error", body)
        message = fault.get("message") if isinstance(fault, dict) else str(fault)
    except (orjson.JSONDecodeError, AttributeError):
        message = answer.content.decode("utf-8", "replace")[:200]
    return f"{message} ({where})"
