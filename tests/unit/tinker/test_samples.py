"""Sampling requests: how many there may be, how long results stay, and what ends with a session."""

from __future__ import annotations

import asyncio

import pytest

from hearth.errors import BusyError, ClosedError
from hearth.tinker.front import MOST_SAMPLES, SamplingRequests


async def never() -> bytes:
    return await asyncio.Future()


async def answer() -> bytes:
    return b"J{}"


def test_a_key_has_so_many_samples_in_flight_whatever_the_requests_ask_for() -> None:
    async def run() -> None:
        samples = SamplingRequests()
        for number in range(16):
            samples.begin(f"sample:s:{number}", "alice", never, MOST_SAMPLES // 16)

        with pytest.raises(BusyError, match=f"at most {MOST_SAMPLES}"):
            samples.begin("sample:s:16", "alice", never)
        samples.begin("sample:s:0", "alice", never, MOST_SAMPLES)  # known: it is the same one
        samples.begin("sample:t:0", "bob", answer, MOST_SAMPLES)
        assert await samples.wait("sample:t:0", "bob", 9) == b"J{}"

        samples.cancel("sample:s:3", "alice")
        samples.begin("sample:s:16", "alice", never, MOST_SAMPLES // 16)
        samples.end_session("s")

    asyncio.run(run())


def test_what_nobody_fetches_takes_no_room_of_later_samples() -> None:
    async def run() -> None:
        samples = SamplingRequests(most_kept=2)
        for number in range(3):
            samples.begin(f"sample:s:{number}", "alice", answer, MOST_SAMPLES)
            samples.begin(f"sample:t:{number}", "bob", answer)
            assert await samples.wait(f"sample:t:{number}", "bob", 9) == b"J{}"

        with pytest.raises(ClosedError, match="a recent sample"):
            await samples.wait("sample:s:0", "alice", 9)
        for _ in range(2):
            assert await samples.wait("sample:s:2", "alice", 9) == b"J{}"

    asyncio.run(run())


def test_a_session_that_ends_takes_its_samples_along() -> None:
    async def run() -> None:
        samples = SamplingRequests()
        samples.begin("sample:s1:sample:0:1", "alice", never, MOST_SAMPLES)
        waiting = asyncio.create_task(samples.wait("sample:s1:sample:0:1", "alice", 9))
        await asyncio.sleep(0)

        samples.end_session("s1")

        with pytest.raises(ClosedError):
            await waiting
        samples.begin("sample:s10:sample:0:1", "alice", answer, MOST_SAMPLES)
        samples.end_session("s1")
        assert await samples.wait("sample:s10:sample:0:1", "alice", 9) == b"J{}"

    asyncio.run(run())


@pytest.mark.slow
def test_twenty_thousand_requests_leave_the_last_4096_results() -> None:
    async def run() -> None:
        samples = SamplingRequests()
        for number in range(20_000):
            samples.begin(f"sample:s:{number}", "alice", answer)
            assert await samples.wait(f"sample:s:{number}", "alice", 9) == b"J{}"

        assert await samples.wait(f"sample:s:{20_000 - 4096}", "alice", 9) == b"J{}"
        with pytest.raises(ClosedError):
            await samples.wait(f"sample:s:{20_000 - 4097}", "alice", 9)

    asyncio.run(run())
