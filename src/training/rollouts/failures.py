"""Decides what a failed rollout means: try it again, drop it, or end the run.

``is_recoverable`` decides; ``with_retries`` and ``CircuitBreaker`` use it. The recipe decides what
becomes of a dropped rollout and its group.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import httpx

from hearth.errors import (
    ConfigError,
    EngineError,
    HearthError,
    NotReadyError,
    RequestFailedError,
    TransportError,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

RECOVERABLE_STATUSES = frozenset({408, 425, 429})
"""Beside these, all of 500 to 599."""

# Errors of clients that Hearth need not have installed, by package and class name, so that no
# package is imported to compare with them.
_NO_ANSWER = frozenset(
    {
        ("openai", "APIConnectionError"),  # APITimeoutError is one
        ("aiohttp", "ClientConnectionError"),
        ("aiohttp", "ClientPayloadError"),
        ("httpx2", "TransportError"),
        ("websockets", "ConnectionClosed"),
        ("requests", "ConnectionError"),
        ("requests", "Timeout"),
        ("requests", "ChunkedEncodingError"),
    }
)
_ANSWERED = frozenset(
    {
        ("openai", "APIStatusError"),
        ("aiohttp", "ClientResponseError"),
        ("httpx", "HTTPStatusError"),
        ("httpx2", "HTTPStatusError"),
        ("requests", "HTTPError"),
    }
)


class RecoverableRolloutError(HearthError, RuntimeError):
    """For a user's rollout to raise: the rollout may be tried again, and is dropped after that."""


class DroppedRolloutError(HearthError, RuntimeError):
    """For a rollout whose task is at fault: it is dropped at once, and says nothing about others.

    It is not tried again, since it would fail again, and no number of them ends the run as failing:
    all rollouts of a row have the same task.
    """


class RolloutsFailingError(HearthError, RuntimeError):
    """Too many rollouts failed: training on the rest would be training on a biased sample."""


