import asyncio
import threading
import time

import pytest

from training.rollouts.daemon_threads import DaemonThreads


def threads(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(f"{name}_")]


async def test_calls_run_side_by_side_and_their_results_and_errors_come_back():
    asyncio.get_running_loop().set_default_executor(DaemonThreads("side-by-side"))
    everyone = threading.Barrier(4)

    def call(number: int) -> int:
        everyone.wait(10)
        return 10 // number

    results = await asyncio.gather(
        *(asyncio.to_thread(call, number) for number in (1, 2, 5, 0)), return_exceptions=True
    )

    assert results[:3] == [10, 5, 2]
    assert isinstance(results[3], ZeroDivisionError)


@pytest.mark.slow
def test_threads_are_used_again_and_never_more_than_their_limit():
    pool = DaemonThreads("limited")
    for _ in range(5):
        pool.submit(time.sleep, 0).result(10)
        time.sleep(0.05)
    assert len(threads("limited")) == 1

    done = [pool.submit(time.sleep, 0.001) for _ in range(500)]

    assert len(threads("limited")) <= 36
    assert [future.result(10) for future in done] == [None] * 500
    pool.shutdown()


def test_a_call_that_was_cancelled_in_the_queue_never_runs():
    pool = DaemonThreads("cancelled")
    may_go_on = threading.Event()
    blocking = [pool.submit(may_go_on.wait, 10) for _ in range(64)]
    ran: list[int] = []
    late = pool.submit(ran.append, 1)

    assert late.cancel()
    may_go_on.set()
    assert all(future.result(10) for future in blocking)
    pool.submit(ran.append, 2).result(10)

    assert ran == [2]
    pool.shutdown()


def test_its_threads_end_after_the_shutdown():
    pool = DaemonThreads("ending")
    last = pool.submit(time.sleep, 0.05)
    pool.shutdown(wait=True)

    assert last.result(10) is None
    deadline = time.monotonic() + 10
    while threads("ending"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
