from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import orjson
import pytest

from hearth.errors import BusyError, ClosedError, NotFoundError, RequestError
from hearth.trainer.futures import FutureStore
from hearth.trainer.queue import OperationQueue
from hearth.wire.room import Room
from hearth.wire.tinker import PathOutput


@pytest.fixture
def futures() -> FutureStore:
    return FutureStore()


@pytest.fixture
def operations(futures: FutureStore) -> Iterator[OperationQueue]:
    made = OperationQueue(futures, name="test")
    made.open("m")
    yield made
    made.close()


@dataclass
class Queue:
    """A queue that has the model ``m``, and what it answers."""

    futures: FutureStore
    operations: OperationQueue

    def submit(self, number: int, work: Callable[[], PathOutput]) -> str:
        return self.operations.submit_numbered("m", number, work)

    async def result(self, request_id: str) -> dict[str, str]:
        return await result(self.futures, request_id)


@pytest.fixture
def queue(futures: FutureStore, operations: OperationQueue) -> Queue:
    return Queue(futures, operations)


async def result(futures: FutureStore, request_id: str) -> dict[str, str]:
    body = await futures.wait(request_id, 5.0)
    assert body is not None
    return orjson.loads(body)


def done(path: str) -> PathOutput:
    return PathOutput(path=path)


async def test_what_waits_takes_bounded_memory_and_a_gap_can_always_be_closed(
    futures: FutureStore,
) -> None:
    operations = OperationQueue(futures, name="test", room=Room(100, "bytes of operations"))
    go_on = threading.Event()

    def submit(model: str, number: int, size: int) -> str:
        def work() -> PathOutput:
            assert go_on.wait(30)
            return done(model)

        return operations.submit_numbered(model, number, work, size=size)

    operations.open("m")
    operations.open("other")
    ids = [submit("other", 2, 60), submit("other", 1, 80)]
    ids += [submit("m", 1, 80), submit("m", 2, 20)]
    with pytest.raises(BusyError, match="bytes of operations in flight of one client must be at m"):
        submit("m", 3, 30)
    go_on.set()
    for request_id in ids:
        await result(futures, request_id)
    ids = [submit("m", 3, 100)]
    assert await result(futures, ids[0]) == {"path": "m"}
    operations.close()


async def test_operations_run_in_number_order_whatever_order_they_arrive_in(queue: Queue) -> None:
    ran: list[int] = []

    def work(number: int) -> PathOutput:
        ran.append(number)
        return done(str(number))

    ids = {
        number: queue.submit(number, lambda number=number: work(number))
        for number in (3, 5, 2, 1, 4)
    }

    paths = [(await queue.result(ids[number]))["path"] for number in (1, 2, 3, 4, 5)]
    assert paths == ["1", "2", "3", "4", "5"]
    assert ran == [1, 2, 3, 4, 5]


async def test_a_gap_holds_the_later_ones_back(queue: Queue) -> None:
    second = queue.submit(2, lambda: done("second"))

    assert await queue.futures.wait(second, 0.05) is None
    queue.submit(1, lambda: done("first"))
    assert await queue.result(second) == {"path": "second"}


async def test_what_waits_for_a_gap_is_bounded(queue: Queue) -> None:
    held = [queue.submit(number, lambda: PathOutput(path="held")) for number in range(2, 258)]

    with pytest.raises(RequestError, match="seq_id must be 1, got 258: 256 operations wait"):
        queue.submit(258, lambda: PathOutput(path="refused"))

    queue.submit(1, lambda: PathOutput(path="first"))
    last = queue.submit(258, lambda: PathOutput(path="last"))
    assert [(await queue.result(request))["path"] for request in (held[-1], last)] == [
        "held",
        "last",
    ]


async def test_a_repeated_number_is_the_same_request_and_runs_once(queue: Queue) -> None:
    ran: list[str] = []
    first = queue.submit(1, lambda: ran.append("a") or done("a"))
    again = queue.submit(1, lambda: ran.append("b") or done("b"))
    await queue.result(first)
    late = queue.submit(1, lambda: ran.append("c") or done("c"))

    assert first == again == late
    assert await queue.result(late) == {"path": "a"}
    assert ran == ["a"]


async def test_a_failure_is_its_own_and_uses_its_number_up(queue: Queue) -> None:
    def bad() -> PathOutput:
        raise RequestError("datum 3: weights must be finite")

    failed = queue.submit(1, bad)
    after = queue.submit(2, lambda: done("after"))

    assert await queue.result(failed) == {
        "error": "datum 3: weights must be finite",
        "category": "user",
        "error_class": "RequestError",
    }
    assert await queue.result(after) == {"path": "after"}