def is_recoverable(error: BaseException) -> bool:
    """Whether the same rollout may work when it is tried again.

    True after a time-out; when a connection failed (of Python's own, of httpx, of this SDK, of
    the openai, aiohttp, websockets and requests clients); after an answer with HTTP status 408,
    425, 429 or 5xx; when a deployment is not ready, the platform failed, or a future failed on the
    platform's side; and when the rollout says so with ``RecoverableRolloutError``. A group is
    recoverable when all of its members are.

    Everything else is fatal, because it would fail the same way each time or is unknown:
    failed assertions, wrong types and values, other statuses, cancellation, and exceptions unknown
    here. Only the error itself is judged: a ``RuntimeError`` raised *from* a time-out is fatal, so
    that a rollout that wraps errors decides by the class that it wraps them in.
    """
    if isinstance(error, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", error)
        return all(is_recoverable(member) for member in group.exceptions)
    if isinstance(error, RequestFailedError):
        return error.failed_category == "server"
    if isinstance(error, httpx.UnsupportedProtocol):  # the URL has no scheme; it never will
        return False
    status = _http_status(error)
    if status is not None:
        return status in RECOVERABLE_STATUSES or 500 <= status < 600
    return _is_without_answer(error)


def _is_without_answer(error: BaseException) -> bool:
    ours = (RecoverableRolloutError, NotReadyError, EngineError, TransportError)
    theirs = (TimeoutError, ConnectionError, httpx.TransportError)
    return isinstance(error, ours + theirs) or _is_one_of(error, _NO_ANSWER)


def _http_status(error: BaseException) -> int | None:
    """The status that a client library's error stands for; None where it stands for none."""
    if not _is_one_of(error, _ANSWERED):
        return None
    response = getattr(error, "response", None)
    owners = ((error, "status_code"), (error, "status"), (response, "status_code"))
    return next((getattr(owner, name) for owner, name in owners if hasattr(owner, name)), None)


def _is_one_of(error: BaseException, names: frozenset[tuple[str, str]]) -> bool:
    classes = type(error).__mro__
    return any(
        (class_.__module__.partition(".")[0], class_.__name__) in names for class_ in classes
    )


class CircuitBreaker:
    """Ends a run whose rollouts fail so often that the cause is not in a single one.

    Opens after ``max_in_a_row`` failures in a row, or when a share of ``max_ratio`` or more of the
    last ``window`` outcomes failed, once ``min_observed`` are known. It then stays open. A rollout
    that returned None is not counted.
    """

    def __init__(
        self,
        *,
        max_in_a_row: int = 5,
        window: int = 20,
        min_observed: int = 10,
        max_ratio: float = 0.5,
    ) -> None:
        self._max_in_a_row = max_in_a_row
        self._min_observed = min_observed
        self._max_ratio = max_ratio
        self._has_failed: deque[bool] = deque(maxlen=window)
        self._in_a_row = 0
        self._last: BaseException | None = None
        self._counts: str | None = None

    @property
    def is_open(self) -> bool:
        """Whether ``check`` raises."""
        return self._counts is not None

    def record_success(self) -> None:
        """Count a rollout that returned a sample."""
        self._in_a_row = 0
        self._has_failed.append(False)
        self._judge()

    def record_failure(self, error: BaseException) -> None:
        """Count a rollout that was dropped after its last attempt."""
        self._in_a_row += 1
        self._last = error
        self._has_failed.append(True)
        self._judge()

    def check(self) -> None:
        """Do nothing while rollouts work.

        Raises:
            RolloutsFailingError: the breaker is open; its cause is the last error.
        """
        if self._counts is None:
            return
        raise RolloutsFailingError(
            f"rollouts must mostly succeed, got {self._counts}, last with "
            f"{type(self._last).__name__}: {self._last}: see that the deployment and whatever else "
            "the rollout function calls can be reached and keep up"
        ) from self._last

    def _judge(self) -> None:
        if self.is_open:
            return
        observed, failures = len(self._has_failed), sum(self._has_failed)
        if self._in_a_row >= self._max_in_a_row:
            self._counts = f"{self._in_a_row} failures in a row"
        elif observed >= self._min_observed and failures >= self._max_ratio * observed:
            self._counts = f"{failures} failures among the last {observed} outcomes"


@dataclass(frozen=True)
class RetryLimits:
    """How often and how long something is tried; times in seconds.

    Raises:
        ConfigError: ``attempts`` is below 1.
    """

    attempts: int
    timeout_s: float | None
    """Of each attempt; None sets no limit."""
    backoff_s: float = 0.5
    """The first pause. Pauses double, and each is jittered by half."""
    longest_backoff_s: float = 30.0
    grace_s: float = 3.0
    """How long an attempt that was cancelled is waited for."""

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ConfigError(f"attempts must be >= 1, got {self.attempts}")


async def with_retries(
    rollout: Callable[[], Awaitable[T]],
    limits: RetryLimits,
    *,
    on_failure: Callable[[BaseException, int], None],
    sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep,
) -> T:
    """What ``rollout()`` returns, tried as often as ``limits`` allows.

    ``on_failure`` is told of every recoverable failure and the number of its attempt, from 1; what
    it raises ends the trying. An attempt whose time is up, or whose caller was cancelled, is
    cancelled; one that goes on regardless is left to itself with a warning.

    Raises:
        TimeoutError: the last attempt took too long.
        RuntimeError: the rollout was cancelled, though nobody cancelled this call.
        Exception: the rollout's own: a fatal one at once, a recoverable one after the last attempt.
    """
    attempt = 0
    while True:
        attempt += 1
        try:
            return await _attempt(rollout, limits.timeout_s, limits.grace_s)
        except Exception as error:
            if not is_recoverable(error):
                raise
            on_failure(error, attempt)
            if attempt >= limits.attempts:
                raise
        pause_s = min(limits.longest_backoff_s, limits.backoff_s * 2 ** (attempt - 1))
        await sleep(pause_s * random.uniform(0.5, 1.0))


async def run_contained(work: Callable[[], Awaitable[T]]) -> T:
    """What ``work()`` returns; what it raises, as far as that leaves the event loop running.

    Raises:
        RuntimeError: it raised what is no ``Exception``, as ``sys.exit()`` does. In a task that
            ends the whole loop, or passes everybody who handles errors.
    """
    try:
        return await work()
    except (Exception, asyncio.CancelledError, GeneratorExit):
        raise
    except BaseException as error:
        raise RuntimeError(
            f"a rollout must return or raise an Exception, got {error!r}: it cannot end the process"
        ) from error


async def _attempt(
    rollout: Callable[[], Awaitable[T]], timeout_s: float | None, grace_s: float
) -> T:
    # Not asyncio.timeout, which waits without end for a body that swallows its cancellation.
    work = asyncio.ensure_future(run_contained(rollout))
    try:
        # Waiting with a time limit costs more than a rollout that returns at once.
        await asyncio.sleep(0)
        if not work.done():
            await asyncio.wait({work}, timeout=timeout_s)
        if not work.done():
            await _end(work, grace_s)
            raise TimeoutError(
                f"a rollout must return within rollout_timeout_s={timeout_s} s, got no result: "
                "raise it, or bound what the rollout waits for"
            )
    except asyncio.CancelledError:
        await _end(work, grace_s)
        raise
    if work.cancelled():
        raise RuntimeError(
            "a rollout must return or raise, got cancelled by something other than the recipe: "
            "does it cancel a task that it runs in?"
        )
    return work.result()


async def _end(work: asyncio.Future[T], grace_s: float) -> None:
    work.cancel()
    work.add_done_callback(_retrieve)
    _, running = await asyncio.wait({work}, timeout=grace_s)
    if running:
        logger.warning(
            "a rollout goes on %g s after it was cancelled and is left to itself: it must let "
            "asyncio.CancelledError pass",
            grace_s,
        )


def _retrieve(work: asyncio.Future[T]) -> None:
    """Read the exception of an abandoned rollout, or asyncio warns that nobody did."""
    if not work.cancelled():
        work.exception()
