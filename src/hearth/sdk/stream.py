"""One model's operations: numbered, sent in order, and sent again to a trainer that was restarted.

A trainer executes a model's operations once each, in the order of their numbers. A connection that
breaks costs nothing: the same number posted twice is executed once. A trainer that dies takes with
it what no checkpoint holds, so the stream keeps what has changed the model since the last one: a
trainer started again loads that checkpoint and is sent the rest once more. What was executed is so
executed once in the history of the weights, and on one kind of CPU they have the same bits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import orjson

from hearth.errors import (
    ClosedError,
    EngineError,
    HearthError,
    NotFoundError,
    RequestFailedError,
    TransportError,
)
from hearth.sdk.transport import Http
from hearth.wire.base import Record
from hearth.wire.tinker import FutureRef

logger = logging.getLogger(__name__)

RecordT = TypeVar("RecordT", bound=Record)

JOURNAL_BYTES = 2**28
"""Most bytes of operations kept since the last checkpoint."""
MOST_RESTARTS = 3
"""A trainer that dies more often than this over one operation is given up."""

# The server holds a question for about 25 s; a little more and the answer is lost.
_POLL_TIMEOUT_S = 45.0
_CHANGING = frozenset({"forward_backward", "optim_step", "load_weights", "load_adapter"})
_LOST = (ClosedError, NotFoundError, TransportError)
"""What a client sees of a trainer that is gone, or that does not know the model any more."""


@dataclass(eq=False)
class Operation:
    """One operation that was submitted. ``request_id`` is that of its last submission."""

    name: str
    body: dict[str, Any]
    size: int = 0
    request_id: str | None = None
    generation: int = 0
    restarts: int = 0


@dataclass
class Journal:
    """What must be done again on a trainer that was started anew, in order."""

    limit: int = JOURNAL_BYTES
    checkpoint: str | None = None
    """Stands before the first operation; None is the model as it was created."""
    operations: list[Operation] = field(default_factory=lambda: [])
    is_complete: bool = True
    _size: int = 0

    def add(self, operation: Operation) -> None:
        """Keep an operation that is about to be sent."""
        self.operations.append(operation)
        self._size += operation.size
        if self._size > self.limit:
            self.is_complete = False
            changing = [one for one in self.operations if one.request_id is None]
            self._keep(changing)

    def settle(self, operation: Operation, *, succeeded: bool) -> None:
        """An operation has its result."""
        if operation not in self.operations:
            return
        if operation.name == "save_weights" and succeeded:
            self.checkpoint = operation.body["path"]
            self.is_complete = True
            self._keep(self._since(operation))
        elif operation.name == "load_weights" and succeeded:
            # Nothing before it matters any more.
            self.checkpoint = None
            self.is_complete = True
            self._keep(self.operations[self.operations.index(operation) :])
        elif operation.name not in _CHANGING:
            self._keep([one for one in self.operations if one is not operation])

    def _since(self, saved: Operation) -> list[Operation]:
        """What a checkpoint does not hold: later operations, and a gradient not yet stepped."""
        place = self.operations.index(saved)
        pending: list[Operation] = []
        for one in self.operations[:place]:
            if one.name == "forward_backward":
                pending.append(one)
            elif one.name in _CHANGING:
                pending.clear()
        return [*pending, *self.operations[place + 1 :]]

    def _keep(self, operations: list[Operation]) -> None:
        self.operations = operations
        self._size = sum(one.size for one in operations)


class OperationStream:
    """Submits one model's operations and waits for their results. Lives on the SDK's loop.

    ``reopen`` makes the model anew on a running trainer and returns its id; without it a lost
    trainer is the caller's error.
    """

    def __init__(
        self, http: Http, model_id: str, *, reopen: Callable[[], Awaitable[str]] | None = None
    ) -> None:
        self.model_id = model_id
        self.turn = asyncio.Lock()
        """Held by whoever submits several operations that belong together."""
        self.reopen = reopen
        self.restarts = 0
        """How often the model was made anew."""
        self._http = http
        self._gate = asyncio.Lock()
        self._next_seq = 1
        self._journal = Journal()

    async def submit(self, name: str, body: dict[str, Any]) -> Operation:
        """Post one operation; the caller holds the turn. A refused post keeps its number.

        Raises:
            HearthError: the platform refused it, or is gone for good.
        """
        operation = Operation(name, body)
        while True:
            async with self._gate:
                if operation.request_id is not None:
                    return operation  # a restarted trainer was sent it already
                operation.generation = self.restarts
                try:
                    await self._post(operation)
                except _LOST as error:
                    lost = error
                else:
                    return operation
            await self._recover(operation, lost)

    async def result(self, operation: Operation, kind: type[RecordT]) -> RecordT:
        """Wait for an operation's result.

        Raises:
            RequestFailedError: the operation failed; the message is the platform's own.
            HearthError: the trainer is gone for good.
        """
        while True:
            assert operation.request_id is not None, "submitted before it is waited for"
            operation.generation = self.restarts
            try:
                found = await retrieve(self._http, operation.request_id, kind)
            except RequestFailedError:
                self._journal.settle(operation, succeeded=False)
                raise
            except _LOST as error:
                await self._recover(operation, error)
            else:
                self._journal.settle(operation, succeeded=True)
                return found

    async def _post(self, operation: Operation) -> None:
        numbered = orjson.dumps(
            {**operation.body, "model_id": self.model_id, "seq_id": self._next_seq}
        )
        if self.reopen is not None and operation not in self._journal.operations:
            operation.size = len(numbered)
            self._journal.add(operation)
        try:
            answer = await self._http.post(f"/{operation.name}", numbered)
        except _LOST:
            raise
        except HearthError:
            self._journal.settle(operation, succeeded=False)
            if operation in self._journal.operations:
                self._journal.operations.remove(operation)
            raise
        self._next_seq += 1
        operation.request_id = FutureRef.parse(answer).request_id

    async def _recover(self, operation: Operation, error: HearthError) -> None:
        """Bring the model back on a restarted trainer, unless somebody just has.

        Raises:
            HearthError: ``error`` itself where nothing can be done; EngineError where it could not.
        """
        if self.reopen is None or self._http.is_closed:
            raise error
        async with self._gate:
            if operation.generation != self.restarts:
                return
            operation.restarts += 1
            if operation.restarts > MOST_RESTARTS:
                raise EngineError(
                    f"{operation.name} must end, got a trainer lost {MOST_RESTARTS} times over it: "
                    f"{error}"
                ) from error
            if not self._journal.is_complete:
                raise EngineError(
                    f"the trainer was lost ({error}), and the operations since its last checkpoint "
                    "are too many to be sent again: start the same command again, it goes on from "
                    "the checkpoint (dcp_save_interval says how often one is written)"
                ) from error
            logger.warning("the trainer is lost and is brought back: %s", error)
            self.model_id = await self.reopen()
            self.restarts += 1
            await self._replay()

    async def _replay(self) -> None:
        self._next_seq = 1
        journal = self._journal
        for one in journal.operations:
            one.request_id = None
        if journal.checkpoint is not None:
            body = {"path": journal.checkpoint, "optimizer": True}
            loading = Operation("load_weights", body)
            await self._post_again(loading)
            assert loading.request_id is not None, "it was just posted"
            await retrieve(self._http, loading.request_id, Record)
        for one in journal.operations:
            if one.name == "save_weights":
                one.body["overwrite"] = True  # half of it may have been written
            await self._post_again(one)
        logger.warning(
            "the trainer is back at %s; %d operations were sent again",
            journal.checkpoint or "its first weights", len(journal.operations),
        )  # fmt: skip

    async def _post_again(self, operation: Operation) -> None:
        numbered = {**operation.body, "model_id": self.model_id, "seq_id": self._next_seq}
        answer = await self._http.post(f"/{operation.name}", orjson.dumps(numbered))
        self._next_seq += 1
        operation.request_id = FutureRef.parse(answer).request_id
        operation.generation = self.restarts


async def retrieve(http: Http, request_id: str, kind: type[RecordT]) -> RecordT:
    """Ask for a future until it is done.

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
