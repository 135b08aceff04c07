"""Which adapters are in memory: loaded on first use, kept while a request uses them.

A load runs on a thread of its own. Where there is no room, it waits until an adapter is free, and
the one that was used least recently makes place.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from hearth.inference.backend import AdapterSource
from hearth.inference.engine.adapters import Adapter
from hearth.inference.sync_tracker import closed_error, resolve_future
from hearth.sync.store import Snapshot

logger = logging.getLogger(__name__)


class AdapterPool:
    """At most ``most`` adapters. Every method may be called from any thread.

    ``read`` makes an adapter of a snapshot.
    """

    def __init__(self, most: int, read: Callable[[Snapshot], Adapter]) -> None:
        self._most = most
        self._read = read
        self._lock = threading.RLock()
        self._loaded: OrderedDict[str, _Entry] = OrderedDict()
        """Loaded or being loaded, the least recently used first."""
        self._waiting: OrderedDict[str, _Entry] = OrderedDict()
        """For room."""
        self._is_closed = False
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="hearth-adapters")

    def acquire(self, source: AdapterSource) -> Future[Adapter]:
        """The adapter as soon as it is loaded; ``release`` it afterwards, even after an error.

        An adapter that could not be loaded is tried again with the next request for it. The
        future's error is that of ``source.fetch`` or of ``read``.
        """
        with self._lock:
            identity = source.identity
            entry = self._loaded.get(identity) or self._waiting.get(identity)
            if entry is None:
                entry = self._waiting[identity] = _Entry(source)
            if identity in self._loaded:
                self._loaded.move_to_end(identity)
            entry.users += 1
            if self._is_closed:
                resolve_future(entry.adapter, error=closed_error())
            self._start_loads()
            return entry.adapter

    def release(self, identity: str, adapter: Future[Adapter]) -> None:
        """Give back what ``acquire`` returned."""
        with self._lock:
            for entries in (self._loaded, self._waiting):
                entry = entries.get(identity)
                if entry is None or entry.adapter is not adapter:
                    continue
                entry.users -= 1
                if entry.users == 0 and entries is self._waiting:
                    del entries[identity]
            self._start_loads()

    def names(self) -> list[str]:
        """The identities of those that are loaded, the least recently used first."""
        with self._lock:
            return [name for name, entry in self._loaded.items() if entry.adapter.done()]

    def close(self) -> None:
        """Load nothing more; what waits fails with ``ClosedError``."""
        with self._lock:
            self._is_closed = True
            entries = [*self._waiting.values(), *self._loaded.values()]
        self._executor.shutdown(wait=False, cancel_futures=True)
        for entry in entries:
            resolve_future(entry.adapter, error=closed_error())

    def _start_loads(self) -> None:
        """Begin the loads for which there is room; the caller holds the lock."""
        while self._waiting and not self._is_closed:
            if len(self._loaded) >= self._most:
                idle = (name for name, entry in self._loaded.items() if entry.users == 0)
                name = next(idle, None)
                if name is None:
                    return
                del self._loaded[name]
            identity, entry = self._waiting.popitem(last=False)
            self._loaded[identity] = entry
            self._executor.submit(self._load, identity, entry)

    def _drop(self, identity: str, entry: _Entry) -> None:
        if self._loaded.get(identity) is entry:
            del self._loaded[identity]
        self._start_loads()

    def _load(self, identity: str, entry: _Entry) -> None:
        with self._lock:
            if entry.users == 0:
                # Nobody waits for it any more.
                self._drop(identity, entry)
                return
        try:
            adapter = self._read(replace(entry.source.fetch(), identity=identity))
        except Exception as error:  # noqa: BLE001 - the requests that named it get it
            logger.warning("adapter %s could not be loaded: %s", identity, error)
            with self._lock:
                self._drop(identity, entry)
            resolve_future(entry.adapter, error=error)
            return
        resolve_future(entry.adapter, result=adapter)


@dataclass(eq=False)
class _Entry:
    source: AdapterSource
    adapter: Future[Adapter] = field(default_factory=lambda: Future())
    users: int = 0
    """Requests that use it or wait for it."""
