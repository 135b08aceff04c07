"""The workers that run now, by the resource they belong to: what the gateway asks per request."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from hearth.launch.spec import Endpoint, Worker


@dataclass(frozen=True)
class Live:
    """One resource in memory: its state, and its worker while it has one."""

    state: str
    message: str = ""
    worker: Worker | None = None
    is_ready: bool = False
    is_starting: bool = False
    """A worker was asked for, and its first news may come before it is known."""

    @property
    def endpoint(self) -> Endpoint | None:
        """Where requests go; None while nothing answers."""
        return self.worker.endpoint if self.worker is not None and self.is_ready else None


class LiveTable:
    """The live side of the rows of one kind. Safe to use from several threads."""

    def __init__(self) -> None:
        self._live: dict[str, Live] = {}
        self._lock = threading.Lock()

    def get(self, id: str) -> Live | None:
        """The entry of a resource."""
        return self._live.get(id)

    def put(self, id: str, live: Live) -> None:
        """Replace the entry of a resource."""
        with self._lock:
            self._live[id] = live

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

    def ids(self) -> list[str]:
        """Resources that have an entry."""
        return sorted(self._live)
