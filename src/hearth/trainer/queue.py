"""The order of operations: one worker thread, ``seq_id`` order per model, each number once."""

from __future__ import annotations

import logging
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from hearth.errors import ClosedError, HearthError, NotFoundError, RequestError
from hearth.trainer.futures import FutureStore
from hearth.wire.base import Record
from hearth.wire.faults import failed_future

logger = logging.getLogger(__name__)

KeyT = TypeVar("KeyT")
Work = Callable[[], Record]

_REMEMBERED = 4096
_CLOSE_TIMEOUT_S = 60.0


@dataclass
class _Stream:
    """Operations of one model. ``held`` wait for lower numbers; ``seen`` were accepted."""

    next_seq: int = 1
    held: dict[int, tuple[str, Work]] = field(default_factory=lambda: {})
    seen: OrderedDict[int, str] = field(default_factory=lambda: OrderedDict())


class OperationQueue:
    """Runs operations one after the other on its own thread and resolves their futures.

    Work that raises fails its own future and uses up its number; the next ones go on.
    """

    def __init__(self, futures: FutureStore, *, name: str) -> None:
        self._futures = futures
        self._streams: dict[str, _Stream] = {}
        self._keys: OrderedDict[str, str] = OrderedDict()
        self._ready: queue.SimpleQueue[tuple[str, Work] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._worker = threading.Thread(target=self._run, name=f"trainer {name}", daemon=True)
        self._worker.start()

    def submit(self, work: Work, *, key: str | None = None) -> str:
        """Queue work that has no number; returns its request id.

        A ``key`` that came before gives its first request id and runs nothing.

        Raises:
            ClosedError: the queue was closed.
        """
        with self._lock:
            self._refuse_when_closed()
            if key is not None and key in self._keys:
                return self._keys[key]
            request_id = self._futures.create()
            if key is not None:
                _remember(self._keys, key, request_id)
            self._ready.put((request_id, work))
        return request_id

    def open(self, model_id: str) -> None:
        """Take operations of a new model, from number 1."""
        with self._lock:
            self._streams[model_id] = _Stream()

    def submit_numbered(self, model_id: str, seq_id: int, work: Work) -> str:
        """Queue a model's operation number ``seq_id``; it runs once all lower ones have come.

        A number that came before gives its first request id and runs nothing. For a model that
        is not open the future fails at once.

        Raises:
            ClosedError: the queue was closed.
            RequestError: the number is below 1, or so old that its request is forgotten.
        """
        with self._lock:
            self._refuse_when_closed()
            stream = self._streams.get(model_id)
            if stream is not None and seq_id in stream.seen:
                return stream.seen[seq_id]
            if seq_id < (1 if stream is None else stream.next_seq):
                raise RequestError(f"seq_id must be a new number >= 1, got {seq_id}")
            request_id = self._futures.create()
            if stream is not None:
                _remember(stream.seen, seq_id, request_id)
                stream.held[seq_id] = (request_id, work)
                while stream.next_seq in stream.held:
                    self._ready.put(stream.held.pop(stream.next_seq))
                    stream.next_seq += 1
        if stream is None:
            self._fail(request_id, NotFoundError(f"model_id must exist, got {model_id!r}"))
        return request_id

    def drop(self, model_id: str) -> None:
        """Close a model's stream: what it still holds fails, its numbers are forgotten."""
        with self._lock:
            stream = self._streams.pop(model_id, _Stream())
        for request_id, _ in stream.held.values():
            self._fail(request_id, ClosedError(f"model {model_id!r} was unloaded"))

    def close(self) -> None:
        """Wait for the running operation, fail the waiting ones, refuse new ones."""
        with self._lock:
            self._closed = True
            models = list(self._streams)
        for model_id in models:
            self.drop(model_id)
        self._ready.put(None)
        self._worker.join(_CLOSE_TIMEOUT_S)
        if self._worker.is_alive():
            logger.warning("%s: an operation still runs after close", self._worker.name)

    def _refuse_when_closed(self) -> None:
        if self._closed:
            raise ClosedError("the trainer must be running, got a request after it was closed")

    def _run(self) -> None:
        while (item := self._ready.get()) is not None:
            request_id, work = item
            if self._closed:
                self._fail(request_id, ClosedError("the trainer was closed before this operation"))
                continue
            try:
                self._futures.resolve(request_id, work().dump())
            except Exception as error:  # the boundary: a failure belongs to its own future
                if not isinstance(error, HearthError):
                    logger.exception("trainer operation %s failed", request_id)
                self._fail(request_id, error)

    def _fail(self, request_id: str, error: Exception) -> None:
        self._futures.resolve(request_id, failed_future(error).dump())


def _remember(known: OrderedDict[KeyT, str], key: KeyT, request_id: str) -> None:
    known[key] = request_id
    if len(known) > _REMEMBERED:
        known.popitem(last=False)
