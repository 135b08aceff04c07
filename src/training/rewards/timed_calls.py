"""Calls on daemon threads that are given up when they take too long.

A thread cannot be stopped from outside. One that is given up goes on until its call ends by
itself, and takes its share of the interpreter meanwhile; it does not keep the process from ending.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TypeVar

from training.rewards.errors import RewardTimeoutError, StuckRewardsError

T = TypeVar("T")

IDLE_S = 5.0
"""How long a thread without a call waits for another one."""


def _new_signal() -> Future[None]:
    future: Future[None] = Future()
    # A running future cannot be canceled by who waits for it, and is then still set in peace.
    future.set_running_or_notify_cancel()
    return future


@dataclass(eq=False)
class _Job:
    """A call on its way; what it returns it keeps by itself."""

    work: Callable[[], None]
    started: Future[None] = field(default_factory=_new_signal)
    ended: Future[None] = field(default_factory=_new_signal)
    error: BaseException | None = None
    is_over: bool = False
    is_given_up: bool = False

    def run(self) -> None:
        """Make the call and keep its error."""
        try:
            self.work()
        except BaseException as error:  # noqa: BLE001 - raised again where the call is waited for
            self.error = error


class TimedCalls:
    """Runs at most ``limit`` calls at once, a thread each; refuses with ``max_stuck`` given up.

    A thread whose call has ended takes the next one: starting a thread costs ten times a call.
    """

    def __init__(self, limit: int, max_stuck: int) -> None:
        self._limit = limit
        self._max_stuck = max_stuck
        self._lock = threading.Lock()
        self._waiting: deque[_Job] = deque()
        self._running = 0
        self._idle = 0
        self._handed: SimpleQueue[_Job] = SimpleQueue()
        """Jobs for idle threads: never more than there are of these."""
        self.stuck = 0
        """Calls that were given up and have not ended."""

    async def call(self, work: Callable[[], T], timeout_s: float | None) -> T:
        """The result of ``work()``, which has ``timeout_s`` from the moment its thread starts.

        Raises:
            RewardTimeoutError: it has not ended by then.
            StuckRewardsError: ``max_stuck`` calls were given up and have not ended.
            BaseException: what the call raised.
        """
        returned: list[T] = []
        job = _Job(lambda: returned.append(work()))
        has_begun = self._submit(job)
        try:
            if not has_begun:
                await asyncio.wrap_future(job.started)
            async with asyncio.timeout(timeout_s):
                await asyncio.wrap_future(job.ended)
        except TimeoutError:
            assert timeout_s is not None, "only the time-out above raises this"
            raise RewardTimeoutError(timeout_s) from None
        finally:
            self._leave(job)
        if job.error is not None:
            raise job.error
        return returned[0]

    def _submit(self, job: _Job) -> bool:
        """Have the job run; whether it has begun."""
        with self._lock:
            self._waiting.append(job)
            self._start_waiting()
            return job not in self._waiting

    def _leave(self, job: _Job) -> None:
        """Do without a call that has not ended; where it runs, another may take its place."""
        with self._lock:
            if job.is_over:
                return
            if job in self._waiting:
                self._waiting.remove(job)
                return
            job.is_given_up = True
            self.stuck += 1
            self._running -= 1
            self._start_waiting()

    def _start_waiting(self) -> None:
        while self._waiting and self._running < self._limit:
            job = self._waiting.popleft()
            if self.stuck >= self._max_stuck:
                job.error, job.is_over = self._refusal(), True
                job.started.set_result(None)
                job.ended.set_result(None)
                continue
            self._running += 1
            if self._idle:
                self._idle -= 1
                self._handed.put(job)
            else:
                threading.Thread(target=self._work, args=(job,), name="reward", daemon=True).start()

    def _work(self, first: _Job) -> None:
        """A thread's life: one job after the other, until there is none for a while."""
        job: _Job | None = first
        while job is not None:
            self._run(job)
            job = self._next_job()

    def _run(self, job: _Job) -> None:
        job.started.set_result(None)
        job.run()
        with self._lock:
            job.is_over = True
            if job.is_given_up:
                self.stuck -= 1
            else:
                self._running -= 1
            self._idle += 1
            self._start_waiting()
        job.ended.set_result(None)

    def _next_job(self) -> _Job | None:
        """The next job of an idle thread; None where none came."""
        try:
            return self._handed.get(timeout=IDLE_S)
        except Empty:
            with self._lock:
                if self._idle:
                    self._idle -= 1
                    return None
            return self._handed.get()  # every idle thread was handed one just now

    def _refusal(self) -> StuckRewardsError:
        return StuckRewardsError(
            f"calls of reward_fn must end, got {self.stuck} that go on after their time-out: "
            "threads cannot be stopped and slow this process down; give the function a time limit "
            "of its own, or let it be killed: guarded(reward_fn, timeout_s=..., "
            "isolation='process')"
        )
