"""An event loop on which time costs nothing: when no callback is ready, its clock jumps to a timer.

Coroutines that only sleep and wait for each other then run in an order that is always the same, at
times that are exact. Threads and sockets have no place here: the clock does not wait for them.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from itertools import count
from typing import Any, TypeVar

Result = TypeVar("Result")


class DeadlockError(RuntimeError):
    """Every task waits, and no timer would wake any (or the virtual time ran out)."""


def run_virtual(
    coro_fn: Callable[[], Coroutine[Any, Any, Result]], *, limit_s: float = 1e6
) -> Result:
    """Run ``coro_fn()`` to its end on a loop whose clock starts at 0.

    Raises:
        DeadlockError: nothing is ready and nothing is scheduled, or the clock would pass
            ``limit_s`` virtual seconds, as it does when all but a heartbeat is stuck.
    """
    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(limit_s)) as runner:
        return runner.run(coro_fn())


def now() -> float:
    """Seconds on the running loop's clock: virtual ones under ``run_virtual``."""
    return asyncio.get_running_loop().time()


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock moves only when nothing is ready, and then straight to a timer."""

    def __init__(self, limit_s: float) -> None:
        self._now = 0.0
        self._limit_s = limit_s
        self._order = count()
        super().__init__(_JumpingSelector(self._jump))

    def time(self) -> float:
        return self._now

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        moment = _Moment(when, next(self._order))
        return super().call_at(moment, callback, *args, context=context)

    def _jump(self, seconds: float | None) -> None:
        if seconds is None:
            raise DeadlockError(
                f"nothing is ready and nothing is scheduled at {self._now} s: {self._waiting()}"
            )
        if self._now + seconds > self._limit_s:
            limit_s = self._limit_s
            # What the cancelled tasks still do while the loop closes gets as much time again.
            self._limit_s *= 2
            raise DeadlockError(
                f"the virtual time must not pass {limit_s} s, got {self._now + seconds} s: "
                f"{self._waiting()}"
            )
        self._now += seconds

    def _waiting(self) -> str:
        names = sorted(f"{task.get_name()} {task.get_coro()!r}" for task in asyncio.all_tasks(self))
        return "these tasks wait: " + "; ".join(names)


class _Moment(float):
    """A time of the loop's clock; of equal ones the one that was asked for first comes first.

    The loop's heap gives timers of one time in any order. A real clock has no equal times.
    """

    order: int

    def __new__(cls, when: float, order: int) -> "_Moment":
        moment = super().__new__(cls, when)
        moment.order = order
        return moment

    def __lt__(self, other: float, /) -> bool:
        if isinstance(other, _Moment) and float(self) == float(other):
            return self.order < other.order
        return float(self) < float(other)


class _JumpingSelector(selectors.PollSelector):
    """Never waits: where another selector would, it says how long for (None: for ever)."""

    def __init__(self, jump: Callable[[float | None], None]) -> None:
        super().__init__()
        self._jump = jump

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if not events:
            self._jump(timeout)
        return events
