"""Keeps the gateway processes of a served platform running, and tells them what they must know.

    clients ──> gateway processes ──completions──> deployments
                      │ the rest
                      ▼
            the platform's own process: control plane, trainers' requests, Tinker's API

A gateway process that dies is started again, and one that hangs is killed; clients send what it was
answering once more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from dataclasses import asdict
from pathlib import Path
from urllib.parse import parse_qs

import orjson
from prometheus_client.multiprocess import mark_process_dead
from starlette.responses import Response

from hearth.control.access import Access
from hearth.control.deployments import Deployments
from hearth.control.gateway import Gateway
from hearth.errors import EngineError, HearthError
from hearth.local.gateway_process import ACCEPTED_HEADER, DRAIN_S, Channel
from hearth.settings import Settings
from hearth.wire.asgi import Receive, Scope, Send
from hearth.wire.http import error_response

logger = logging.getLogger(__name__)

METRICS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""Where the numbers of several processes are added up."""
_LEAST_LIFE_S = 1.0
"""Processes are started again so often at most."""
_END_S = DRAIN_S + 3.0
_ASK_EVERY_S = 1.0
_MOST_UNANSWERED = 10
"""A process that has left so many messages unanswered, one after the other, hangs."""


class PlatformRequests:
    """The app that gateway processes ask: the platform, for requests that they have accepted."""

    def __init__(self, gateway: Gateway, deployments: Deployments) -> None:
        self._gateway = gateway
        self._deployments = deployments

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._gateway(scope, receive, send)
            return
        accepted = [value for name, value in scope["headers"] if name == ACCEPTED_HEADER]
        if not accepted:
            await self._explain_end(scope, receive, send)
            return
        facts = orjson.loads(accepted[0])
        headers = [pair for pair in scope["headers"] if pair[0] not in (ACCEPTED_HEADER, b"host")]
        headers.append((b"host", facts["host"].encode("latin-1")))
        asked = {**scope, "headers": headers, "client": (facts["address"], 0)}
        await self._gateway.answer(asked, receive, send, facts["key"])

    async def _explain_end(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with the error that says how a worker has ended; 204 if it has not."""
        asked = {name: values[0] for name, values in parse_qs(scope["query_string"]).items()}
        id, address = asked[b"id"].decode(), asked[b"address"].decode()
        response = Response(status_code=204)
        endpoint = self._deployments.live.endpoint(id)
        try:
            if endpoint is None:
                self._deployments.find_endpoint(id)
            elif address in (endpoint.socket, endpoint.url):
                await self._gateway.explain_end(self._deployments, id, endpoint)
        except HearthError as error:
            response = error_response(error)
        await response(scope, receive, send)


def listen_at(path: Path) -> socket.socket:
    """A Unix socket at ``path`` that listens."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(2048)
    return listener


class Gateways:
    """So many gateway processes. All methods are for the platform's event loop."""

    def __init__(
        self,
        settings: Settings,
        port: int,
        access: Access,
        gateway: Gateway,
        deployments: Deployments,
        folder: Path,
    ) -> None:
        self.app = PlatformRequests(gateway, deployments)
        """What the platform's own process answers at ``socket``."""
        self.socket = folder / "platform"
        self._count = settings.gateways
        self._deployments = deployments
        self._data_dir = settings.data_dir
        self._folder = folder
        self._options = orjson.dumps(
            {
                "access": asdict(access),
                "platform": str(self.socket),
                "host": settings.host,
                "port": port,
                "traces": settings.traces,
            }
        )
        self._channels: set[Channel] = set()
        self._processes: set[asyncio.subprocess.Process] = set()
        self._keeping: list[asyncio.Task[None]] = []
        self._is_ending = False
        gateway.metrics.folder = folder

    async def start(self) -> None:
        """Start all of them; they answer.

        Raises:
            EngineError: one of them could not start.
        """
        loop = asyncio.get_running_loop()
        self._deployments.live.on_change = lambda: loop.call_soon_threadsafe(self._tell_all)
        answering = [loop.create_future() for _ in range(self._count)]
        self._keeping = [asyncio.create_task(self._keep(one)) for one in answering]
        await asyncio.gather(*answering)

    async def end(self) -> None:
        """End all of them, once they have answered what they can."""
        self._is_ending = True
        self._deployments.live.on_change = lambda: None
        self._signal_all(signal.SIGTERM)
        _, late = await asyncio.wait(self._keeping, timeout=_END_S)
        if late:
            self._signal_all(signal.SIGKILL)
            await asyncio.wait(late)

    def _signal_all(self, number: signal.Signals) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)

    async def _keep(self, answers: asyncio.Future[None]) -> None:
        """Run a process, and another one when it ends."""
        while not self._is_ending:
            begun_s = time.monotonic()
            try:
                code: int | str = await self._run(answers)
            except OSError as error:  # of the system, which may have no room for a process just now
                code = str(error)
            if self._is_ending:
                return
            if not answers.done():
                answers.set_exception(
                    EngineError(f"a gateway process must start, got its end with code {code}")
                )
                return
            logger.warning("a gateway process has ended with code %s; it is started again", code)
            await asyncio.sleep(_LEAST_LIFE_S - (time.monotonic() - begun_s))

    async def _run(self, answers: asyncio.Future[None]) -> int:
        """Run one process to its end; returns its exit code."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "hearth.local.gateway_process", str(self._data_dir)),
                *("--channel", str(theirs.fileno())),
                stdin=asyncio.subprocess.PIPE,
                env={**os.environ, METRICS_VARIABLE: str(self._folder)},
                pass_fds=[theirs.fileno()],
                # Ctrl-C is the platform's, which ends them.
                start_new_session=True,
            )
        channel = Channel(ours)
        await channel.open()
        self._processes.add(process)
        try:
            self._tell(channel)
            assert process.stdin is not None, "it was asked for"
            process.stdin.write(self._options)
            process.stdin.close()
            if self._is_ending:
                process.terminate()
            self._channels.add(channel)
            if not await self._hear_all(channel, answers):
                silent_s = _MOST_UNANSWERED * _ASK_EVERY_S
                logger.warning(
                    "a gateway process did not answer for %.0f s; it is killed", silent_s
                )
                process.kill()
            return await process.wait()
        finally:
            self._channels.discard(channel)
            self._processes.discard(process)
            channel.close()
            mark_process_dead(process.pid, str(self._folder))

    async def _hear_all(self, channel: Channel, answers: asyncio.Future[None]) -> bool:
        """Take what a process says until it ends; False where it hangs instead."""
        has_started, unanswered = False, 0
        with contextlib.suppress(EOFError):
            while unanswered < _MOST_UNANSWERED:
                try:
                    async with asyncio.timeout(_ASK_EVERY_S):
                        heard = await channel.hear()
                except TimeoutError:
                    # Counted by messages: this process may have been stopped itself.
                    self._tell(channel)
                    unanswered += has_started
                    continue
                has_started, unanswered = True, 0
                if "completed" in heard:
                    self._deployments.note_completion(heard["completed"])
                elif not answers.done():
                    answers.set_result(None)
            return False
        return True

    def _tell_all(self) -> None:
        for channel in self._channels:
            self._tell(channel)

    def _tell(self, channel: Channel) -> None:
        """Say where deployments answer, but for those in the platform's own process."""
        live = self._deployments.live
        endpoints = {id: live.endpoint(id) for id in live.ids()}
        channel.say(
            {
                id: {"socket": endpoint.socket, "url": endpoint.url, "token": endpoint.token}
                for id, endpoint in endpoints.items()
                if endpoint is not None and endpoint.app is None
            }
        )
