"""HTTP as the SDK speaks it: keys, retries, errors, and apps that run in this process.

``mount`` gives an ASGI app an origin. Requests to that origin reach the app through memory; all
others go over the network. The rest of the SDK does not know the difference.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

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
    UnreachableError,
)
from hearth.wire.connections import KeptConnections
from hearth.wire.messages import HttpRequest, HttpResponse, call_app

logger = logging.getLogger(__name__)

_mounted: dict[str, Any] = {}

_UNREACHABLE = (httpx.ConnectError, httpx.ConnectTimeout)
"""Nothing of the request was sent."""
_FIRST_WARNING_S = 5.0
_NEXT_WARNING_S = 60.0
_TOLD_DELAY_S = 1.0
_LONGEST_AWAY_PAUSE_S = 2.0
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


def parse_origin(url: str) -> str:
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
    _mounted[parse_origin(base_url)] = app


def unmount(base_url: str) -> None:
    """Take an app away; later requests to it are ``ClosedError``."""
    _mounted[parse_origin(base_url)] = None


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
    away_s: float = 1800.0
    """How long a request that ``waits`` waits for a platform that cannot be reached. This is no
    attempt, and needs a platform that has answered before."""

    @property
    def longest_wait_s(self) -> float:
        """Seconds between the first attempt and the last, unless a server asks for more."""
        return sum(
            min(self.longest_s, self.base_s * 2**attempt) for attempt in range(self.attempts - 1)
        )

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
                "api_key must be set, got '': export HEARTH_API_KEY (any text will do for a "
                "platform on this machine)"
            )
        self.base_url = base_url.rstrip("/")
        self._origin = parse_origin(base_url)
        self._headers = {"x-api-key": api_key, "authorization": f"Bearer {api_key}"}
        self._retries = retries or RetryPolicy()
        self._transport: httpx.AsyncBaseTransport | None = None
        self._closed = False
        self._has_answered = False
        self._mentioned_absence = False
        self._away_since_s: float | None = None
        self._warned_s = 0.0
        self._told_refusal_s = -math.inf
        self._waited_s = 0.0

    @property
    def waited_s(self) -> float:
        """How long the platform could not be reached, all times together."""
        since_s = self._away_since_s
        return self._waited_s + (time.monotonic() - since_s if since_s is not None else 0.0)

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` was called, or the platform was taken away."""
        return self._closed or _mounted.get(self._origin, ...) is None

    async def request(
        self, request: HttpRequest, retries: RetryPolicy | None = None
    ) -> HttpResponse:
        """Send until there is a response that is not transient.

        Raises:
            HearthError: the class that fits the final status, or UnreachableError without one.
        """
        policy = retries or self._retries
        last: HttpResponse | None = None
        failure = ""
        for attempt in range(policy.attempts):
            last = None
            try:
                last = await self.send_once(request)
            except httpx.TransportError as error:
                failure = f"{type(error).__name__}: {error}"
                self._mention_absence(error, policy)
                if isinstance(error, httpx.TimeoutException):
                    logger.warning(
                        "%s %s%s was not answered within %.0f s (attempt %d of %d)",
                        request.method,
                        self.base_url,
                        request.path,
                        request.timeout_s,
                        attempt + 1,
                        policy.attempts,
                    )
            if last is not None and last.status_code not in policy.statuses:
                return raise_for_status(last)
            if attempt + 1 < policy.attempts:
                delay_s = policy.delay_s(attempt, last)
                if last is not None and delay_s >= _TOLD_DELAY_S:
                    self._mention_refusal(request, last, delay_s)
                await asyncio.sleep(delay_s)
        if last is not None:
            return raise_for_status(last)
        raise UnreachableError(
            f"{request.method} {self.base_url}{request.path} failed {policy.attempts} times, last "
            f"with {failure}: is the platform running there?"
        )

    def _mention_refusal(self, request: HttpRequest, refusal: HttpResponse, delay_s: float) -> None:
        """Say why a request waits, once in a while for all of them."""
        now = time.monotonic()
        if now - self._told_refusal_s < _NEXT_WARNING_S:
            return
        self._told_refusal_s = now
        try:
            raise_for_status(refusal)
        except HearthError as error:
            logger.warning(
                "%s %s%s is tried again in %.0f s: %s",
                request.method,
                self.base_url,
                request.path,
                delay_s,
                error,
            )

    def _mention_absence(self, error: httpx.TransportError, policy: RetryPolicy) -> None:
        """Say at once, and once, that a platform which has never answered is waited for."""
        longest_s = policy.longest_wait_s
        if self._has_answered or self._mentioned_absence or longest_s < _FIRST_WARNING_S:
            return
        if isinstance(error, _UNREACHABLE):
            self._mentioned_absence = True
            logger.warning(
                "%s cannot be reached: waiting up to %.0f s for it. Start it with `hearth serve`, "
                "or set HEARTH_URL to where it is; unset, recipes bring their own platform",
                self.base_url,
                longest_s,
            )

    async def send_once(self, request: HttpRequest) -> HttpResponse:
        """One attempt; the response is returned whatever its status.

        Raises:
            httpx.TransportError: there was no response.
            ClosedError: the platform is gone.
        """
        app = _mounted.get(self._origin, ...)
        if self._closed or app is None:
            raise ClosedError(
                f"the client of {self.base_url} must be used before it is closed: keep the "
                "training loop inside the `with` block that provisioned it"
            )
        url = self.base_url + request.path
        headers = {**self._headers, **(request.headers or {})}
        if request.body is not None:
            headers["content-type"] = "application/json"
        if app is not ...:
            return await call_app(app, request, url, headers)
        while True:
            try:
                return await self._exchange(request, url, headers)
            except _UNREACHABLE as error:
                if not request.waits or not self._may_wait(error):
                    raise
                await asyncio.sleep(random.uniform(0.1, 1.0) * _LONGEST_AWAY_PAUSE_S)
                if self._closed:
                    raise

    async def _exchange(
        self, request: HttpRequest, url: str, headers: Mapping[str, str]
    ) -> HttpResponse:
        """One request and its whole response; a client of httpx would cost as much again."""
        sent = httpx.Request(
            request.method,
            url,
            params=request.params,
            headers=headers,
            content=request.body,
            extensions={"timeout": httpx.Timeout(request.timeout_s).as_dict()},
        )
        response = await self._open_transport().handle_async_request(sent)
        try:
            content = await response.aread()
        finally:
            await response.aclose()
        self._note_answer()
        return HttpResponse(response.status_code, response.headers, content, request.method, url)

    def _may_wait(self, error: Exception) -> bool:
        """Whether the platform, which cannot be reached, is waited for; says that it is."""
        now_s = time.monotonic()
        if not self._has_answered or self._retries.away_s <= 0:
            return False
        if self._away_since_s is None:
            self._away_since_s, self._warned_s = now_s, now_s - _NEXT_WARNING_S + _FIRST_WARNING_S
        away_s = now_s - self._away_since_s
        if now_s - self._warned_s >= _NEXT_WARNING_S:
            self._warned_s = now_s
            logger.warning(
                "the platform at %s cannot be reached since %.0f s (%s): it is waited for, %.0f s "
                "at most. Start it again with its data folder, and the run goes on",
                self._origin,
                away_s,
                error,
                self._retries.away_s,
            )
        return away_s < self._retries.away_s

    def _note_answer(self) -> None:
        """The platform can be reached."""
        self._has_answered = True
        if self._away_since_s is not None:
            away_s = time.monotonic() - self._away_since_s
            self._waited_s, self._away_since_s = self._waited_s + away_s, None
            if away_s >= _FIRST_WARNING_S:
                logger.warning("the platform at %s is back after %.0f s", self._origin, away_s)

    async def post(self, path: str, body: bytes, *, timeout_s: float = 60.0) -> bytes:
        """POST a JSON body and return the response's body; waits for an unreachable platform."""
        request = HttpRequest("POST", path, body, timeout_s=timeout_s, waits=True)
        return (await self.request(request)).content

    def _open_transport(self) -> httpx.AsyncBaseTransport:
        if self._transport is None:
            self._transport = make_transport(self._origin)
            # Many programs never close their clients: close the connections with the object.
            loop = asyncio.get_running_loop()
            weakref.finalize(self, _close_soon, self._transport, loop).atexit = False
        return self._transport

    async def close(self) -> None:
        """Refuse further requests and close the connections."""
        self._closed = True
        if self._transport is not None:
            await self._transport.aclose()


