"""Results by request id. Any event loop can wait for them; they stay a while after delivery.

A result is the bytes of a response, also of a failure; the trainer's thread makes them.
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections import OrderedDict
from concurrent.futures import Future

from hearth.errors import NotFoundError

MAX_DELIVERED_BYTES = 8 * 2**20
"""Three times the longest response to our client, that for half a million tokens."""
MAX_RESULTS = 4096


class FutureStore:
    """Hands out request ids and keeps their results. Safe to use from several threads.

    A delivered result stays until newer ones fill ``delivered_bytes``, since clients request lost
    responses again. Of delivered results, and of undelivered ones, at most ``results`` stay.
    """

    def __init__(
        self, *, delivered_bytes: int = MAX_DELIVERED_BYTES, results: int = MAX_RESULTS
    ) -> None:
        self._max_bytes = delivered_bytes
        self._max_results = results
        self._futures: dict[str, Future[bytes]] = {}
        self._waiting: OrderedDict[str, None] = OrderedDict()
        self._delivered: OrderedDict[str, int] = OrderedDict()
        self._delivered_bytes = 0
        self._lock = threading.Lock()

    def create(self) -> str:
        """A new request id without a result."""
        request_id = uuid.uuid4().hex
        with self._lock:
            self._futures[request_id] = Future()
        return request_id

    def resolve(self, request_id: str, body: bytes) -> None:
        """Set the result of a request and wake its waiters; a second result is ignored."""
        with self._lock:
            future = self._futures.get(request_id)
            if future is None or future.done():
                return
            self._waiting[request_id] = None
            if len(self._waiting) > self._max_results:
                oldest, _ = self._waiting.popitem(last=False)
                del self._futures[oldest]
        future.set_result(body)

    async def wait(self, request_id: str, timeout_s: float) -> bytes | None:
        """The result, or None after ``timeout_s``.

        Raises:
            NotFoundError: the id is unknown, or its result was dropped.
        """
        with self._lock:
            future = self._futures.get(request_id)
        if future is None:
            raise NotFoundError(
                f"request_id must name a pending or recent request, got {request_id!r}"
            )
        # The trainer's thread sets the future; this binds it to the caller's loop.
        done, _ = await asyncio.wait([asyncio.wrap_future(future)], timeout=timeout_s)
        if not done:
            return None
        body = future.result()
        self._mark_delivered(request_id, len(body))
        return body

    def _mark_delivered(self, request_id: str, size: int) -> None:
        with self._lock:
            self._waiting.pop(request_id, None)
            self._delivered_bytes += size - self._delivered.pop(request_id, 0)
            self._delivered[request_id] = size
            while len(self._delivered) > 1 and (
                self._delivered_bytes > self._max_bytes or len(self._delivered) > self._max_results
            ):
                oldest, freed = self._delivered.popitem(last=False)
                self._delivered_bytes -= freed
                self._futures.pop(oldest, None)
