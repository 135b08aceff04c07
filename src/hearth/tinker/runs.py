"""One run: its operations in order, their results, and how both survive the trainer's death.

An operation is numbered and written to the journal, then sent; its result is written too before a
client sees it. A trainer that died gets the last checkpoint and the operations since then again.
From time to time the run writes a checkpoint of its own, so that these stay few.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson

from hearth.errors import (
    BusyError,
    ClosedError,
    EngineError,
    HearthError,
    NotFoundError,
    RequestError,
    StorageError,
)
from hearth.tinker.bases import Base, BaseLostError
from hearth.tinker.journal import History, Incarnation, RunJournal
from hearth.tinker.protobuf import write_pass
from hearth.tinker.records import RunFacts
from hearth.wire.http import describe_failure
from hearth.wire.room import Room
from hearth.wire.tensors import TensorRecord

logger = logging.getLogger(__name__)

MOST_HELD = 4096
"""Operations of one run that wait for lower numbers."""
HELD_BYTES = 2**30
"""Of operations that wait for lower numbers, of all runs; one key alone has half. Others are on the
disk."""
MOST_RESTARTS = 3
"""How often the trainer may be lost over one operation."""
_CHECKPOINT_BYTES = 2**27
_CHECKPOINT_OPERATIONS = 256
"""After so much since the last one a run writes a checkpoint of its own."""
_BUSY_PAUSE_S = 0.5
_KEPT_RESULTS = 256
"""Results in memory; older ones are read from the journal."""
_SAVES = ("save_weights", "save_weights_for_sampler")
"""They change no model, and may have failed on the way from the trainer to the client."""
JSON, BINARY = b"J", b"P"
"""What a result's first byte says of the rest."""


@dataclass(eq=False)
class RunOperation:
    """One operation of a run. ``seq_id`` is the client's number; None for the run's own."""

    kind: str
    """The trainer's name for it."""
    body: bytes
    """The trainer's body, a JSON object without model and number."""
    seq_id: int | None = None
    facts: dict[str, Any] = field(default_factory=lambda: {})
    """What its answer needs."""
    refusal: str | None = None
    """Why it is not sent; it then only uses up its number."""
    number: int = 0
    """Its place in the journal."""
    request_id: str | None = None
    """The trainer's."""
    sent_as: int | None = None
    """The number under which the trainer's model got it, or is to get it again."""
    restarts: int = 0
    result: asyncio.Future[bytes] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def head(self) -> dict[str, Any]:
        """What a journal keeps of it beside its body."""
        return {
            "kind": self.kind,
            "seq_id": self.seq_id,
            "facts": self.facts,
            "refusal": self.refusal,
        }


Finish = Callable[["TinkerRun", RunOperation, dict[str, Any]], Awaitable[dict[str, Any]]]
"""Makes the client's answer of the trainer's, and keeps what an operation has saved."""


