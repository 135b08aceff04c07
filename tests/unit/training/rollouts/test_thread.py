import asyncio
import contextvars
import logging
import re
import threading
import time
from collections.abc import Iterator

import pytest
from tests.waiting import until

from hearth.errors import ClosedError
from training.rollouts.failures import RetryLimits, with_retries
from training.rollouts.thread import RolloutThread

step = contextvars.ContextVar("step", default=0)


@pytest.fixture
def thread() -> Iterator[RolloutThread]:
    with RolloutThread() as running:
        yield running


async def forever() -> None:
    await asyncio.Event().wait()


async def test_a_rollout_runs_on_a_loop_of_its_own_and_its_result_comes_back(thread):
    async def rollout() -> tuple[str, asyncio.AbstractEventLoop]:
        await asyncio.sleep(0)
        return threading.current_thread().name, asyncio.get_running_loop()

    name, loop = await thread.submit(rollout)

    assert name == "hearth-rollouts"
    assert loop is not asyncio.get_running_loop()


async def test_many_rollouts_are_under_way_at_one_time(thread):
    everyone = asyncio.Barrier(50)

    async def rollout(number: int) -> int:
        await everyone.wait()
        return number

    results = await asyncio.gather(
        *(thread.submit(lambda number=number: rollout(number)) for number in range(50))
    )

    assert results == list(range(50))


async def test_a_rollout_that_computes_does_not_hold_up_the_callers_loop(thread):
    may_go_on = threading.Event()

    async def rollout() -> bool:
        return may_go_on.wait(10)

    scored = thread.submit(rollout)
    for _ in range(10):
        await asyncio.sleep(0)
    assert not scored.done()
    may_go_on.set()

    assert await scored


async def test_an_exception_comes_back_as_it_was_raised(thread):
    error = KeyError("ground_truth")

    async def rollout() -> None:
        raise error

    with pytest.raises(KeyError) as caught:
        await thread.submit(rollout)
    assert caught.value is error


async def test_what_is_no_coroutine_function_is_the_callers_error(thread):
    with pytest.raises(TypeError, match="await"):
        await thread.submit(lambda: None)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()], ids=repr)
async def test_a_rollout_cannot_end_the_process_or_the_thread(thread, error):
    async def rollout() -> None:
        raise error

    with pytest.raises(RuntimeError, match=r"must return or raise an Exception, got (Sys|Key)"):
        await thread.submit(rollout)
    await thread.submit(lambda: asyncio.sleep(0))


async def test_a_rollout_sees_the_callers_context_and_changes_only_its_copy(thread):
    async def rollout() -> int:
        seen = step.get()
        step.set(99)
        await asyncio.sleep(0)
        return seen

    step.set(7)
    first = thread.submit(rollout)
    step.set(8)

    assert await asyncio.gather(first, thread.submit(rollout)) == [7, 8]
    assert step.get() == 8


async def test_cancelling_the_future_cancels_the_coroutine(thread):
    events = []

    async def rollout() -> None:
        events.append("began")
        try:
            await forever()
        except asyncio.CancelledError:
            events.append("cancelled")
            raise

    drawing = thread.submit(rollout)
    await until(lambda: events == ["began"])
    drawing.cancel()

    await until(lambda: events == ["began", "cancelled"])
    await until(lambda: thread.task_stacks(10) == [])


async def test_a_rollout_that_is_cancelled_before_its_turn_never_begins(thread):
    may_go_on = threading.Event()
    events = []

    async def blocking() -> None:
        may_go_on.wait(10)

    async def late() -> None:
        events.append("began")

    first = thread.submit(blocking)
    second = thread.submit(late)
    second.cancel()
    may_go_on.set()
    await first
    await thread.submit(lambda: asyncio.sleep(0))

    assert events == []
    assert thread.task_stacks(10) == []


async def test_a_rollout_that_cancels_itself_is_cancelled_for_its_caller(thread):
    async def rollout() -> None:
        raise asyncio.CancelledError

    drawing = thread.submit(rollout)
    await asyncio.wait([drawing])

    assert drawing.cancelled()


def hang_until(event: threading.Event) -> None:
    event.wait(10)  # the line that hangs


@pytest.mark.slow
async def test_a_blocked_thread_says_for_how_long_and_in_which_line(thread):
    may_go_on = threading.Event()

    async def rollout() -> None:
        hang_until(may_go_on)

    await thread.submit(lambda: asyncio.sleep(0))
    assert thread.blocked_s() == 0.0

    drawing = thread.submit(rollout)
    await until(lambda: thread.blocked_s() > 0.6)
    stack = thread.stack()
    (line,) = thread.task_stacks(10)
    may_go_on.set()
    await drawing
    await until(lambda: thread.blocked_s() == 0.0)

    assert 'test_thread.py", line' in stack
    assert "# the line that hangs" in stack
    assert stack.index("in rollout") < stack.index("in hang_until")
    assert "base_events.py" not in stack
    assert line.endswith(" s: computes")


