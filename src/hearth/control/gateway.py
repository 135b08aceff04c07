"""The one way into a platform: checks access and forwards each request.

A trainer is named by the path, a deployment by a header or by ``model`` in the body; the rest is
the control plane's own. A worker in this process is called directly; one in a process of its own is
reached through its Unix socket or at its URL, and what it answers is passed on as it comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import httpx
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from hearth.control.access import ANYONE, Access, AuditLog
from hearth.control.bodies import Body
from hearth.control.deployments import Deployments
from hearth.control.jobs import Jobs
from hearth.control.metrics import RequestMetrics
from hearth.control.resource_names import parse_id
from hearth.errors import BusyError, HearthError, NotFoundError, RequestError, TransportError
from hearth.launch.spec import Endpoint
from hearth.wire.asgi import CLIENT_HEADER, TOKEN_HEADER, App, Message, Receive, Scope, Send
from hearth.wire.base import parse_json, show
from hearth.wire.connections import KeptConnections
from hearth.wire.http import error_response
from hearth.wire.room import Room

logger = logging.getLogger(__name__)

TRAINER_PREFIX = "/training/v1/rlorTrainerJobs/"
TINKER_PREFIX = "/api/v1/"
LINK_PREFIX = "/api/v1/links/"
"""Links to files: whoever has one may read the file, since it holds a secret, and expires."""
BUCKET_HEADER = b"x-hearth-snapshot-bucket"
"""Names the bucket that a hot-load reads; only the gateway sets it."""
_HEALTH_PATH = "/api/v1/healthz"
ANSWERED = 200
SAMPLING_PATHS = (
    "/inference/",
    "/hot_load/",
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/tokenize",
    "/tokenize",
)
REFUSED_PATHS = {
    "/v1/responses": "ask /v1/chat/completions",
    "/inference/v1/responses": "ask /inference/v1/chat/completions",
    "/inference/v1/generate": (
        "ask /inference/v1/completions with the prompt's token ids and return_token_ids"
    ),
}
"""What clients of other servers ask, and what answers them here."""
_TINKER_CHANGES = ("/create_session", "/create_model", "/load_weights", "/publish")
_READING = frozenset({"GET", "HEAD", "OPTIONS"})
HOT_LOAD_PREFIX = "/hot_load/"
KEY_NAME = "hearth.key"
"""In a request's scope: the name of its key."""
_ACCESS_HEADERS = frozenset(
    {b"authorization", b"x-api-key", b"cookie", BUCKET_HEADER, CLIENT_HEADER, TOKEN_HEADER}
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
_ROOM_RATIO = 3
"""How many of the longest bodies may be on their way to trainers; one client alone has half."""
_OTHER_ROOM_RATIO = 4
"""How much less may be on its way to others than one body to a trainer may have."""
_STREAMED_FROM = 2**20
"""Bytes from which on a body is passed on while it arrives."""
_CONNECT_TIMEOUT_S = 10.0
_NOTICE_S = 0.5
"""How long an answer that broke off waits for news of its worker's end."""
_NOTICE_POLL_S = 0.01
_KEEPALIVE: tuple[tuple[int, int, int], ...] = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
)
"""A machine that loses its power closes no connection: after 30 s of silence it counts as gone."""


