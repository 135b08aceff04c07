"""The one way into a platform: checks access and forwards each request.

A trainer is named by the path, a deployment by a header or by ``model`` in the body; the rest is
the control plane's own. A worker in this process is called directly; one in a process of its own is
reached through its Unix socket or at its URL, and what it answers is passed on as it comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import httpx
from starlette.requests import ClientDisconnect

from hearth.control.access import Access
from hearth.control.deployments import Deployments
from hearth.control.jobs import Jobs
from hearth.control.resource_names import parse_id
from hearth.errors import HearthError, NotFoundError, RequestError, TooLargeError, TransportError
from hearth.launch.spec import Endpoint
from hearth.wire.asgi import TOKEN_HEADER, App, Message, Receive, Scope, Send
from hearth.wire.base import parse_json
from hearth.wire.http import error_response, error_status

TRAINER_PREFIX = "/training/v1/rlorTrainerJobs/"
BUCKET_HEADER = b"x-hearth-snapshot-bucket"
"""Names the bucket that a hot-load reads; only the gateway sets it."""
_SAMPLING_PATHS = ("/inference/", "/hot_load/", "/v1/completions", "/v1/chat/completions")
_ACCESS_HEADERS = frozenset(
    {b"authorization", b"x-api-key", b"cookie", BUCKET_HEADER, TOKEN_HEADER}
)
"""A client's are not forwarded to workers."""
_CONNECTION_HEADERS = frozenset(
    b"host connection transfer-encoding keep-alive expect te trailer upgrade date server".split()
)
"""Not forwarded: each connection has its own."""
_GRACE_S = 1.0
"""How long a platform that ends waits for its workers' answers."""
_TRAINER_BODY_RATIO = 16
"""How many times longer a body to a trainer may be than another."""
_CONNECT_TIMEOUT_S = 10.0
_KEEPALIVE: tuple[tuple[int, int, int], ...] = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
)
"""A machine that loses its power closes no connection: after 30 s of silence it counts as gone."""


