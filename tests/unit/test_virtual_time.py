import asyncio
import time

import pytest
from tests.unit.virtual_time import DeadlockError, now, run_virtual


def test_an_hour_of_sleep_takes_no_time_and_the_clock_shows_it():
    async def sleeps() -> tuple[float, float]:
        before = now()
        await asyncio.sleep(3600)
        return before, now()

    started_s = time.process_time()
    assert run_virtual(sleeps) == (0.0, 3600.0)
    assert time.process_time() - started_s < 10


def test_sleeps_longer_than_the_selector_waits_at_once_end_on_time():
    async def sleeps() -> float:
        await asyncio.sleep(7 * 24 * 3600 + 0.25)
        return now()

    assert run_virtual(sleeps) == 7 * 24 * 3600 + 0.25


def test_tasks_wake_in_the_order_of_their_times():
    woken: list[tuple[float, str]] = []

    async def sleeper(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        woken.append((now(), name))

    async def main() -> None:
        await asyncio.gather(sleeper("c", 3), sleeper("a", 1), sleeper("b", 2), sleeper("d", 3.5))

    run_virtual(main)
    assert woken == [(1.0, "a"), (2.0, "b"), (3.0, "c"), (3.5, "d")]


def test_tasks_that_wake_at_one_time_wake_in_the_order_in_which_they_went_to_sleep():
    woken: list[int] = []

    async def sleeper(number: int) -> None:
        await asyncio.sleep(5)
        woken.append(number)

    async def main() -> None:
        await asyncio.gather(*(sleeper(number) for number in range(20)))

    run_virtual(main)
    assert woken == list(range(20))


def test_a_timeout_fires_at_its_virtual_time():
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(60):
                await asyncio.Event().wait()
        return now()

    assert run_virtual(main) == 60.0


def test_what_is_ready_runs_before_the_clock_moves():
    seen: list[float] = []

    async def main() -> None:
        later = asyncio.create_task(asyncio.sleep(1))
        for _ in range(50):
            await asyncio.sleep(0)
            seen.append(now())
        await later

    run_virtual(main)
    assert seen == [0.0] * 50


def test_a_deadlock_is_an_error_that_names_the_time_and_who_waits():
    async def stuck() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        await asyncio.sleep(12)
        await asyncio.create_task(stuck(), name="the-stuck-one")

    with pytest.raises(DeadlockError, match=r"nothing is scheduled at 12\.0 s: .*the-stuck-one"):
        run_virtual(main)


def test_a_heartbeat_does_not_hide_a_deadlock():
    tidied_s: list[float] = []

    async def heartbeat() -> None:
        try:
            while True:
                await asyncio.sleep(10)
        finally:
            await asyncio.sleep(5)
            tidied_s.append(now())

    async def main() -> None:
        beating = asyncio.create_task(heartbeat(), name="heartbeat")
        await asyncio.Event().wait()
        await beating

    with pytest.raises(DeadlockError, match=r"must not pass 1000 s, got 1010\.0 s: .*heartbeat"):
        run_virtual(main, limit_s=1000)
    assert tidied_s == [1005.0]


def test_an_error_of_the_coroutine_comes_out_as_it_is():
    async def fails() -> None:
        await asyncio.sleep(1)
        raise LookupError("no such row")

    with pytest.raises(LookupError, match="no such row"):
        run_virtual(fails)


def test_a_task_that_catches_its_cancellation_can_still_sleep_while_it_ends():
    ended_s: list[float] = []

    async def tidy() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(5)
            ended_s.append(now())

    async def main() -> None:
        task = asyncio.create_task(tidy())
        await asyncio.sleep(1)
        task.cancel()
        await asyncio.wait([task])

    run_virtual(main)
    assert ended_s == [6.0]
