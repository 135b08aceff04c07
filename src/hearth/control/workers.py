"""The workers that run now, by the resource they belong to: what the gateway asks per request."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import httpx

from hearth.launch.spec import Endpoint, Worker
from hearth.wire.asgi import TOKEN_HEADER

logger = logging.getLogger(__name__)

_ASK_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Live:
    """One resource in memory: its state, and its worker while it has one."""

    state: str
    message: str = ""
    worker: Worker | None = None
    is_ready: bool = False
    is_starting: bool = False
    """A worker is being asked for; what a launcher says of it meanwhile is news of it."""

    @property
    def endpoint(self) -> Endpoint | None:
        """Where requests go; None while nothing answers."""
        return self.worker.endpoint if self.worker is not None and self.is_ready else None


class LiveTable:
    """The live side of the rows of one kind. Safe to use from several threads."""

    def __init__(self) -> None:
        self._live: dict[str, Live] = {}
        self._turns: dict[str, threading.RLock] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def turn(self, id: str) -> Generator[None]:
        """Requests that start or end the worker of one resource, one after the other."""
        with self._lock:
            turn = self._turns.setdefault(id, threading.RLock())
        with turn:
            yield

    def get(self, id: str) -> Live | None:
        """The entry of a resource."""
        return self._live.get(id)

    def endpoints(self) -> list[Endpoint]:
        """Where any of them answers now."""
        with self._lock:
            found = [live.endpoint for live in self._live.values()]
        return [one for one in found if one is not None]

    def put(self, id: str, live: Live) -> None:
        """Replace the entry of a resource."""
        with self._lock:
            self._live[id] = live

    def begun(self, id: str, worker: Worker) -> bool:
        """The worker that was asked for is this one; False when news of it came before."""
        with self._lock:
            live = self._live.get(id)
            if live is None or not live.is_starting:
                return False
            self._live[id] = Live(live.state, worker=worker)
            return True

    def take_worker(self, id: str, live: Live) -> Worker | None:
        """Replace the entry and give back the worker that it had, to be stopped."""
        with self._lock:
            before, self._live[id] = self._live.get(id), live
        return before.worker if before is not None else None

    def forget(self, id: str) -> None:
        """Drop an entry."""
        with self._lock:
            self._live.pop(id, None)

    def belongs(self, id: str, worker: Worker) -> bool:
        """Whether news of ``worker`` is about the resource's present worker."""
        live = self._live.get(id)
        return live is not None and (live.worker is worker or live.is_starting)


def ask(endpoint: Endpoint, path: str) -> Any:
    """A worker's JSON answer to a GET; None where there is none. Not to be called on a loop."""
    try:
        if endpoint.app is not None:
            return asyncio.run(_ask_app(endpoint, path))
        if endpoint.socket is None and endpoint.url is None:
            return None
        # A transport of its own: what the environment says of proxies is not about workers.
        transport = httpx.HTTPTransport(uds=endpoint.socket)
        headers = [(TOKEN_HEADER, (endpoint.token or "").encode())]
        with httpx.Client(transport=transport, timeout=_ASK_TIMEOUT_S) as client:
            url = f"{endpoint.url or 'http://worker'}{path}"
            return client.get(url, headers=headers).raise_for_status().json()
    except (httpx.HTTPError, ValueError) as error:
        logger.debug("a worker did not answer %s: %s", path, error)
        return None


async def _ask_app(endpoint: Endpoint, path: str) -> Any:
    assert endpoint.app is not None, "the caller has looked"
    transport = httpx.ASGITransport(endpoint.app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, timeout=_ASK_TIMEOUT_S) as client:
        return (await client.get(f"http://worker{path}")).raise_for_status().json()