class BaseGateway(ABC):
    """An ASGI app that checks requests, counts them, and passes them on to whom they are for."""

    def __init__(self, access: Access, audit: AuditLog | None = None) -> None:
        self.metrics = RequestMetrics()
        self._access = access
        self._audit = audit
        self._answering = Counter[str]()
        """Requests that are being answered, by their key's name."""
        self.short_body = access.max_body // _TRAINER_BODY_RATIO
        """Longest body that is not to a trainer."""
        self._trainer_room = Room(_ROOM_RATIO * access.max_body, "bytes of bodies")
        self._room = Room(access.max_body // _OTHER_ROOM_RATIO, "bytes of bodies")
        """For bodies that are not to a trainer. Some are read as a whole, and a list of token ids
        takes several times as much memory as its JSON."""
        self._clients: dict[str, httpx.AsyncClient] = {}
        """Of workers in processes of their own, by socket or URL."""
        self._ending: asyncio.Future[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            try:
                is_link = scope["path"].startswith(LINK_PREFIX) and scope["method"] == "GET"
                key = ANYONE if is_link else self._access.check(scope)
            except HearthError as error:
                await error_response(error)(scope, receive, send)
                return
            await self.answer(scope, receive, send, key)

    async def answer(self, scope: Scope, receive: Receive, send: Send, key: str) -> None:
        """Answer an accepted request of the key of that name."""
        try:
            await self._answer(scope, receive, send, key)
        except ClientDisconnect:
            return
        except httpx.TransportError as error:
            # Returning before the answer is complete cuts the connection.
            logger.warning("answer to %s %s broke off: %s", scope["method"], scope["path"], error)
        except HearthError as error:
            await error_response(error)(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, key: str) -> None:
        """Answer an accepted request of the key of that name, and write down what it changes."""
        most = self._access.requests_per_key
        if most is not None and self._answering[key] >= most:
            raise BusyError(
                f"requests of one key must be at most {most} at once, got one more: ask again soon"
            )
        self._answering[key] += 1
        tracked = TrackedSend(send)
        part, start_s = name_part(scope["path"]), time.perf_counter()
        self.metrics.begin(part)
        try:
            await self._route({**scope, KEY_NAME: key}, receive, tracked)
        except HearthError as error:
            await error_response(error)(scope, receive, tracked)
        finally:
            self.metrics.end(part, tracked.status, time.perf_counter() - start_s)
            self._answering[key] -= 1
            if not self._answering[key]:
                del self._answering[key]
            if self._audit is not None and _changes_resources(scope):
                await run_in_threadpool(self._audit.write, key, scope, tracked.status)

    @property
    def is_ending(self) -> bool:
        """Whether new requests should go elsewhere."""
        return self._ending is not None and self._ending.done()

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

    async def _route(self, scope: Scope, receive: Receive, send: TrackedSend) -> None:
        is_long = scope["path"].startswith((TRAINER_PREFIX, TINKER_PREFIX))
        client = self._access.name_client(scope)
        body = Body(
            scope,
            receive,
            limit=self._access.max_body if is_long else self.short_body,
            room=self._trainer_room if is_long else self._room,
            client=client.decode(),
        )
        try:
            await self._route_body(scope, body, client, send)
        finally:
            body.release()

    @abstractmethod
    async def _route_body(self, scope: Scope, body: Body, client: bytes, send: TrackedSend) -> None:
        """Answer a request of ``client`` that is within the limits."""

    @abstractmethod
    def _living_urls(self) -> Collection[str | None]:
        """The URLs of workers that run."""

    async def forward(self, endpoint: Endpoint, scope: Scope, body: Body, send: Send) -> None:
        """Have a worker answer.

        Raises:
            TransportError: it does not.
        """
        if endpoint.app is not None:
            await endpoint.app(scope, body.receive, send)
            return
        # A client that leaves within a short body reaches no worker.
        await body.read(_STREAMED_FROM)
        request = await _build_request(scope, body, endpoint)
        client = await self.get_client(endpoint)
        sent = TrackedSend(send)
        answering = asyncio.create_task(_pass_on(client, request, sent))
        leaving = asyncio.create_task(_await_disconnect(body))
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

    async def get_client(self, endpoint: Endpoint) -> httpx.AsyncClient:
        """The client of a worker; those of workers that have ended go."""
        address = endpoint.socket or endpoint.url
        assert address is not None, "an endpoint is an app, a socket or a URL"
        known = self._clients.get(address)
        if known is not None:
            return known
        transport = KeptConnections(endpoint.socket, _KEEPALIVE)
        timeout = httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S)
        self._clients[address] = client = httpx.AsyncClient(transport=transport, timeout=timeout)
        for gone in [known for known in self._clients if known != address and self._is_gone(known)]:
            await self._clients.pop(gone).aclose()
        return client

    def _is_gone(self, address: str) -> bool:
        """Whether the worker at a socket or URL is gone."""
        if address.startswith("/"):
            return not Path(address).exists()
        return address not in self._living_urls()

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.shutdown":
                await self.close()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return


class Gateway(BaseGateway):
    """The ASGI app of a whole platform."""

    def __init__(
        self,
        jobs: Jobs,
        deployments: Deployments,
        control: App,
        access: Access,
        audit: AuditLog | None = None,
    ) -> None:
        super().__init__(access, audit)
        self.tinker: App | None = None
        """Answers what begins with ``TINKER_PREFIX``."""
        self._jobs = jobs
        self._deployments = deployments
        self._control = control
        self._own_room = Room(2**62, "bytes of bodies")
        """For the platform's own requests, whose clients' bodies count already."""

    def worker_app(self, resources: Jobs | Deployments, id: str) -> App:
        """What answers requests that the platform itself has for a resource's worker."""

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            tracked = TrackedSend(send)
            body = Body(scope, receive, limit=self._access.max_body, room=self._own_room, client="")
            try:
                worker_scope = build_worker_scope(scope, scope["path"])
                if isinstance(resources, Jobs):
                    resources.live.note_use(id)
                client = dict(scope["headers"]).get(CLIENT_HEADER, b"")
                worker_scope["headers"].append((CLIENT_HEADER, client))
                await self._forward_to(resources, id, worker_scope, body, tracked)
                if tracked.status == ANSWERED and isinstance(resources, Deployments):
                    resources.note_completion(id)
            except HearthError as error:
                await error_response(error)(scope, receive, tracked)
            finally:
                body.release()

        return answer

    async def _route_body(self, scope: Scope, body: Body, client: bytes, send: TrackedSend) -> None:
        path: str = scope["path"]
        if path.startswith(TRAINER_PREFIX):
            job_id, inner = _split_trainer_path(path)
            worker_scope = build_worker_scope(scope, inner)
            if inner != _HEALTH_PATH:
                self._jobs.live.note_use(job_id)
            await self._forward_to(self._jobs, job_id, worker_scope, body, send)
            return
        if path.startswith(TINKER_PREFIX) and self.tinker is not None:
            await self.tinker(scope, body.receive, send)
            return
        if path in REFUSED_PATHS:
            raise NotFoundError(
                f"path must be one that the platform has, got {path!r}: {REFUSED_PATHS[path]}"
            )
        if path.startswith(SAMPLING_PATHS):
            deployment_id = await read_deployment_id(scope, body, self.short_body)
            worker_scope = build_worker_scope(scope, path)
            worker_scope["headers"].append((CLIENT_HEADER, client))
            if path.startswith(HOT_LOAD_PREFIX) and scope["method"] == "POST":
                bucket = await run_in_threadpool(self._deployments.find_bucket, deployment_id)
                worker_scope["headers"].append((BUCKET_HEADER, bucket.encode()))
            await self._forward_to(self._deployments, deployment_id, worker_scope, body, send)
            if send.status == ANSWERED and not path.startswith(HOT_LOAD_PREFIX):
                self._deployments.note_completion(deployment_id)
            return
        await self._control(scope, body.receive, send)

    async def _forward_to(
        self, resources: Jobs | Deployments, id: str, scope: Scope, body: Body, send: Send
    ) -> None:
        """Have a resource's worker answer. Where it dies meanwhile, the answer says how."""
        endpoint = await _find_endpoint(resources, id)
        try:
            await self.forward(endpoint, scope, body, send)
        except TransportError:
            await self.explain_end(resources, id, endpoint)
            raise

    async def explain_end(self, resources: Jobs | Deployments, id: str, endpoint: Endpoint) -> None:
        """Raise what became of a resource whose worker has broken off an answer, if it has ended.

        Raises:
            HearthError: as ``find_endpoint``.
        """
        # Whoever watches the worker sees its end within milliseconds.
        end_s = time.monotonic() + _NOTICE_S
        while (
            resources.live.endpoint(id) == endpoint
            and time.monotonic() < end_s
            and not self._end_future().done()
        ):
            await asyncio.sleep(_NOTICE_POLL_S)
        if resources.live.endpoint(id) is None:
            await run_in_threadpool(resources.find_endpoint, id)

    def _living_urls(self) -> Collection[str | None]:
        living = [*self._jobs.live.endpoints(), *self._deployments.live.endpoints()]
        return [endpoint.url for endpoint in living]


class TrackedSend:
    """``send`` that knows whether an answer has begun."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.has_begun = False
        self.status = 0
        """That of the answer; 0 before it."""

    async def __call__(self, message: Message) -> None:
        await self._send(message)
        self.has_begun = True
        self.status = message.get("status", self.status)


def name_part(path: str) -> str:
    """The part of the platform that answers a path."""
    if path.startswith(TRAINER_PREFIX):
        return "trainer"
    if path.startswith(TINKER_PREFIX):
        return "tinker"
    return "deployment" if path.startswith(SAMPLING_PATHS) else "control"


def _changes_resources(scope: Scope) -> bool:
    """Whether a request may create, change or delete what a platform has, or what one serves."""
    path: str = scope["path"]
    if scope["method"] in _READING:
        return False
    if path.startswith(TINKER_PREFIX):
        return scope["method"] != "POST" or path.endswith(_TINKER_CHANGES)
    is_control = not path.startswith((TRAINER_PREFIX, *SAMPLING_PATHS))
    return is_control or path.startswith(HOT_LOAD_PREFIX)


async def _build_request(scope: Scope, body: Body, endpoint: Endpoint) -> httpx.Request:
    """The request as it came in, and nothing added to it but the worker's token."""
    headers = [pair for pair in scope["headers"] if pair[0] not in _CONNECTION_HEADERS]
    if endpoint.token is not None:
        headers.append((TOKEN_HEADER, endpoint.token.encode()))
    # As it came in: a path's %3F must not turn into the beginning of a query.
    path = quote(scope["path"], safe="/:@!$&'()*+,;=~").encode()
    query = scope.get("query_string", b"")
    raw_path = path + (b"?" + query if query else b"")
    url = httpx.URL(endpoint.url or "http://worker").copy_with(raw_path=raw_path)
    content = None
    if not body.is_whole or body.size:
        # Streamed, so that nobody holds a body that its worker has.
        content = body.stream()
        if body.is_whole and all(name != b"content-length" for name, _ in headers):
            headers.append((b"content-length", str(body.size).encode()))
    else:
        await body.receive()
    return httpx.Request(scope["method"], url, headers=headers, content=content)


async def _pass_on(client: httpx.AsyncClient, request: httpx.Request, send: TrackedSend) -> None:
    """A worker's answer, as it comes. It begins with its first bytes, not with its headers alone.

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
            chunks = response.aiter_raw()
            first = await anext(chunks, b"")
            await send({**start, "headers": headers})
            await send({"type": "http.response.body", "body": first, "more_body": True})
            async for chunk in chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            await response.aclose()
    except (httpx.TransportError, RuntimeError) as error:
        # A client refuses with RuntimeError once its worker was seen to have ended.
        is_gone = isinstance(error, httpx.TransportError) or client.is_closed
        if not is_gone:
            raise
        if send.has_begun:
            raise httpx.ReadError(f"{type(error).__name__}: {error}") from error
        raise TransportError(
            f"worker must answer, got {type(error).__name__}: it may have died; ask again, and "
            "the answer will say how"
        ) from None


def build_worker_scope(scope: Scope, path: str) -> dict[str, Any]:
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
    return resources.live.endpoint(id) or await run_in_threadpool(resources.find_endpoint, id)


async def read_deployment_id(scope: Scope, body: Body, most: int) -> str:
    """Which deployment is meant: by its full name, its id, or ``MODEL#NAME``.

    Raises:
        RequestError: neither a header nor the body says so.
    """
    for key, value in scope["headers"]:
        if key == b"fireworks-deployment":
            return _parse_deployment_id(value.decode("latin-1"))
    whole = await body.read(most)
    content: Any = parse_json(whole) if whole else {}
    name: object = None
    if isinstance(content, dict):
        name = cast("dict[str, Any]", content).get("model")
    if not isinstance(name, str):
        raise RequestError(
            f"model must name a deployment, got {show(name)!r}: set it in the body, or send "
            "the header fireworks-deployment"
        )
    return _parse_deployment_id(name)


def _parse_deployment_id(name: str) -> str:
    return parse_id(name.rpartition("#")[2])


async def _await_disconnect(body: Body) -> None:
    await body.passed_on.wait()
    while (await body.receive())["type"] != "http.disconnect":
        pass
