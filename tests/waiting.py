"""Waiting for what another thread or process does, with an end."""

from __future__ import annotations

import time
from collections.abc import Callable

from hearth.launch.records import ProcessId


def wait_until(
    is_so: Callable[[], bool], timeout_s: float = 60.0, what: str = "", pause_s: float = 0.01
) -> None:
    """Look every ``pause_s`` seconds; after ``timeout_s`` the test fails, and says ``what`` was
    waited for."""
    end_s = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < end_s, f"waited {timeout_s} s for {what or is_so}"
        time.sleep(pause_s)


def is_running(*pids: int) -> bool:
    """Whether one of these processes lives."""
    return any(ProcessId.of(pid) is not None for pid in pids)
