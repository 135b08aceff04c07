"""The order of operations: one worker thread, ``seq_id`` order per model, each number once.

An operation's name is announced when it begins: processes that share the device read it.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hearth.errors import ClosedError, HearthError, RequestError
from hearth.trainer.futures import FutureStore
from hearth.trainer.residents import unknown_model
from hearth.wire.base import Record
from hearth.wire.http import describe_failure
from hearth.wire.room import Room

logger = logging.getLogger(__name__)

KeyT = TypeVar("KeyT")
Work = Callable[[], Record]

_REMEMBERED = 4096
MOST_HELD = 256
"""Operations of one model that wait for lower numbers; clients send them in order."""
_ROOM_BYTES = 2**31
"""Of operations that wait, of all models; one model alone has half."""
_CLOSE_TIMEOUT_S = 60.0

IDLE = "idle"
"""Announced when an operation ends."""


@dataclass(frozen=True)
class _Item:
    """One operation."""

    request_id: str
    work: Work
    phase: str
    stream: _Stream | None = None
    size: int = 0
    """Bytes that it takes in the queue."""


@dataclass
class _Stream:
    """Operations of one model: ``held`` ones wait for lower numbers; ``seen`` are accepted ids."""

    model_id: str
    next_seq: int = 1
    ready: int = 0
    """Operations that wait for no number, the running one included."""
    held: dict[int, _Item] = field(default_factory=lambda: {})
    seen: OrderedDict[int, str] = field(default_factory=lambda: OrderedDict())


class OperationQueue:
    """Runs operations one after the other on its own thread and resolves their futures.

    Work that raises fails its own future and uses up its number; the next ones go on.
    ``on_phase`` is called on that thread with an operation's name (its ``phase``) when it begins
    and with ``idle`` when it has ended, before its future is resolved. ``room`` bounds the bytes of
    what waits.
    """

    def __init__(
        self,
        futures: FutureStore,
        *,
        name: str,
        on_phase: Callable[[str], None] | None = None,
        room: Room | None = None,
    ) -> None:
        self._futures = futures
        self._room = room or Room(_ROOM_BYTES, "bytes of operations")
        self._on_phase = on_phase
        self._streams: dict[str, _Stream] = {}
        self._keys: OrderedDict[str, str] = OrderedDict()
        self._ready: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._finished = Counter[str]()
        """Operations that have ended, by their phase."""
        self._closed = False
        self._worker = threading.Thread(target=self._run, name=f"trainer {name}", daemon=True)
        self._worker.start()

    def submit(self, work: Work, *, key: str | None = None, phase: str = "operation") -> str:
        """Queue work that has no number; returns its request id.

        A repeated ``key`` returns its first request id and runs nothing.

        Raises:
            ClosedError: the queue was closed.
        """
        with self._lock:
            self._check_open()
            if key is not None and key in self._keys:
                return self._keys[key]
            request_id = self._futures.create()
            if key is not None:
                _remember(self._keys, key, request_id)
            self._ready.put(_Item(request_id, work, phase))
        return request_id

    def open(self, model_id: str) -> None:
        """Accept operations of a new model, from number 1."""
        with self._lock:
            self._streams[model_id] = _Stream(model_id)

    def submit_numbered(
        self, model_id: str, seq_id: int, work: Work, *, phase: str = "operation", size: int = 0
    ) -> str:
        """Queue a model's operation number ``seq_id``; it runs once all lower numbers have arrived.

        A repeated number returns its first request id and runs nothing.

        Raises:
            ClosedError: the queue was closed.
            NotFoundError: the model is not open.
            RequestError: the number is below 1, or so old that its request id is dropped; or too
                many operations wait for a lower one.
            BusyError: what waits of the model takes too many bytes with these ``size`` more.
        """
        with self._lock:
            self._check_open()
            stream = self._find_stream(model_id)
            if seq_id in stream.seen:
                return stream.seen[seq_id]
            if seq_id < stream.next_seq:
                raise RequestError(f"seq_id must be a new number >= 1, got {seq_id}")
            if seq_id != stream.next_seq and len(stream.held) >= MOST_HELD:
                raise RequestError(
                    f"seq_id must be {stream.next_seq}, got {seq_id}: {MOST_HELD} operations wait "
                    "for that one already; send it first"
                )
            if seq_id == stream.next_seq and not stream.ready:
                size = 0  # what is held waits for this one, so it needs no room
            if size:
                self._room.take(model_id, size)
            request_id = self._futures.create()
            _remember(stream.seen, seq_id, request_id)
            stream.held[seq_id] = _Item(request_id, work, phase, stream, size)
            while stream.next_seq in stream.held:
                self._ready.put(stream.held.pop(stream.next_seq))
                stream.next_seq += 1
                stream.ready += 1
        return request_id

    def stats(self) -> dict[str, Any]:
        """Operations that run or wait, and how many of each phase have ended."""
        with self._lock:
            streams = self._streams.values()
            waiting = sum(stream.ready + len(stream.held) for stream in streams)
            return {"in_progress": waiting, "finished": dict(self._finished)}

    def drop(self, model_id: str) -> None:
        """Close a model: its held operations fail, its numbers are dropped."""
        with self._lock:
            stream = self._streams.pop(model_id, _Stream(model_id))
        for item in stream.held.values():
            self._room.give_back(model_id, item.size)
            self._fail(item.request_id, ClosedError(f"model {model_id!r} was unloaded"))

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

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the trainer must be running, got a request after it was closed")

    def _find_stream(self, model_id: str) -> _Stream:
        stream = self._streams.get(model_id)
        if stream is None:
            raise unknown_model(model_id)
        return stream

    def _run(self) -> None:
        while (item := self._ready.get()) is not None:
            if self._closed:
                closed = ClosedError("the trainer was closed before this operation")
                self._fail(item.request_id, closed)
                continue
            self._announce(item.phase)
            answer = self._answer(item)
            self._leave(item)
            self._announce(IDLE)
            self._futures.resolve(item.request_id, answer)

    def _leave(self, item: _Item) -> None:
        """An operation waits and runs no more."""
        with self._lock:
            self._finished[item.phase] += 1
            if item.stream is not None:
                item.stream.ready -= 1
        if item.stream is not None:
            self._room.give_back(item.stream.model_id, item.size)

    def _answer(self, item: _Item) -> bytes:
        try:
            return item.work().dump()
        except Exception as error:  # the boundary: a failure belongs to its own future
            if not isinstance(error, HearthError):
                logger.exception("trainer operation %s failed", item.request_id)
            return describe_failure(error).dump()

    def _announce(self, phase: str) -> None:
        if self._on_phase is None:
            return
        try:
            self._on_phase(phase)
        except Exception:  # a failing listener must not stop the trainer
            logger.exception("on_phase failed at %s", phase)

    def _fail(self, request_id: str, error: Exception) -> None:
        self._futures.resolve(request_id, describe_failure(error).dump())


def _remember(known: OrderedDict[KeyT, str], key: KeyT, request_id: str) -> None:
    known[key] = request_id
    if len(known) > _REMEMBERED:
        known.popitem(last=False)
