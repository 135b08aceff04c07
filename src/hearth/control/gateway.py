"""The one door of a platform: judges who comes in, and sends each request where it belongs.

A trainer is named by the path, a deployment by a header or by ``model`` in the body; the rest is
the control plane's own. A worker in this process is called directly; one in a process of its own is
reached through its Unix socket, and what it answers is passed on as it comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import orjson

from hearth.control.deployments import Deployments
from hearth.control.jobs import Jobs
from hearth.control.names import leaf
from hearth.errors import (
    AuthError,
    HearthError,
    NotFoundError,
    RequestError,
    TooLargeError,
    TransportError,
)
from hearth.launch.spec import App, Endpoint, Message, Scope
from hearth.settings import is_loopback
from hearth.wire.faults import fault_body, status_of

TRAINER_PREFIX = "/training/v1/rlorTrainerJobs/"
BUCKET_HEADER = b"x-hearth-snapshot-bucket"
"""Names the bucket that a hot-load reads; only the gateway may say it."""
_SAMPLING_PATHS = ("/inference/", "/hot_load/", "/v1/completions", "/v1/chat/completions")
_FOR_THE_DOOR = frozenset({b"authorization", b"x-api-key", b"cookie", BUCKET_HEADER})
"""No worker hears these from a client."""
_OF_THE_CONNECTION = frozenset(
    {
        b"host", b"connection", b"transfer-encoding", b"keep-alive", b"expect", b"te", b"trailer",
        b"upgrade", b"date", b"server",
    }
)  # fmt: skip
"""Each connection has its own."""
_SMALLER = 16
"""Only trainers take bodies of the full length; others a fraction of it."""

Receive = Callable[[], Any]
Send = Callable[[Message], Any]


@dataclass(frozen=True, kw_only=True)
class Door:
    """Who may come in, and with how much."""

    api_keys: Collection[str] = ()
    """Keys that are let in; with none, anyone on this machine is."""
    is_local: bool = True
    """Without keys, refuse names that are not this machine's: a web page may send requests too."""
    max_body: int = 2**30
    """Longest body to a trainer, in bytes."""

    def check(self, scope: Scope) -> None:
        """Let a request in.

        Raises:
            AuthError: no key, a wrong one, or a host that is not this machine.
        """
        headers: dict[bytes, bytes] = dict(scope["headers"])
        if self.api_keys:
            self._check_key(headers)
        elif self.is_local:
            for name in (b"host", b"origin"):
                self._check_local(name.decode(), headers.get(name, b"localhost"))

    def _check_key(self, headers: dict[bytes, bytes]) -> None:
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        given = headers.get(b"x-api-key") or (bearer if scheme.lower() == b"bearer" else b"")
        digest = hashlib.sha256(given).digest()
        # Every key is compared, and in constant time, so that the time tells nothing.
        matches = [
            hmac.compare_digest(digest, hashlib.sha256(key.encode()).digest())
            for key in self.api_keys
        ]
        if not any(matches):
            found = "a wrong one" if given else "none"
            raise AuthError(
                f"x-api-key must be a key of this platform, got {found}: export FIREWORKS_API_KEY"
            )

    def _check_local(self, name: str, value: bytes) -> None:
        host = value.decode("latin-1").lower()
        if name == "origin":
            host = host.partition("://")[2] or host
        host = host.partition("]")[0].lstrip("[") if host.startswith("[") else host.split(":")[0]
        if not is_loopback(host):
            raise AuthError(
                f"{name} must be this machine while the platform has no API key, got {host!r}"
            )