def make_transport(origin: str) -> httpx.AsyncBaseTransport:
    """The way to one server, through a proxy where the environment says so."""
    parts, proxies = urlsplit(origin), getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if proxy is None or proxy_bypass(parts.hostname or ""):
        return KeptConnections()
    return httpx.AsyncHTTPTransport(proxy=proxy, limits=httpx.Limits(max_connections=None))


def _close_soon(transport: httpx.AsyncBaseTransport, loop: asyncio.AbstractEventLoop) -> None:
    if not loop.is_closed():
        asyncio.run_coroutine_threadsafe(transport.aclose(), loop)


def raise_for_status(response: HttpResponse) -> HttpResponse:
    """The response itself, or the error that its status and body describe."""
    if response.is_success:
        return response
    raise build_error(response)


def build_error(refusal: HttpResponse) -> HearthError:
    """The error that a response's status and body describe."""
    try:
        body = orjson.loads(refusal.content)
        fault = body.get("error", body)
        message = fault.get("message") if isinstance(fault, dict) else str(fault)
    except (orjson.JSONDecodeError, AttributeError):
        message = refusal.content.decode("utf-8", "replace")[:200]
    kind = _ERROR_OF_STATUS.get(refusal.status_code, TransportError)
    path = urlsplit(refusal.url).path
    return kind(f"{message} ({refusal.method} {path}: HTTP {refusal.status_code})")