async def test_a_crash_is_the_servers_fault_and_the_queue_lives_on(queue: Queue) -> None:
    crashed = queue.operations.submit(lambda: done(str(1 // 0)))
    after = queue.operations.submit(lambda: done("after"))

    answer = await queue.result(crashed)
    assert answer["category"] == "server"
    assert answer["error"].startswith("ZeroDivisionError")
    assert await queue.result(after) == {"path": "after"}


async def test_models_do_not_wait_for_each_others_gaps(queue: Queue) -> None:
    queue.operations.open("other")
    queue.submit(2, lambda: done("held"))

    first = queue.operations.submit_numbered("other", 1, lambda: done("first"))

    assert await queue.result(first) == {"path": "first"}


def test_an_operation_on_an_unknown_model_is_refused(operations: OperationQueue) -> None:
    message = "model_id must name a model of this trainer, got 'absent': the trainer may have been"
    with pytest.raises(NotFoundError, match=message):
        operations.submit_numbered("absent", 7, lambda: done("never"))


async def test_each_operation_is_announced_and_then_idle(futures: FutureStore) -> None:
    heard: list[str] = []

    def listen(phase: str) -> None:
        heard.append(phase)
        if phase == "forward":
            raise ValueError("a listener's own")

    operations = OperationQueue(futures, name="test", on_phase=listen)
    operations.open("m")
    ran = [
        operations.submit(lambda: done("made"), phase="create_model"),
        operations.submit_numbered("m", 1, lambda: done("a"), phase="forward"),
        operations.submit_numbered("m", 2, lambda: done(str(1 // 0)), phase="optim_step"),
    ]
    answers = [await result(futures, request_id) for request_id in ran]
    operations.close()

    assert answers[1] == {"path": "a"}
    assert heard == ["create_model", "idle", "forward", "idle", "optim_step", "idle"]


async def test_unloading_frees_what_was_held(queue: Queue) -> None:
    held = queue.submit(2, lambda: done("never"))

    queue.operations.drop("m")

    assert (await queue.result(held))["error_class"] == "ClosedError"


async def test_closing_ends_the_running_one_and_fails_the_others(futures: FutureStore) -> None:
    operations = OperationQueue(futures, name="test")
    operations.open("m")
    started, go = threading.Event(), threading.Event()

    def slow() -> PathOutput:
        started.set()
        assert go.wait(60)
        return done("slow")

    running = operations.submit_numbered("m", 1, slow)
    waiting = operations.submit_numbered("m", 2, lambda: done("never"))
    held = operations.submit_numbered("m", 4, lambda: done("never"))
    assert started.wait(5)

    def release_once_closing() -> None:
        with contextlib.suppress(ClosedError):
            while True:  # a number that is known runs nothing
                operations.submit_numbered("m", 2, lambda: done("never"))
                time.sleep(0.001)
        go.set()

    threading.Thread(target=release_once_closing, daemon=True).start()
    await asyncio.to_thread(operations.close)

    assert await result(futures, running) == {"path": "slow"}
    assert (await result(futures, waiting))["error_class"] == "ClosedError"
    assert (await result(futures, held))["error_class"] == "ClosedError"
    with pytest.raises(ClosedError):
        operations.submit(lambda: done("late"))


async def test_a_key_names_work_without_a_number_once(queue: Queue) -> None:
    first = queue.operations.submit(lambda: done("first"), key="session/0")
    again = queue.operations.submit(lambda: done("again"), key="session/0")
    other = queue.operations.submit(lambda: done("other"), key="session/1")

    assert first == again
    assert await queue.result(first) == {"path": "first"}
    assert await queue.result(other) == {"path": "other"}


def test_numbers_begin_at_one(operations: OperationQueue) -> None:
    with pytest.raises(RequestError, match="seq_id must be a new number >= 1, got 0"):
        operations.submit_numbered("m", 0, lambda: done("never"))


async def test_a_result_stays_after_delivery(futures: FutureStore) -> None:
    request_id = futures.create()
    futures.resolve(request_id, b"{}")

    assert await futures.wait(request_id, 1.0) == b"{}"
    assert await futures.wait(request_id, 1.0) == b"{}"


async def test_delivered_results_are_bounded_by_their_bytes() -> None:
    futures = FutureStore(delivered_bytes=250)
    ids = [futures.create() for _ in range(4)]
    for request_id in ids:
        futures.resolve(request_id, b"x" * 100)
        await futures.wait(request_id, 1.0)

    with pytest.raises(NotFoundError, match="pending or recent"):
        await futures.wait(ids[1], 1.0)
    assert len(await futures.wait(ids[2], 1.0) or b"") == 100


@pytest.mark.parametrize("is_fetched", [False, True])
async def test_results_are_bounded_by_their_number(is_fetched: bool) -> None:
    futures = FutureStore(results=2)
    ids = [futures.create() for _ in range(3)]
    for request_id in ids:
        futures.resolve(request_id, b"{}")
        if is_fetched:
            await futures.wait(request_id, 1.0)

    with pytest.raises(NotFoundError):
        await futures.wait(ids[0], 1.0)
    assert await futures.wait(ids[1], 1.0) == b"{}"


async def test_an_unknown_request_is_not_found(futures: FutureStore) -> None:
    with pytest.raises(NotFoundError, match="got 'nope'"):
        await futures.wait("nope", 1.0)


def test_several_event_loops_wait_for_one_result(futures: FutureStore) -> None:
    request_id = futures.create()
    answers: list[bytes | None] = []

    def ask() -> None:
        answers.append(asyncio.run(futures.wait(request_id, 5.0)))

    askers = [threading.Thread(target=ask) for _ in range(3)]
    for asker in askers:
        asker.start()
    assert asyncio.run(futures.wait(request_id, 0.02)) is None
    futures.resolve(request_id, b"done")
    for asker in askers:
        asker.join(5)

    assert answers == [b"done"] * 3
