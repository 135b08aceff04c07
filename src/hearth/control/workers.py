"""The workers that run now, by their resource; the gateway reads them for each request."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any

import httpx

from hearth.launch.spec import Endpoint, Worker
from hearth.wire.asgi import TOKEN_HEADER

logger = logging.getLogger(__name__)

_FETCH_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class LiveEntry:
    """The worker of one resource, or its start."""

    worker: Worker | None = None
    is_ready: bool = False
    is_starting: bool = False
    """The launcher is starting a worker; what it reports meanwhile is about that one."""
    is_second: bool = False
    """The first was killed before it was used."""
    is_used: bool = False
    """Something was asked of it beside its health, and may be lost with it."""

    @property
    def endpoint(self) -> Endpoint | None:
        """Where requests go; None while nothing answers."""
        return self.worker.endpoint if self.worker is not None and self.is_ready else None


class LiveTable:
    """The live side of the records of one kind. Safe to use from several threads."""

    def __init__(self) -> None:
        self._live: dict[str, LiveEntry] = {}
        self._turns: dict[str, threading.RLock] = {}
        self._lock = threading.Lock()
        self.on_change: Callable[[], object] = lambda: None
        """Called on any thread when a worker may answer, or none does any more."""

    @contextlib.contextmanager
    def hold(self, id: str) -> Generator[None]:
        """Lock one resource: its worker is started or stopped by one request at a time."""
        with self._lock:
            turn = self._turns.setdefault(id, threading.RLock())
        with turn:
            yield

    def get(self, id: str) -> LiveEntry | None:
        """The entry of a resource; None where no worker runs or starts."""
        return self._live.get(id)

    def endpoint(self, id: str) -> Endpoint | None:
        """Where the worker of a resource answers; None while nothing does."""
        live = self._live.get(id)
        return live.endpoint if live is not None else None

    def ids(self) -> list[str]:
        """The resources whose worker runs or starts."""
        with self._lock:
            return list(self._live)

    def endpoints(self) -> list[Endpoint]:
        """Where any of them answers now."""
        with self._lock:
            endpoints = [live.endpoint for live in self._live.values()]
        return [endpoint for endpoint in endpoints if endpoint is not None]

    def put(self, id: str, live: LiveEntry) -> None:
        """Replace the entry of a resource."""
        with self._lock:
            self._live[id] = live
        self.on_change()

    def set_worker(self, id: str, worker: Worker) -> bool:
        """Set the started worker; False when the launcher has reported on it before."""
        with self._lock:
            live = self._live.get(id)
            if live is None or not live.is_starting:
                return False
            self._live[id] = replace(live, worker=worker, is_starting=False)
            return True

    def set_ready(self, id: str, worker: Worker) -> None:
        """The worker answers."""
        with self._lock:
            before = self._live.get(id, LiveEntry())
            self._live[id] = replace(before, worker=worker, is_ready=True, is_starting=False)
        self.on_change()

    def note_use(self, id: str) -> None:
        """Something is asked of the worker."""
        seen = self._live.get(id)
        if seen is None or seen.is_used:
            return
        with self._lock:
            # Read again: what was seen may have been replaced or taken away meanwhile.
            if (live := self._live.get(id)) is not None:
                self._live[id] = replace(live, is_used=True)

    def take_worker(self, id: str) -> Worker | None:
        """Drop an entry and return the worker that it had, to be stopped."""
        with self._lock:
            before = self._live.pop(id, None)
        self.on_change()
        return before.worker if before is not None else None

    def is_current(self, id: str, worker: Worker) -> bool:
        """Whether ``worker`` is the resource's present worker."""
        live = self._live.get(id)
        return live is not None and (live.worker is worker or live.is_starting)


def fetch_json(endpoint: Endpoint, path: str, timeout_s: float = _FETCH_TIMEOUT_S) -> Any:
    """A worker's JSON answer to a GET; None where there is none. Not to be called on a loop."""
    try:
        if endpoint.app is not None:
            return asyncio.run(_fetch_from_app(endpoint, path, timeout_s))
        if endpoint.socket is None and endpoint.url is None:
            return None
        # A transport of its own: what the environment says of proxies is not about workers.
        transport = httpx.HTTPTransport(uds=endpoint.socket)
        headers = [(TOKEN_HEADER, (endpoint.token or "").encode())]
        with httpx.Client(transport=transport, timeout=timeout_s) as client:
            url = f"{endpoint.url or 'http://worker'}{path}"
            return client.get(url, headers=headers).raise_for_status().json()
    except (httpx.HTTPError, ValueError) as error:
        logger.debug("a worker did not answer %s: %s", path, error)
        return None


async def _fetch_from_app(endpoint: Endpoint, path: str, timeout_s: float) -> Any:
    assert endpoint.app is not None, "the caller checks it"
    transport = httpx.ASGITransport(endpoint.app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, timeout=timeout_s) as client:
        return (await client.get(f"http://worker{path}")).raise_for_status().json()