async def test_a_rollout_that_hangs_runs_out_of_its_time_although_its_thread_is_blocked(thread):
    may_go_on = threading.Event()
    failures = []

    async def rollout() -> None:
        hang_until(may_go_on)

    with pytest.raises(TimeoutError, match=r"within rollout_timeout_s=0\.05 s"):
        await with_retries(
            lambda: thread.submit(rollout),
            RetryLimits(2, timeout_s=0.05, backoff_s=0.0),
            on_failure=lambda error, attempt: failures.append((type(error), attempt)),
        )
    may_go_on.set()

    assert failures == [(TimeoutError, 1), (TimeoutError, 2)]


async def helper() -> None:
    await asyncio.sleep(60)


async def test_pending_rollouts_are_listed_oldest_first_with_where_they_wait(thread):
    async def first() -> None:
        await forever()

    async def second() -> None:
        await helper()

    drawings = [thread.submit(first), thread.submit(second), thread.submit(first)]
    await until(lambda: sum("test_thread.py" in line for line in thread.task_stacks(9)) == 3)
    lines = thread.task_stacks(2)

    assert re.fullmatch(
        r"\d+\.\d s: test_thread\.py:\d+ in first, test_thread\.py:\d+ in forever, "
        r"locks\.py:\d+ in wait",
        lines[0],
    )
    assert re.search(r":\d+ in second, .*:\d+ in helper, tasks\.py:\d+ in sleep$", lines[1])
    assert len(lines) == 2
    assert thread.task_stacks(0) == []
    for drawing in drawings:
        drawing.cancel()


async def deeply(levels: int) -> None:
    await (deeply(levels - 1) if levels else forever())


async def test_of_a_deep_rollout_its_ends_are_listed(thread):
    thread.submit(lambda: deeply(20))
    await until(lambda: "..." in "".join(thread.task_stacks(1)))

    assert re.search(
        r"s: (\S+ in deeply, ){3}\.\.\., locks\.py:\d+ in wait$", thread.task_stacks(1)[0]
    )


async def test_the_end_of_the_body_cancels_what_runs():
    events = []

    async def rollout() -> None:
        try:
            await forever()
        finally:
            await asyncio.sleep(0.01)
            events.append("cleaned up")

    with RolloutThread() as thread:
        drawing = thread.submit(rollout)
        await until(lambda: "in rollout" in "".join(thread.task_stacks(1)))

    assert events == ["cleaned up"]
    with pytest.raises(asyncio.CancelledError):
        await drawing
    assert thread.blocked_s() == 0.0
    assert "has ended" in thread.stack()
    with pytest.raises(ClosedError, match="keep the training loop inside the `with` block"):
        thread.submit(forever)


async def test_a_thread_that_hangs_at_the_end_is_left_behind_with_its_stack(caplog):
    may_go_on = threading.Event()

    async def rollout() -> None:
        hang_until(may_go_on)

    begun = time.monotonic()
    with caplog.at_level(logging.WARNING), RolloutThread(grace_s=0.1) as thread:
        drawing = thread.submit(rollout)
        await until(lambda: "hang_until" in thread.stack())
    took_s = time.monotonic() - begun
    text = caplog.text
    may_go_on.set()
    await asyncio.wait([drawing])

    assert took_s < 5
    assert "# the line that hangs" in text
    assert " s: computes" in text


async def test_a_rollout_that_outlives_its_cancellation_is_named_at_the_end(caplog):
    is_enough = False

    async def stubborn() -> None:
        while not is_enough:
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                continue

    with caplog.at_level(logging.WARNING), RolloutThread(grace_s=0.1) as thread:
        drawing = thread.submit(stubborn)
        await until(lambda: "in stubborn" in "".join(thread.task_stacks(1)))
        drawing.cancel()
    text = caplog.text
    is_enough = True

    assert re.search(r" s: cancelled, test_thread\.py:\d+ in stubborn", text)


async def test_a_loop_that_a_rollout_stops_is_an_error_of_every_rollout():
    async def stopping() -> None:
        asyncio.get_running_loop().stop()

    with RolloutThread() as thread:
        pending = thread.submit(forever)
        await thread.submit(stopping)
        with pytest.raises(ClosedError, match=r"may not call loop\.stop"):
            await pending
        await until(lambda: "has ended" in thread.stack())
        with pytest.raises(ClosedError, match=r"may not call loop\.stop"):
            thread.submit(forever)
        assert thread.task_stacks(10) == []


def test_a_caller_whose_loop_has_ended_is_no_trouble():
    with RolloutThread() as thread:

        async def leave_one_behind() -> None:
            thread.submit(forever)

        asyncio.run(leave_one_behind())
        assert len(thread.task_stacks(10)) == 1

        async def another() -> int:
            return await thread.submit(lambda: asyncio.sleep(0, 5))

        assert asyncio.run(another()) == 5
    assert thread.task_stacks(10) == []


async def test_several_threads_may_submit_at_one_time(thread):
    def run(number: int) -> list[int]:
        async def sample_all() -> list[int]:
            return await asyncio.gather(
                *(thread.submit(lambda: asyncio.sleep(0.001, number)) for _ in range(100))
            )

        return asyncio.run(sample_all())

    results = await asyncio.gather(*(asyncio.to_thread(run, number) for number in range(4)))

    assert results == [[number] * 100 for number in range(4)]
    assert thread.task_stacks(10) == []
