"""One of several gateway processes of a served platform.

All of them listen at the platform's address, and the kernel divides the connections. Completions
go straight to the deployment's worker; what else is asked is passed on to the platform's own
process, which decides everything. That process says over a channel where deployments answer, and
each message is answered, which shows that this process is alive. When the channel is closed,
because the platform's process has ended, so does this one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

import httpx
import orjson

from hearth.control.access import Access
from hearth.control.bodies import Body
from hearth.control.gateway import (
    ANSWERED,
    HOT_LOAD_PREFIX,
    KEY_NAME,
    REFUSED_PATHS,
    SAMPLING_PATHS,
    BaseGateway,
    TrackedSend,
    build_worker_scope,
    read_deployment_id,
)
from hearth.errors import TransportError
from hearth.launch.spec import Endpoint
from hearth.local.connections import make_protocol, raise_descriptor_limit
from hearth.local.tracing import trace_requests
from hearth.telemetry import setup_logging
from hearth.wire.asgi import CLIENT_HEADER, App, Scope
from hearth.wire.http_server import HttpServer

ACCEPTED_HEADER = b"x-hearth-accepted"
"""Tells the platform's own process of an accepted request: the name of its key, the address of its
client and the host that it asked. A client's own is dropped."""
END_PATH = "/end"
"""Asked of the platform's own process: what became of a deployment's worker."""
_END_TIMEOUT_S = 5.0
DRAIN_S = 3.0
"""How long requests may delay the end; those to workers are answered with 503 after a second."""


class ForwardingGateway(BaseGateway):
    """Answers completions from where deployments answer; the rest from ``platform``.

    ``note_completion(id)`` is called after the first completion of a deployment's worker.
    """

    def __init__(
        self, access: Access, platform: Endpoint, note_completion: Callable[[str], None]
    ) -> None:
        super().__init__(access)
        self._platform = platform
        self._note_completion = note_completion
        self._endpoints: dict[str, Endpoint] = {}
        self._noted: set[str] = set()

    def set_endpoints(self, endpoints: dict[str, Endpoint]) -> None:
        """Where deployments answer from now on, by their ids."""
        before, self._endpoints = self._endpoints, endpoints
        self._noted = {id for id in self._noted if before.get(id) == endpoints.get(id)}

    async def _route_body(self, scope: Scope, body: Body, client: bytes, send: TrackedSend) -> None:
        path: str = scope["path"]
        is_sampling = path.startswith(SAMPLING_PATHS) and path not in REFUSED_PATHS
        if is_sampling and not path.startswith(HOT_LOAD_PREFIX):
            id = await read_deployment_id(scope, body, self.short_body)
            # The platform's own process knows why one has no worker, or starts it just now.
            if (endpoint := self._endpoints.get(id)) is not None:
                await self._sample(id, endpoint, scope, body, client, send)
                return
        await self.forward(self._platform, _add_facts(scope), body, send)

    async def _sample(
        self,
        id: str,
        endpoint: Endpoint,
        scope: Scope,
        body: Body,
        client: bytes,
        send: TrackedSend,
    ) -> None:
        worker_scope = build_worker_scope(scope, scope["path"])
        worker_scope["headers"].append((CLIENT_HEADER, client))
        try:
            await self.forward(endpoint, worker_scope, body, send)
        except TransportError:
            if not await self._explain_end(id, endpoint, send):
                raise
        if send.status == ANSWERED and id not in self._noted:
            self._noted.add(id)
            self._note_completion(id)

    async def _explain_end(self, id: str, endpoint: Endpoint, send: TrackedSend) -> bool:
        """Answer with what became of a worker that did not; False where nothing is known."""
        client = await self.get_client(self._platform)
        asked = {"id": id, "address": endpoint.socket or endpoint.url or ""}
        try:
            said = await client.get(
                f"http://platform{END_PATH}", params=asked, timeout=_END_TIMEOUT_S
            )
        except (httpx.TransportError, RuntimeError):  # it ends itself
            return False
        if said.is_success:
            return False
        headers = [(b"content-type", said.headers["content-type"].encode())]
        await send({"type": "http.response.start", "status": said.status_code, "headers": headers})
        await send({"type": "http.response.body", "body": said.content})
        return True

    def _living_urls(self) -> Collection[str | None]:
        return [endpoint.url for endpoint in self._endpoints.values()]