class Gateway:
    """The ASGI app of a whole platform."""

    def __init__(self, jobs: Jobs, deployments: Deployments, control: App, door: Door) -> None:
        self._jobs = jobs
        self._deployments = deployments
        self._control = control
        self._door = door
        self._sockets: dict[str, httpx.AsyncClient] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            try:
                self._door.check(scope)
                await self._route(scope, receive, send)
            except _LeftError:
                return
            except HearthError as error:
                await _answer(send, error)

    async def close(self) -> None:
        """Close the connections to workers."""
        for client in self._sockets.values():
            await client.aclose()
        self._sockets.clear()

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        if path.startswith(TRAINER_PREFIX):
            job_id, inner = _split_trainer_path(path)
            receive = _bounded(scope, receive, self._door.max_body)
            endpoint = await _found(self._jobs.endpoint, job_id, self._jobs.live.get(job_id))
            await self._forward(endpoint, _for_worker(scope, inner), receive, send)
            return
        receive = _bounded(scope, receive, self._door.max_body // _SMALLER)
        if path.startswith(_SAMPLING_PATHS):
            name, receive = await _deployment_name(scope, receive)
            live = self._deployments.live.get(leaf(name.rpartition("#")[2]))
            endpoint = await _found(self._deployments.endpoint, name, live)
            asked = _for_worker(scope, path)
            if path.startswith("/hot_load/"):
                bucket = await asyncio.to_thread(self._deployments.bucket, name)
                asked["headers"].append((BUCKET_HEADER, bucket.encode()))
            await self._forward(endpoint, asked, receive, send)
            return
        await self._control(scope, receive, send)

    async def _forward(
        self, endpoint: Endpoint, scope: Scope, receive: Receive, send: Send
    ) -> None:
        if endpoint.app is not None:
            await endpoint.app(scope, receive, send)
            return
        assert endpoint.socket is not None, "an endpoint is an app or a socket"
        await self._connect(endpoint.socket)
        request = self._request(endpoint.socket, scope, await _body(receive))
        answering = asyncio.create_task(self._pass_on(endpoint.socket, request, send))
        leaving = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # Who has left wants no answer: the worker sees the connection close, and stops.
            leaving.cancel()
            if not answering.done():
                answering.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await answering

    async def _connect(self, socket: str) -> None:
        """See that there is a client for a worker; those of workers that have ended go."""
        if socket in self._sockets:
            return
        transport = httpx.AsyncHTTPTransport(
            uds=socket, limits=httpx.Limits(max_connections=None, max_keepalive_connections=64)
        )
        self._sockets[socket] = client = httpx.AsyncClient(transport=transport, timeout=None)
        client.headers.clear()  # nothing is added to what the client said
        for gone in [one for one in self._sockets if not Path(one).exists() and one != socket]:
            await self._sockets.pop(gone).aclose()

    def _request(self, socket: str, scope: Scope, body: bytes) -> httpx.Request:
        headers = [pair for pair in scope["headers"] if pair[0] not in _OF_THE_CONNECTION]
        # As it came in: a path's %3F must not turn into the beginning of a query.
        path = quote(scope["path"], safe="/:@!$&'()*+,;=~").encode()
        query = scope.get("query_string", b"")
        url = httpx.URL("http://worker").copy_with(raw_path=path + (b"?" + query if query else b""))
        return self._sockets[socket].build_request(
            scope["method"], url, headers=headers, content=body
        )

    async def _pass_on(self, socket: str, request: httpx.Request, send: Send) -> None:
        begun = False
        try:
            response = await self._sockets[socket].send(request, stream=True)
            try:
                headers = [
                    (name.lower(), value)
                    for name, value in response.headers.raw
                    if name.lower() not in _OF_THE_CONNECTION
                ]
                start = {"type": "http.response.start", "status": response.status_code}
                await send({**start, "headers": headers})
                begun = True
                async for chunk in response.aiter_raw():
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
            finally:
                await response.aclose()
        except httpx.TransportError as error:
            if begun:
                raise  # half an answer is out: only a broken connection says so
            gone = TransportError(
                f"worker must answer, got {type(error).__name__}: it may have died; ask again, and "
                "the answer will say how"
            )
            await _answer(send, gone, headers=[(b"retry-after", b"1")])

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.shutdown":
                await self.close()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return


class _LeftError(Exception):
    """The client is gone before it has said what it wants."""


def _for_worker(scope: Scope, path: str) -> dict[str, Any]:
    """What a worker is asked: the worker's own path, and nothing that was for the door."""
    headers = [pair for pair in scope["headers"] if pair[0] not in _FOR_THE_DOOR]
    return {**scope, "path": path, "headers": headers}


def _split_trainer_path(path: str) -> tuple[str, str]:
    """The job id and the trainer's own path.

    Raises:
        NotFoundError: the path names no account and job.
    """
    parts = path.removeprefix(TRAINER_PREFIX).split("/", 2)
    if len(parts) < 3:
        raise NotFoundError(
            f"path must be {TRAINER_PREFIX}ACCOUNT/JOB/api/v1/OPERATION, got {path!r}"
        )
    return parts[1], "/" + parts[2]


async def _found(find: Callable[[str], Endpoint], name: str, live: Any) -> Endpoint:
    """The endpoint of a running worker at once; what is wrong else is asked of the database."""
    if live is not None and (endpoint := live.endpoint) is not None:
        return endpoint
    return await asyncio.to_thread(find, name)


async def _deployment_name(scope: Scope, receive: Receive) -> tuple[str, Receive]:
    """Which deployment is meant, and the body for who reads it next.

    Raises:
        RequestError: neither a header nor the body says so.
    """
    for key, value in scope["headers"]:
        if key == b"fireworks-deployment":
            return value.decode("latin-1"), receive
    body = await _body(receive)
    content: Any = {}
    if body:
        try:
            content = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise RequestError(f"body must be JSON, got {body[:40]!r}: {error}") from None
    name = content.get("model") if isinstance(content, dict) else None
    if not isinstance(name, str):
        raise RequestError(
            f"model must name a deployment, got {str(name)[:80]!r}: set it in the body, or send "
            "the header fireworks-deployment"
        )
    return name, _replay(body, receive)


def _bounded(scope: Scope, receive: Receive, limit: int) -> Receive:
    """``receive`` that stops a body longer than ``limit`` bytes.

    Raises:
        TooLargeError: the body says at once that it is.
    """
    refused = TooLargeError(f"body must be at most {limit} bytes: send fewer datums per request")
    for key, value in scope["headers"]:
        if key == b"content-length" and value.isdigit() and int(value) > limit:
            raise refused
    received = 0

    async def bounded() -> Message:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        if received > limit:
            raise refused
        return message

    return bounded


async def _body(receive: Receive) -> bytes:
    parts: list[bytes] = []
    async for part in _parts(receive):
        parts.append(part)
    return b"".join(parts)


async def _parts(receive: Receive) -> AsyncIterator[bytes]:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _LeftError
        yield message.get("body", b"")
        if not message.get("more_body"):
            return


def _replay(body: bytes, receive: Receive) -> Receive:
    """``receive`` again from the start, for an app that has seen nothing yet."""
    is_read = False

    async def replay() -> Message:
        nonlocal is_read
        if not is_read:
            is_read = True
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return replay


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _answer(
    send: Send, error: HearthError, headers: Collection[tuple[bytes, bytes]] = ()
) -> None:
    body = orjson.dumps(fault_body(error))
    sent = [(b"content-type", b"application/json"), *headers]
    if status_of(error) == 425:
        sent.append((b"retry-after", b"1"))
    await send({"type": "http.response.start", "status": status_of(error), "headers": sent})
    await send({"type": "http.response.body", "body": body})
