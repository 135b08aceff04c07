"""Threads for blocking calls: one that hangs keeps neither a loop nor the process from its end."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_Call = tuple[Future[Any], Callable[[], Any]]


class DaemonThreads(ThreadPoolExecutor):
    """As many threads as asyncio's own pool would have, started as they are needed.

    ``asyncio.run`` and the process wait at their end for every thread of a ``ThreadPoolExecutor``,
    so one call that never returns would keep a run that has long ended with an error. They do not
    wait for these. It is a subclass since an event loop takes no other default executor.
    """

    def __init__(self, name: str) -> None:
        self._limit = min(32, (os.cpu_count() or 1) + 4)
        super().__init__(self._limit)
        self._name = name
        self._calls = SimpleQueue[_Call | None]()
        self._idle = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._num_threads = 0

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """The future of ``fn(*args, **kwargs)`` in one of the threads."""
        future: Future[T] = Future()
        self._calls.put((future, partial(fn, *args, **kwargs)))
        with self._lock:
            if not self._idle.acquire(blocking=False) and self._num_threads < self._limit:
                name = f"{self._name}_{self._num_threads}"
                self._num_threads += 1
                threading.Thread(target=self._work, name=name, daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Have the threads end after what was submitted; nothing is waited for or cancelled."""
        with self._lock:
            for _ in range(self._num_threads):
                self._calls.put(None)

    def _work(self) -> None:
        while (call := self._next()) is not None:
            future, run = call
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(run())
            except BaseException as error:  # noqa: BLE001 - whatever it is, the caller's await has it
                future.set_exception(error)

    def _next(self) -> _Call | None:
        try:
            return self._calls.get_nowait()
        except Empty:
            self._idle.release()
            return self._calls.get()
