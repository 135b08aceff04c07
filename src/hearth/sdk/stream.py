"""One model's operations: numbered, sent in order, and sent again to a restarted trainer.

A trainer executes a model's operations once each, in the order of their numbers. A broken
connection costs nothing: the same number posted twice is executed once. A trainer that dies loses
what no checkpoint holds, so the stream keeps a journal (``hearth.sdk.journal``): a restarted
trainer loads the last checkpoint and gets the rest again. Each operation therefore counts once in
the history of the weights, which on one kind of CPU have the same bits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson

from hearth.errors import (
    ClosedError,
    EngineError,
    HearthError,
    NotFoundError,
    NotReadyError,
    RequestFailedError,
    TransportError,
)
from hearth.sdk.journal import Journal, JournalEntry
from hearth.sdk.transport import Http
from hearth.wire.base import Record
from hearth.wire.tinker import FutureRef

logger = logging.getLogger(__name__)

T = TypeVar("T")
RecordT = TypeVar("RecordT", bound=Record)

MOST_RESTARTS = 3
"""How often a trainer may die over one operation."""
MOST_RECONNECTS = 10
"""How often one operation is retried on a trainer that still runs."""

# The server holds a request for about 25 s; much later the answer is lost.
_POLL_TIMEOUT_S = 45.0
LOST = (ClosedError, NotFoundError, NotReadyError, TransportError)
"""The errors of a trainer that is gone, or that has lost the model."""


@dataclass(frozen=True)
class Revival:
    """How a lost model is rebuilt: ``revive_trainer`` returns once the trainer runs again, and
    ``create_model`` makes a new model on it and returns its id."""

    revive_trainer: Callable[[], Awaitable[object]]
    create_model: Callable[[], Awaitable[str]]


class OperationStream:
    """Submits one model's operations and waits for their results. Lives on the SDK's loop.

    Without a ``revival`` a lost trainer is the caller's error. A caller that stops waiting leaves
    no gap in the numbers: its operation is finished in the background.
    """

    def __init__(self, http: Http, model_id: str, *, revival: Revival | None = None) -> None:
        self.model_id = model_id
        self.turn = asyncio.Lock()
        """Held while several operations that belong together are submitted."""
        self.restarts = 0
        """How often the model was rebuilt."""
        self.journal = Journal()
        self._http = http
        self._revival = revival
        self._gate = asyncio.Lock()
        self._next_seq = 1
        self._end: HearthError | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    async def submit(self, name: str, body: dict[str, Any]) -> JournalEntry:
        """Post one operation; the caller holds the turn. A refused post keeps its number.

        Raises:
            HearthError: the platform refused it, or is gone for good.
        """
        operation = JournalEntry(name, orjson.dumps(body))
        try:
            await self._finish(self._submit_entry(operation))
        except asyncio.CancelledError:
            self._start(self._fetch(operation, Record))
            raise
        return operation

    async def result(self, operation: JournalEntry, kind: type[RecordT]) -> RecordT:
        """Wait for an operation's result.

        Raises:
            RequestFailedError: the operation failed; the message is the platform's own.
            HearthError: the trainer is gone for good.
        """
        return await self._finish(self._fetch(operation, kind))

    async def unload(self) -> None:
        """Free the model on its trainer; later operations are ``ClosedError``."""
        async with self.turn, self._gate:
            self._refuse_after_end()
            question = orjson.dumps({"model_id": self.model_id})
            try:
                accepted = FutureRef.parse(await self._http.post("/unload_model", question))
                await retrieve(self._http, accepted.request_id, Record)
            except (NotFoundError, NotReadyError):
                logger.debug("model %s went with its trainer", self.model_id)
            self._end = ClosedError(f"model {self.model_id!r} must be loaded, got it unloaded")

    async def close(self) -> None:
        """Stop all recoveries; calls that still wait raise ``ClosedError``."""
        self._end = self._end or ClosedError(
            f"the client of {self._http.base_url} must be used before it is closed: keep the "
            "training loop inside the `with` block that provisioned it"
        )
        tasks = [task for task in self._tasks if not task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start work that continues without a waiting caller."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._drop_task)
        return task

    def _drop_task(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio logs no warning when nobody awaits it

    async def _finish(self, work: Coroutine[Any, Any, T]) -> T:
        """The work's result. It is shielded: half a post would leave its number in doubt."""
        task = self._start(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled() and self._end is not None:
                raise self._end from None
            raise

    def _refuse_after_end(self) -> None:
        if self._end is not None:
            raise self._end

    async def _submit_entry(self, operation: JournalEntry) -> None:
        async with self._gate:
            while operation.request_id is None:
                self._refuse_after_end()
                try:
                    await self._post(operation)
                except LOST as error:
                    # A restarted trainer gets it with the rest of the journal.
                    await self._recover(operation, error)

    async def _fetch(self, operation: JournalEntry, kind: type[RecordT]) -> RecordT:
        while True:
            if operation.request_id is None:
                async with self._gate:
                    self._refuse_after_end()
            request_id = operation.request_id
            assert request_id is not None, "submitted before it is waited for"
            try:
                record = await retrieve(self._http, request_id, kind)
            except RequestFailedError:
                self.journal.record_result(operation, succeeded=False)
                raise
            except LOST as error:
                async with self._gate:
                    self._refuse_after_end()
                    # Otherwise another operation has just recovered the model.
                    if operation.request_id == request_id:
                        await self._recover(operation, error)
            else:
                self.journal.record_result(operation, succeeded=True)
                return record

    async def _post(self, operation: JournalEntry) -> None:
        if self._revival is not None:
            self.journal.add(operation)
        try:
            await self._send(operation)
        except LOST:
            raise
        except HearthError:
            self.journal.remove(operation)
            raise

    async def _send(self, operation: JournalEntry) -> None:
        body = operation.build_body(self.model_id, self._next_seq)
        answer = await self._http.post(f"/{operation.name}", body)
        self._next_seq += 1
        operation.request_id = FutureRef.parse(answer).request_id

    async def _recover(self, operation: JournalEntry, error: HearthError) -> None:
        """Make sure that the trainer runs and has the model; the caller holds the gate.

        Raises:
            HearthError: ``error`` itself where there is no recovery, else why the recovery failed;
                later operations raise the same.
        """
        if self._revival is None or self._http.is_closed:
            raise error
        try:
            while not await self._try_to_recover(operation, error, self._revival):
                error = operation.loss or error  # the newest loss
        except HearthError as end:
            if end is not error:
                self._end = self._end or end
            raise

    async def _try_to_recover(
        self, operation: JournalEntry, error: HearthError, revival: Revival
    ) -> bool:
        """One attempt to recover the model; False when the trainer was lost once more.

        Raises:
            HearthError: the model cannot be recovered.
        """
        if operation.restarts >= MOST_RESTARTS:
            raise EngineError(
                f"{operation.name} must end, got a trainer that was lost {operation.restarts + 1} "
                f"times meanwhile, the last time with: {error}. Find out what ends it (too little "
                "memory?), then start the same command again: it goes on from the last checkpoint"
            ) from error
        logger.warning("the trainer is lost over %s: %s", operation.name, error)
        operation.loss = error
        try:
            await revival.revive_trainer()
        except EngineError as died:
            operation.loss = died
            operation.restarts += 1
            return False
        try:
            is_there = await self._has_model()
            if not is_there:
                operation.restarts += 1
                self._refuse_incomplete(error)
                self.model_id = await revival.create_model()
                self.restarts += 1
                await self._replay()
        except LOST as again:
            operation.loss = again
            return False
        if is_there:
            self._count_reconnect(operation, error)
        return True

    async def _has_model(self) -> bool:
        """Whether the trainer still has the model: then only the connection broke."""
        with contextlib.suppress(NotFoundError):
            await self._http.post("/get_info", orjson.dumps({"model_id": self.model_id}))
            return True
        return False

    def _count_reconnect(self, operation: JournalEntry, error: HearthError) -> None:
        operation.reconnects += 1
        if operation.reconnects > MOST_RECONNECTS:
            raise error
        if isinstance(error, NotFoundError):
            # Executed so long ago that its result was discarded.
            self.journal.record_result(operation, succeeded=True)
            raise error

    def _refuse_incomplete(self, error: HearthError) -> None:
        if not self.journal.is_complete:
            raise EngineError(
                f"the trainer was lost ({error}), and the operations since its last checkpoint "
                f"({self.journal.checkpoint or 'none was written'}) are too many to be sent again: "
                "start the same command again, it goes on from there (dcp_save_interval says how "
                "often a checkpoint is written)"
            ) from error

    async def _replay(self) -> None:
        """Send the journal to the new model."""
        self._next_seq = 1
        for operation in self.journal.operations:
            operation.request_id = None
        if self.journal.checkpoint is not None:
            body = {"path": self.journal.checkpoint, "optimizer": True}
            loading = JournalEntry("load_weights", orjson.dumps(body))
            await self._send(loading)
            assert loading.request_id is not None, "it was just sent"
            try:
                await retrieve(self._http, loading.request_id, Record)
            except RequestFailedError as error:
                # What is to be sent again follows on this one; an older one does not do.
                raise EngineError(
                    f"checkpoint {self.journal.checkpoint!r} must load into the restarted trainer, "
                    f"got: {error}. Start the same command again: it goes on from the newest older "
                    "checkpoint that loads"
                ) from error
        for operation in self.journal.operations:
            if operation.name == "save_weights":
                operation.allow_overwrite()  # a part of it may be written
            await self._send(operation)
        logger.warning(
            "the trainer is back at %s; %d operations were sent again",
            self.journal.checkpoint or "its first weights",
            len(self.journal.operations),
        )


async def retrieve(http: Http, request_id: str, kind: type[RecordT]) -> RecordT:
    """Poll a future until it is done.

    Raises:
        RequestFailedError: the operation failed; the message is the platform's own.
        NotFoundError: the trainer knows no such future; it may have been restarted.
    """
    question = orjson.dumps({"request_id": request_id})
    while True:
        answer = await http.post("/retrieve_future", question, timeout_s=_POLL_TIMEOUT_S)
        body = orjson.loads(answer)
        if "error" in body:
            category = body.get("category", "unknown")
            raise RequestFailedError(str(body["error"]), category=category)
        if body.get("type") != "try_again":
            return kind.model_validate(body)
