"""The thread that rollout functions run on, so that one that computes does not hold up the trainer.

A rollout function is the user's: between two of its awaits it may parse, score or hang for as long
as it likes. Here it only holds up other rollouts, and this file can tell for how long and in which
line. What it awaits of the SDK is done on the SDK's own loop, and may be awaited on any.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from types import CoroutineType, FrameType, GeneratorType
from typing import Any, Generic, TypeVar, cast

from hearth.errors import ClosedError
from training.rollouts.daemon_threads import DaemonThreads
from training.rollouts.failures import run_contained

logger = logging.getLogger(__name__)

T = TypeVar("T")

_NAME = "hearth-rollouts"
_BEAT_S = 0.25
_LATE_S = 2 * _BEAT_S
"""Two missed beats; less than that is a busy machine."""
_MOST_PLACES = 4
"""As many frames as a rollout's line shows."""


class RolloutThread:
    """An event loop on a daemon thread, from the construction on; a context manager.

    The end of the body cancels what still runs and waits ``grace_s`` seconds for it. A thread that
    does not end by then is left behind, with a warning that says where it hangs.
    """

    def __init__(self, *, grace_s: float = 3.0) -> None:
        self._grace_s = grace_s
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(DaemonThreads(f"{_NAME}-blocking"))
        self._lock = threading.Lock()
        # Guarded by the lock: running calls, oldest first, and whether the loop has ended.
        self._calls: dict[_Call[Any], None] = {}
        self._has_ended = False
        self._was_closed = False
        self._beat_at = time.monotonic()
        self._thread = threading.Thread(target=self._run_loop, name=_NAME, daemon=True)
        self._thread.start()

    def __enter__(self) -> RolloutThread:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def submit(self, fn: Callable[[], Coroutine[Any, Any, T]]) -> asyncio.Future[T]:
        """The future, on the caller's loop, of ``fn()`` on the thread's.

        ``fn`` is called on the thread, under a copy of the caller's context variables. Cancelling
        the future cancels the coroutine, and keeps one that has not begun from beginning. The
        future itself is then done at once; it does not wait for the coroutine's end.

        Raises:
            ClosedError: the thread has ended. The future has it where a rollout stopped the loop.
        """
        call = _Call(fn)
        with self._lock:
            if self._has_ended:
                raise self._closed_error()
            self._calls[call] = None
            self._loop.call_soon_threadsafe(self._begin, call)  # copies the context
        call.future.add_done_callback(lambda future: self._give_up(call, future))
        return call.future

    def blocked_s(self) -> float:
        """For how many seconds the thread's loop has not come to run anything.

        0.0 while it misses half a second at most, and when the thread has ended.
        """
        if not self._thread.is_alive():
            return 0.0
        silent_s = time.monotonic() - self._beat_at
        return silent_s if silent_s > _LATE_S else 0.0

    def stack(self) -> str:
        """What the thread is doing, as in a traceback: the line where a rollout hangs comes last.

        The frames that only lead to the rollout are left out.
        """
        # Documented, whatever its name says.
        frames_of = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
        frame = frames_of.get(self._thread.ident or 0)
        if frame is None:
            return f"  thread {_NAME} has ended\n"
        frames = traceback.extract_stack(frame)
        leading = (__file__, run_contained.__code__.co_filename)
        own = [index for index, frame in enumerate(frames) if frame.filename in leading]
        return "".join(traceback.format_list(frames[own[-1] + 1 if own else 0 :]))

    def task_stacks(self, limit: int) -> list[str]:
        """One line for each of the ``limit`` oldest rollouts under way: its age and where it is.

        Example: ``12.3 s: rollout.py:41 in rollout_fn, tasks.py:639 in sleep``
        """
        with self._lock:
            calls = list(self._calls)[: max(0, limit)]
        return [call.describe() for call in calls]

    def close(self) -> None:
        """Cancel what runs and wait for it, ``grace_s`` seconds at most."""
        with self._lock:
            if self._was_closed:
                return
            self._was_closed = True
            if not self._has_ended:
                self._has_ended = True
                self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(self._grace_s)
        if self._thread.is_alive():
            logger.warning(
                "thread %s does not end within %g s and is left behind; it is in\n%s"
                "and its rollouts are\n%s",
                _NAME,
                self._grace_s,
                self.stack(),
                "\n".join(self.task_stacks(8)),
            )

    def _run_loop(self) -> None:
        self._beat()
        try:
            self._loop.run_forever()
        except (SystemExit, KeyboardInterrupt) as error:  # of a task that a rollout has started
            logger.error("a task of a rollout has ended the rollouts' event loop with %r", error)
        with self._lock:
            self._has_ended = True
        try:
            self._cancel_tasks()
        finally:
            with self._lock:
                rest = list(self._calls)
                self._calls.clear()
            for call in rest:
                call.resolve(None if self._was_closed else self._closed_error())
            self._loop.close()

    def _beat(self) -> None:
        self._beat_at = time.monotonic()
        self._loop.call_later(_BEAT_S, self._beat)

    def _cancel_tasks(self) -> None:
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self._loop.run_until_complete(asyncio.wait(tasks))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())

    def _begin(self, call: _Call[T]) -> None:
        with self._lock:
            if call.future.cancelled():
                del self._calls[call]
            elif not self._has_ended:
                call.task = self._loop.create_task(run_contained(call.fn))
                call.task.add_done_callback(lambda task: self._finish(call, task))

    def _give_up(self, call: _Call[T], future: asyncio.Future[T]) -> None:
        """The caller's future is done: if it was cancelled, cancel the call."""
        if not future.cancelled():
            return
        with self._lock:
            # The loop is open for as long as it holds a call.
            if call in self._calls and call.task is not None:
                self._loop.call_soon_threadsafe(call.task.cancel)

    def _finish(self, call: _Call[T], task: asyncio.Task[T]) -> None:
        with self._lock:
            self._calls.pop(call, None)
        if not task.cancelled():
            call.resolve(task.exception())
        else:
            call.resolve(self._closed_error() if self._has_ended and not self._was_closed else None)

    def _closed_error(self) -> ClosedError:
        if self._was_closed:
            return ClosedError(
                "rollouts must be started while their thread runs, got one after its end: keep the "
                "training loop inside the `with` block"
            )
        return ClosedError(
            "the event loop that rollouts share must run on, got stopped by one of them: a rollout "
            "may not call loop.stop(), nor sys.exit() in a task that it starts"
        )