class Gateway:
    """The ASGI app of a whole platform."""

    def __init__(self, jobs: Jobs, deployments: Deployments, control: App, access: Access) -> None:
        self._jobs = jobs
        self._deployments = deployments
        self._control = control
        self._access = access
        self._clients: dict[str, httpx.AsyncClient] = {}
        """Of workers in processes of their own, by socket or URL."""
        self._ending: asyncio.Future[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            try:
                self._access.check(scope)
                await self._route(scope, receive, send)
            except ClientDisconnect:
                return
            except HearthError as error:
                is_early = error_status(error) in (425, 503)
                headers = {"retry-after": "1"} if is_early else None
                await error_response(error, headers=headers)(scope, receive, send)

    def end(self) -> None:
        """Respond with 503 to what workers have not answered in a second.

        To be called on the loop that the requests run on.
        """
        ending = self._end_future()
        if not ending.done():
            ending.set_result(None)

    def _end_future(self) -> asyncio.Future[None]:
        if self._ending is None:
            self._ending = asyncio.get_running_loop().create_future()
        return self._ending

    async def close(self) -> None:
        """Close the connections to workers."""
        for client in self._clients.values():
            await client.aclose()
        self._clients.clear()

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        if path.startswith(TRAINER_PREFIX):
            job_id, inner = _split_trainer_path(path)
            receive = _limit_body(scope, receive, self._access.max_body)
            endpoint = await _find_endpoint(self._jobs, job_id)
            await self._forward(endpoint, _build_worker_scope(scope, inner), receive, send)
            return
        receive = _limit_body(scope, receive, self._access.max_body // _TRAINER_BODY_RATIO)
        if path.startswith(_SAMPLING_PATHS):
            deployment_id, receive = await _read_deployment_id(scope, receive)
            endpoint = await _find_endpoint(self._deployments, deployment_id)
            worker_scope = _build_worker_scope(scope, path)
            if path.startswith("/hot_load/") and scope["method"] == "POST":
                bucket = await asyncio.to_thread(self._deployments.find_bucket, deployment_id)
                worker_scope["headers"].append((BUCKET_HEADER, bucket.encode()))
            await self._forward(endpoint, worker_scope, receive, send)
            return
        await self._control(scope, receive, send)

    async def _forward(
        self, endpoint: Endpoint, scope: Scope, receive: Receive, send: Send
    ) -> None:
        if endpoint.app is not None:
            await endpoint.app(scope, receive, send)
            return
        request = _build_request(scope, await _read_body(receive), endpoint)
        client = await self._get_client(endpoint)
        sent = _TrackedSend(send)
        answering = asyncio.create_task(_pass_on(client, request, sent))
        leaving = asyncio.create_task(_await_disconnect(receive))
        ended = self._end_future()
        try:
            tasks = {answering, leaving}
            await asyncio.wait({*tasks, ended}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                first = asyncio.FIRST_COMPLETED
                await asyncio.wait(tasks, timeout=_GRACE_S, return_when=first)
        finally:
            # After a disconnect the worker sees its connection close, and stops.
            is_late = not leaving.done() and not answering.done()
            leaving.cancel()
            answering.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await answering
        if is_late and not sent.has_begun:
            raise TransportError("platform must be open, got a request while it ends: ask again")

    async def _get_client(self, endpoint: Endpoint) -> httpx.AsyncClient:
        """The client of a worker; those of workers that have ended go."""
        address = endpoint.socket or endpoint.url
        assert address is not None, "an endpoint is an app, a socket or a URL"
        known = self._clients.get(address)
        if known is not None:
            return known
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        if endpoint.socket is not None:
            transport = httpx.AsyncHTTPTransport(uds=endpoint.socket, limits=limits)
        else:
            transport = httpx.AsyncHTTPTransport(limits=limits, socket_options=_KEEPALIVE)
        timeout = httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S)
        self._clients[address] = client = httpx.AsyncClient(transport=transport, timeout=timeout)
        for gone in [known for known in self._clients if known != address and self._is_gone(known)]:
            await self._clients.pop(gone).aclose()
        return client

    def _is_gone(self, address: str) -> bool:
        """Whether the worker at a socket or URL is gone."""
        if address.startswith("/"):
            return not Path(address).exists()
        living = [*self._jobs.live.endpoints(), *self._deployments.live.endpoints()]
        return all(endpoint.url != address for endpoint in living)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.shutdown":
                await self.close()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return


class _TrackedSend:
    """``send`` that knows whether an answer has begun."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.has_begun = False

    async def __call__(self, message: Message) -> None:
        await self._send(message)
        self.has_begun = True


def _build_request(scope: Scope, body: bytes, endpoint: Endpoint) -> httpx.Request:
    """The request as it came in, and nothing added to it but the worker's token."""
    headers = [pair for pair in scope["headers"] if pair[0] not in _CONNECTION_HEADERS]
    if endpoint.token is not None:
        headers.append((TOKEN_HEADER, endpoint.token.encode()))
    # As it came in: a path's %3F must not turn into the beginning of a query.
    path = quote(scope["path"], safe="/:@!$&'()*+,;=~").encode()
    query = scope.get("query_string", b"")
    raw_path = path + (b"?" + query if query else b"")
    url = httpx.URL(endpoint.url or "http://worker").copy_with(raw_path=raw_path)
    return httpx.Request(scope["method"], url, headers=headers, content=body)


async def _pass_on(client: httpx.AsyncClient, request: httpx.Request, send: _TrackedSend) -> None:
    """A worker's answer, as it comes.

    Raises:
        TransportError: there is none.
        httpx.TransportError: it broke off; only a broken connection says so.
    """
    try:
        response = await client.send(request, stream=True)
        try:
            headers = [
                (name.lower(), value)
                for name, value in response.headers.raw
                if name.lower() not in _CONNECTION_HEADERS
            ]
            start = {"type": "http.response.start", "status": response.status_code}
            await send({**start, "headers": headers})
            async for chunk in response.aiter_raw():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            await response.aclose()
    except (httpx.TransportError, RuntimeError) as error:
        # A client refuses with RuntimeError once its worker was seen to have ended.
        is_gone = isinstance(error, httpx.TransportError) or client.is_closed
        if send.has_begun or not is_gone:
            raise
        raise TransportError(
            f"worker must answer, got {type(error).__name__}: it may have died; ask again, and "
            "the answer will say how"
        ) from None


def _build_worker_scope(scope: Scope, path: str) -> dict[str, Any]:
    """A worker's request: its own path, without the headers of access."""
    headers = [pair for pair in scope["headers"] if pair[0] not in _ACCESS_HEADERS]
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


async def _find_endpoint(resources: Jobs | Deployments, id: str) -> Endpoint:
    """The endpoint of a running worker; only where there is none, the database is read."""
    return resources.live.endpoint(id) or await asyncio.to_thread(resources.find_endpoint, id)


async def _read_deployment_id(scope: Scope, receive: Receive) -> tuple[str, Receive]:
    """Which deployment is meant (by its full name, its id, or ``MODEL#NAME``), and the body again.

    Raises:
        RequestError: neither a header nor the body says so.
    """
    for key, value in scope["headers"]:
        if key == b"fireworks-deployment":
            return _parse_deployment_id(value.decode("latin-1")), receive
    body = await _read_body(receive)
    content: Any = parse_json(body) if body else {}
    name: object = None
    if isinstance(content, dict):
        name = cast("dict[str, Any]", content).get("model")
    if not isinstance(name, str):
        raise RequestError(
            f"model must name a deployment, got {str(name)[:80]!r}: set it in the body, or send "
            "the header fireworks-deployment"
        )
    return _parse_deployment_id(name), _replay_body(body, receive)


def _parse_deployment_id(name: str) -> str:
    return parse_id(name.rpartition("#")[2])


def _limit_body(scope: Scope, receive: Receive, limit: int) -> Receive:
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


async def _read_body(receive: Receive) -> bytes:
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


def _replay_body(body: bytes, receive: Receive) -> Receive:
    """``receive`` again from the start, for an app that has seen nothing yet."""
    is_read = False

    async def replay() -> Message:
        nonlocal is_read
        if not is_read:
            is_read = True
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return replay


async def _await_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
