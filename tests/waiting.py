"""Waiting for what another thread or process does, with an end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from hearth.launch.records import ProcessId


def wait_until(
    is_so: Callable[[], bool], timeout_s: float = 240.0, what: str = "", pause_s: float = 0.01
) -> None:
    """Look every ``pause_s`` seconds; after ``timeout_s`` the test fails, and says ``what`` was
    waited for."""
    end_s = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < end_s, f"waited {timeout_s} s for {what or is_so}"
        time.sleep(pause_s)


async def until(is_so: Callable[[], object], timeout_s: float = 120.0) -> None:
    """Look again and again while the event loop goes on, for ``timeout_s`` seconds at most."""
    async with asyncio.timeout(timeout_s):
        while not is_so():
            await asyncio.sleep(0.005)


def is_running(*pids: int) -> bool:
    """Whether one of these processes lives."""
    return any(ProcessId.of(pid) is not None for pid in pids)
