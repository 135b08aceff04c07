"""The one event loop on which the SDK does its I/O, on a thread of its own.

Callers may be plain threads or coroutines on any loop, short-lived ones included: they only hold
``APIFuture``s. So clients, connections and semaphores never meet a second loop.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


def background_loop() -> asyncio.AbstractEventLoop:
    """The SDK's loop; started on first use, ends with the process."""
    global _loop
    with _lock:
        if _loop is None or _loop.is_closed():
            loop = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="hearth-sdk", daemon=True).start()
            _loop = loop
        return _loop


class APIFuture(Generic[T]):
    """A result on its way. ``.result()`` blocks for it; ``await`` does not."""

    def __init__(self, inner: concurrent.futures.Future[T]) -> None:
        self._inner = inner

    def result(self, timeout: float | None = None) -> T:
        """The value, or the operation's error.

        Raises:
            TimeoutError: no result within ``timeout`` seconds; the operation goes on.
        """
        if threading.current_thread().name == "hearth-sdk":
            raise RuntimeError(
                "result() must be called outside the SDK's own loop: await the future there"
            )
        return self._inner.result(timeout)

    async def result_async(self, timeout: float | None = None) -> T:
        """``result`` for coroutines."""
        return await asyncio.wait_for(asyncio.wrap_future(self._inner), timeout)

    def done(self) -> bool:
        """Whether ``result`` would return at once."""
        return self._inner.done()

    def cancel(self) -> bool:
        """Cancel the operation."""
        return self._inner.cancel()

    def __await__(self) -> Generator[Any, None, T]:
        return asyncio.wrap_future(self._inner).__await__()


def start(work: Coroutine[Any, Any, T]) -> APIFuture[T]:
    """Run ``work`` on the SDK's loop."""
    return APIFuture(asyncio.run_coroutine_threadsafe(work, background_loop()))