class _Call(Generic[T]):
    """One rollout under way: a task on the thread, a future on the loop of who asked for it."""

    def __init__(self, fn: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self.fn = fn
        self.task: asyncio.Task[T] | None = None
        self._caller = asyncio.get_running_loop()
        self.future: asyncio.Future[T] = self._caller.create_future()
        self._submitted_at = time.monotonic()

    def resolve(self, error: BaseException | None) -> None:
        """Give the caller ``error``, or else the task's result; without one, a cancellation."""
        try:
            self._caller.call_soon_threadsafe(self._resolve, error)
        except RuntimeError:
            logger.debug("a rollout ended later than the loop that asked for it")

    def describe(self) -> str:
        """Its age and where it is, as far as one line goes."""
        state = "cancelled, " if self.future.cancelled() else ""
        return f"{time.monotonic() - self._submitted_at:.1f} s: {state}{describe_place(self.task)}"

    def _resolve(self, error: BaseException | None) -> None:
        if self.future.done():
            return
        if error is not None:
            self.future.set_exception(error)
        elif self.task is None or self.task.cancelled():
            self.future.cancel()
        else:
            self.future.set_result(self.task.result())


def describe_place(task: asyncio.Task[Any] | None) -> str:
    """Where a task of ``run_contained`` is: the frames of what it awaits, the outermost first."""
    coroutine = None if task is None else task.get_coro()
    if not isinstance(coroutine, CoroutineType):
        return "has not begun"
    if coroutine.cr_running:
        return "computes"
    places = [_describe_frame(frame) for frame in _frames(coroutine)][1:]
    if len(places) > _MOST_PLACES:
        places = [*places[: _MOST_PLACES - 1], "...", places[-1]]
    return ", ".join(places) or "is about to begin or to end"


def _frames(awaited: object) -> Iterator[FrameType]:
    """The frames of a suspended coroutine and of what it awaits, the outermost first."""
    while True:
        frame: FrameType | None
        if isinstance(awaited, CoroutineType):
            coroutine = cast("CoroutineType[Any, Any, Any]", awaited)
            frame, awaited = coroutine.cr_frame, coroutine.cr_await
        elif isinstance(awaited, GeneratorType):
            generator = cast("GeneratorType[Any, Any, Any]", awaited)
            frame, awaited = generator.gi_frame, generator.gi_yieldfrom
        else:
            return
        if frame is None:  # it has ended meanwhile
            return
        yield frame


def _describe_frame(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"