class TinkerRun:
    """One run on a base model. Must be used on one event loop.

    ``room`` bounds the bytes of operations that wait for lower numbers.
    """

    def __init__(
        self,
        run_id: str,
        facts: RunFacts,
        base: Base,
        journal: RunJournal,
        finish: Finish,
        room: Room,
    ) -> None:
        self.id = run_id
        self.facts = facts
        self.base = base
        self._journal = journal
        self._finish = finish
        self.created: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        """The answer to the request that made it."""
        self._model_id: str | None = None
        self._has_all = True
        """Whether the trainer's model has all that was sent before."""
        self._operations: OrderedDict[int, RunOperation] = OrderedDict()
        """By number, those that may have to be sent again, and the last ones before them."""
        self._by_seq: dict[int, RunOperation] = {}
        self._held: dict[int, RunOperation] = {}
        self._room = room
        self._held_bytes: dict[int, int] = {}
        """What has been taken of the room, by number."""
        self._next_seq = 1
        self._next_number = 1
        self._trainer_seq = 0
        self._start, self._checkpoint = 1, None
        self._bytes_since = self._operations_since = 0
        self._outbox: asyncio.Queue[RunOperation] = asyncio.Queue()
        self._sent: asyncio.Queue[RunOperation] = asyncio.Queue()
        self._lock = asyncio.Lock()
        self._generation = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._end: HearthError | None = None

    def begin(self, first: RunOperation | None = None) -> None:
        """Make its model, and send ``first`` before anything else."""
        if first is not None:
            self._append(first)
            self._by_seq[0] = first
            self._outbox.put_nowait(first)
        self._tasks.append(asyncio.create_task(self._create(first)))

    def knows(self, seq_id: int) -> bool:
        """Whether a client's operation of that number was accepted."""
        return seq_id in self._by_seq

    def restore(self, history: History) -> None:
        """Be what the run was before a restart of the platform; ``go_on`` then."""
        self._start, self._checkpoint = history.start, history.checkpoint
        # A model that began with a checkpoint was given its load as number 1.
        begun = history.incarnation is not None and history.incarnation.checkpoint is not None
        self._trainer_seq = max(history.numbers.values(), default=int(begun))
        for kept in history.operations:
            operation = RunOperation(body=b"", **kept.head)
            operation.number = kept.number
            self._operations[kept.number] = operation
            self._next_number = kept.number + 1
            if operation.seq_id is not None:
                self._by_seq[operation.seq_id] = operation
                self._next_seq = max(self._next_seq, operation.seq_id + 1)
            operation.sent_as = history.numbers.get(kept.number)
            if kept.result is not None:
                operation.result.set_result(kept.result)
            elif operation.sent_as is None:
                # Before all that is accepted from now on.
                self._outbox.put_nowait(operation)
        if history.incarnation is not None:
            self._model_id = history.incarnation.model_id

    def go_on(self) -> None:
        """Go on after ``restore``."""
        self._tasks.append(asyncio.create_task(self._go_on()))

    async def _go_on(self) -> None:
        first = self._by_seq.get(0)
        if self._model_id is None:
            await self._create(first)
            return
        self._answer_creation_with(first)
        sent = [each for each in self._operations.values() if each.sent_as is not None]
        open_ones = [each for each in sent if not each.result.done()]
        try:
            async with self._lock:
                try:
                    for operation in open_ones:
                        # The trainer knows the number: it names the request and runs nothing.
                        await self._post(operation)
                except (BaseLostError, NotFoundError) as error:
                    logger.warning("run %s: its trainer is lost: %s", self.id, error)
                    await self._retry(self._reattach)
        except HearthError as error:
            self.fail(error)
            return
        for operation in open_ones:
            self._sent.put_nowait(operation)
        self._start_tasks()

    def accept(self, operation: RunOperation) -> None:
        """Take an operation, which is sent once all lower numbers are there; a second one is not.

        Raises:
            ClosedError: the run has ended.
            BusyError: too many operations wait for a lower number, or too many bytes of them.
            StorageError: the journal's disk refuses it; the client is to send it again.
        """
        assert operation.seq_id is not None, "a client's operation has a number"
        if self._end is not None:
            operation.refusal = str(self._end)
        if operation.seq_id in self._by_seq or operation.seq_id < self._next_seq:
            self._enqueue_ready()
            return
        if len(self._held) >= MOST_HELD:
            raise BusyError(
                f"seq_id must be {self._next_seq}, got {operation.seq_id}: {MOST_HELD} operations "
                "wait for that one already"
            )
        if operation.seq_id != self._next_seq:
            self._room.take(self.facts.owner, len(operation.body))
            self._held_bytes[operation.seq_id] = len(operation.body)
        self._by_seq[operation.seq_id] = operation
        self._held[operation.seq_id] = operation
        self._enqueue_ready()

    def _enqueue_ready(self) -> None:
        """Enqueue what waits for no lower number; where the disk refuses one, it waits on."""
        while (ready := self._held.get(self._next_seq)) is not None:
            self._enqueue(ready)
            del self._held[self._next_seq]
            self._room.give_back(self.facts.owner, self._held_bytes.pop(self._next_seq, 0))
            self._next_seq += 1

    async def wait(self, seq_id: int, timeout_s: float) -> bytes | None:
        """The result of a client's operation; None while there is none.

        Raises:
            NotFoundError: there is no such operation, or its result was dropped.
        """
        operation = self._by_seq.get(seq_id)
        if operation is None:
            raise NotFoundError(f"request_id must name a recent request, got number {seq_id}")
        await asyncio.wait([operation.result], timeout=timeout_s)
        return operation.result.result() if operation.result.done() else None

    async def close(self) -> None:
        """Stop: free its model, fail what waits and drop the journal."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.fail(ClosedError(f"run {self.id!r} must be open, got one whose session has ended"))
        self._room.give_back(self.facts.owner, sum(self._held_bytes.values()))
        self._held_bytes.clear()
        if self._model_id is not None:
            try:
                body = orjson.dumps({"model_id": self._model_id})
                await self.base.ask_trainer("unload_model", body)
            except HearthError as error:
                logger.info("run %s: its model is gone already: %s", self.id, error)
        await asyncio.to_thread(self._journal.remove)

    def _enqueue(self, operation: RunOperation) -> None:
        """Keep an operation and have it sent; behind a step perhaps a checkpoint of our own."""
        self._append(operation)
        if self._end is not None:
            self._resolve(operation, _failure(self._end))
            return
        self._outbox.put_nowait(operation)
        if operation.kind == "optim_step" and (
            self._bytes_since > _CHECKPOINT_BYTES or self._operations_since > _CHECKPOINT_OPERATIONS
        ):
            self._bytes_since = self._operations_since = 0
            name = f"{make_key(self.id)}.own-{self._next_number}"
            body = orjson.dumps({"path": name, "overwrite": True})
            try:
                self._enqueue(RunOperation("save_weights", body, facts={"own": name}))
            except StorageError as error:
                logger.error("run %s: its own checkpoint could not be saved: %s", self.id, error)

    def _append(self, operation: RunOperation) -> None:
        self._journal.write_operation(self._next_number, operation.head(), operation.body)
        operation.number = self._next_number
        self._next_number += 1
        self._bytes_since += len(operation.body)
        self._operations_since += 1
        self._operations[operation.number] = operation
        operation.body = b""

    async def _create(self, first: RunOperation | None) -> None:
        try:
            await self._retry(self._make_model)
        except HearthError as error:
            self.fail(error)
            return
        self._start_tasks()
        self._answer_creation_with(first)

    def _start_tasks(self) -> None:
        for work in (self._send_all, self._collect_all):
            self._tasks.append(asyncio.create_task(self._guard(work)))

    async def _guard(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do the work; the run ends where it fails, and says so."""
        try:
            await work()
        except HearthError as error:
            logger.error("run %s ends: %s", self.id, error)
            self.fail(error)
        except Exception as error:
            logger.exception("run %s ends", self.id)
            self.fail(EngineError(f"{type(error).__name__}: {error}"))

    def _answer_creation_with(self, first: RunOperation | None) -> None:
        """Answer the request that made the run: at once, or as its first operation ends."""
        if first is None:
            answer = {"model_id": self.id, "type": "create_model"}
            self._answer_creation(JSON + orjson.dumps(answer))
        else:
            first.result.add_done_callback(lambda done: self._answer_creation(done.result()))

    def _answer_creation(self, result: bytes) -> None:
        if not self.created.done():
            self.created.set_result(result)

    def fail(self, error: HearthError) -> None:
        """End the run: all that waits, and all that comes, fails with ``error``."""
        self._end = self._end or error
        failure = _failure(error)
        if not self.created.done():
            self.created.set_result(failure)
        for operation in [*self._operations.values(), *self._held.values()]:
            if not operation.result.done():
                operation.result.set_result(failure)

    async def _send_all(self) -> None:
        while True:
            operation = await self._outbox.get()
            if operation.refusal is not None:
                self._sent.put_nowait(operation)
                continue
            try:
                await self._send(operation)
            except HearthError as error:
                self._give_up(operation, error)
                continue
            self._sent.put_nowait(operation)

    async def _send(self, operation: RunOperation) -> None:
        while True:
            generation = self._generation
            try:
                async with self._lock:
                    if operation.request_id is None:
                        await self._post(operation)
                return
            except (BaseLostError, NotFoundError) as error:
                await self._recover(generation, operation, error)

    async def _collect_all(self) -> None:
        while True:
            operation = await self._sent.get()
            if operation.result.done():
                continue
            if operation.refusal is not None:
                refusal = {"error": operation.refusal, "category": "user"}
                self._resolve(operation, JSON + orjson.dumps(refusal))
                continue
            try:
                answer = await self._retrieve(operation)
            except HearthError as error:
                self._give_up(operation, error)
                continue
            await self._complete(operation, answer)

    async def _retrieve(self, operation: RunOperation) -> dict[str, Any]:
        while True:
            generation, request_id = self._generation, operation.request_id
            assert request_id is not None, "it was sent"
            try:
                return await self._await_result(request_id)
            except (BaseLostError, NotFoundError) as error:
                await self._recover(generation, operation, error)

    async def _complete(self, operation: RunOperation, answer: dict[str, Any]) -> None:
        """Keep an operation's result, and then let clients see it."""
        if "error" in answer:
            result = {"error": answer["error"], "category": answer.get("category", "unknown")}
            self._resolve(operation, JSON + orjson.dumps(result))
            return
        try:
            self._resolve(operation, await self._make_result(operation, answer))
        except HearthError as error:
            self._resolve(operation, _failure(error))

    async def _make_result(self, operation: RunOperation, answer: dict[str, Any]) -> bytes:
        if operation.kind in ("forward", "forward_backward"):
            return BINARY + await asyncio.to_thread(_write_output, operation, answer)
        if "own" in operation.facts:
            await self._rebase(operation)
            return JSON + b"{}"
        return JSON + orjson.dumps(await self._finish(self, operation, answer))

    async def _rebase(self, saving: RunOperation) -> None:
        """Begin from a checkpoint of the run's own from now on; the one before it goes."""
        before, self._checkpoint = self._checkpoint, saving.facts["own"]
        self._start = saving.number + 1
        self._journal.log(start=self._start, checkpoint=self._checkpoint)
        for number in list(self._operations):
            if number < self._start - _KEPT_RESULTS:
                operation = self._operations.pop(number)
                if operation.seq_id is not None:
                    del self._by_seq[operation.seq_id]
        await asyncio.to_thread(self._journal.prune, self._start)
        if before is not None:
            await asyncio.to_thread(self.base.remove_checkpoint, before)

    def _resolve(self, operation: RunOperation, result: bytes) -> None:
        if operation.number:
            self._journal.write_result(operation.number, result)
        if not operation.result.done():
            operation.result.set_result(result)

    def _give_up(self, operation: RunOperation, error: HearthError) -> None:
        logger.error("run %s: %s failed: %s", self.id, operation.kind, error)
        if self._end is None:
            self._resolve(operation, _failure(error))

    async def _post(self, operation: RunOperation) -> None:
        """Send an operation, again under its number if it has one; the caller holds the lock."""
        number = operation.sent_as or self._trainer_seq + 1
        head = orjson.dumps({"model_id": self._model_id, "seq_id": number})
        _, body = await asyncio.to_thread(self._journal.read_operation, operation.number)
        self._journal.log(sent=operation.number, number=number)
        operation.sent_as = number
        content = head if body == b"{}" else head[:-1] + b"," + body[1:]
        self._trainer_seq = max(self._trainer_seq, number)
        try:
            answer = await self._ask_with_patience(operation.kind, content)
        except (BaseLostError, NotFoundError):
            raise
        except HearthError:
            # The number is not used up.
            self._trainer_seq, operation.sent_as = number - 1, None
            raise
        operation.request_id = answer["request_id"]

    async def _ask_with_patience(self, kind: str, content: bytes) -> dict[str, Any]:
        """The trainer's answer, as soon as it has room for so much more."""
        while True:
            try:
                return await self.base.ask_trainer(kind, content)
            except BusyError:
                await asyncio.sleep(_BUSY_PAUSE_S)

    async def _make_model(self) -> None:
        """A model of the trainer for this run."""
        await self.base.start_trainer()
        await self.base.start_deployment()
        session, number = self.id.rsplit(":train:", 1)
        body = {
            "session_id": session,
            "model_seq_id": int(number),
            "base_model": self.facts.base_model,
            "lora_config": self.facts.lora.as_dict(),
            "owner": self.id,
        }
        made = await self._ask_and_wait("create_model", body)
        self._model_id = made["model_id"]
        self._trainer_seq = 0
        first = Incarnation(made["model_id"], self._checkpoint, self._start)
        self._journal.log(**vars(first))
        if self._checkpoint is not None:
            body = {
                "model_id": self._model_id,
                "seq_id": 1,
                "path": self._checkpoint,
                "optimizer": True,
            }
            self._trainer_seq = 1
            await self._ask_and_wait("load_weights", body)

    async def _ask_and_wait(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        asked = await self.base.ask_trainer(path, orjson.dumps(body))
        answer = await self._await_result(asked["request_id"])
        if "error" in answer:
            is_user = answer.get("category") == "user"
            raise (RequestError if is_user else EngineError)(str(answer["error"]))
        return answer

    async def _retry(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do the work, again after each loss of the trainer."""
        for attempt in range(MOST_RESTARTS + 1):
            try:
                await work()
                return
            except (BaseLostError, NotFoundError) as error:
                if attempt == MOST_RESTARTS:
                    raise
                logger.warning("run %s: its trainer is lost: %s", self.id, error)
                await asyncio.sleep(0.1 * 2**attempt)
                await self.base.start_trainer()

    async def _recover(self, generation: int, operation: RunOperation, error: HearthError) -> None:
        """Make sure that the trainer runs and has the model with all that was sent to it.

        Raises:
            HearthError: it cannot be, and the run has ended.
        """
        async with self._lock:
            if self._generation != generation:
                return  # another operation has recovered it
            operation.restarts += 1
            try:
                if operation.restarts > MOST_RESTARTS:
                    raise EngineError(
                        f"{operation.kind} must end, got a trainer that was lost "
                        f"{operation.restarts} times meanwhile, the last time with: {error}"
                    ) from error
                logger.warning("run %s: its trainer is lost: %s", self.id, error)
                await self._retry(self._reattach)
            except HearthError as end:
                self.fail(end)
                raise
            self._generation += 1

    async def _reattach(self) -> None:
        await self.base.start_trainer()
        try:
            body = orjson.dumps({"model_id": self._model_id})
            await self.base.ask_trainer("get_info", body)
            if self._has_all:
                return
        except NotFoundError:
            self._has_all = False
        again = [
            operation
            for number, operation in self._operations.items()
            if number >= self._start and operation.sent_as is not None
        ]
        await self._make_model()
        for operation in again:
            operation.sent_as = None
            await self._post(operation)
        for operation in again:
            await self._check_repeated(operation)
        self._has_all = True
        logger.warning(
            "run %s: its trainer is back at %s; %d operations were sent again",
            self.id,
            self._checkpoint or "its first weights",
            len(again),
        )

    async def _check_repeated(self, operation: RunOperation) -> None:
        """Refuse an operation that ends otherwise than before: what follows builds on it.

        Raises:
            EngineError: it did, such as the load of a checkpoint that was deleted since.
        """
        if not operation.result.done() or operation.request_id is None:
            return
        answer = await self._await_result(operation.request_id)
        if operation.kind in _SAVES and "error" not in answer:
            return
        if ("error" in answer) != _has_failed(operation.result.result()):
            how = answer.get("error", "it succeeded, where it had failed")
            raise EngineError(
                f"{operation.kind} must end as before when it is sent again to a new trainer, got: "
                f"{how}. Begin a new run from the last checkpoint"
            )

    async def _await_result(self, request_id: str) -> dict[str, Any]:
        """The trainer's answer to an operation, also of one that failed."""
        question = orjson.dumps({"request_id": request_id})
        while True:
            answer = await self.base.ask_trainer("retrieve_future", question)
            if answer.get("type") != "try_again":
                return answer


def make_key(run_id: str) -> str:
    """A run's id as a part of file names."""
    return run_id.replace(":", "-")


def _failure(error: HearthError) -> bytes:
    failed = describe_failure(error)
    return JSON + orjson.dumps({"error": failed.error, "category": failed.category})


def _has_failed(result: bytes) -> bool:
    return result[:1] == JSON and "error" in orjson.loads(result[1:])


def _write_output(operation: RunOperation, answer: dict[str, Any]) -> bytes:
    """The result of a pass as its client reads it."""
    lengths = operation.facts.get("lengths")
    if lengths is None:
        outputs = [
            {name: _floats(record) for name, record in output.items()}
            for output in answer["loss_fn_outputs"]
        ]
        return write_pass(outputs, answer["metrics"])
    columns = {name: _floats(record) for name, record in (answer["columns"] or {}).items()}
    cuts = np.cumsum(lengths)[:-1]
    parts = {name: np.split(values, cuts) for name, values in columns.items()}
    outputs = [{name: own[place] for name, own in parts.items()} for place in range(len(lengths))]
    return write_pass(outputs, answer["metrics"])


def _floats(record: dict[str, Any]) -> Any:
    return np.asarray(TensorRecord.model_validate(record).to_numpy(), dtype="<f4")