def _add_facts(scope: Scope) -> Scope:
    """A request for the platform's own process, with ``ACCEPTED_HEADER``."""
    headers = [pair for pair in scope["headers"] if pair[0] != ACCEPTED_HEADER]
    facts = {
        "key": scope[KEY_NAME],
        "address": (scope.get("client") or ("",))[0],
        "host": dict(headers).get(b"host", b"").decode("latin-1"),
    }
    return {**scope, "headers": [*headers, (ACCEPTED_HEADER, orjson.dumps(facts))]}


def open_shared(host: str, port: int) -> socket.socket:
    """A socket at an address that other processes of this user may listen at too."""
    shared = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # asyncio does so only for sockets that it made itself; without it an answer takes 40 ms.
        shared.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        shared.bind((host, port))
    except OSError:
        shared.close()
        raise
    return shared


LONGEST_LINE = 2**24
"""Bytes of a line: of all deployments, about 200 each."""


class Channel:
    """Lines of JSON to and from the platform's own process."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    async def open(self) -> None:
        """Begin to listen, on the running loop."""
        self._reader, self._writer = await asyncio.open_connection(
            sock=self._socket, limit=LONGEST_LINE
        )

    async def hear(self) -> Any:
        """The next line.

        Raises:
            EOFError: the other end is closed.
        """
        try:
            line = await self._reader.readline()
        except ConnectionError:
            line = b""
        if not line.endswith(b"\n"):
            raise EOFError
        return orjson.loads(line)

    def say(self, content: Mapping[str, Any]) -> None:
        """Send a line; nothing where the other end is closed."""
        self._writer.write(orjson.dumps(content, option=orjson.OPT_APPEND_NEWLINE))

    def close(self) -> None:
        """Close this end."""
        self._writer.close()


class _Server(HttpServer):
    """Serves while its channel is open; each line of it says where deployments answer."""

    def __init__(
        self, app: App, gateway: ForwardingGateway, channel: Channel, **options: Any
    ) -> None:
        super().__init__(app, **options)
        self._gateway = gateway
        self._channel = channel
        self._reading: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to answer once it is known where deployments answer, and say so."""
        await self._channel.open()
        await self._hear()
        await super().startup(sockets)
        self._reading = asyncio.create_task(self._hear_all())
        self._say_alive()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer the requests that wait, then end."""
        self._gateway.end()
        await super().shutdown(sockets)

    async def _hear_all(self) -> None:
        with contextlib.suppress(EOFError):
            while True:
                await self._hear()
                self._say_alive()
        self.should_exit = True

    def _say_alive(self) -> None:
        self._channel.say({"alive": True})

    async def _hear(self) -> None:
        heard = await self._channel.hear()
        self._gateway.set_endpoints({id: Endpoint(**facts) for id, facts in heard.items()})


def main() -> None:
    """Serve as standard input says, until the channel is closed or SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data_dir", help="of the platform, so that lists of processes show it")
    parser.add_argument("--channel", type=int, required=True, help="descriptor of a socket")
    given = parser.parse_args()
    options = orjson.loads(sys.stdin.buffer.read())
    setup_logging()
    channel = Channel(socket.socket(fileno=given.channel))
    gateway = ForwardingGateway(
        Access(**options["access"]),
        Endpoint(socket=options["platform"]),
        lambda id: channel.say({"completed": id}),
    )
    app: App = gateway
    with contextlib.ExitStack() as stack:
        if options["traces"]:
            app, end_traces = trace_requests(gateway)
            stack.callback(end_traces)
        listener = stack.enter_context(open_shared(options["host"], options["port"]))
        listener.listen(2048)
        _Server(
            app,
            gateway,
            channel,
            drain_s=DRAIN_S,
            http=make_protocol(raise_descriptor_limit()),
            log_level="warning",
            timeout_keep_alive=75,
        ).run(sockets=[listener])


if __name__ == "__main__":
    main()
