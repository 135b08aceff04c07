"""How many sampling requests may be in flight: a fixed number, or one that adapts.

Each attempt acquires its controller first, and releases it with the outcome. A controller holds
no event loop while no request waits, so it may outlive the loops it is used on.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from hearth.errors import ConfigError

_MOST_HEADROOM = 4.0
_LEAST_QUEUE_S = 0.001
_CONGESTED_STATUSES = frozenset({429, 503})


@dataclass(frozen=True)
class RequestOutcome:
    """How one attempt at a completion ended.

    ``status`` is its HTTP status, None where there was no answer; ``attempt`` counts from 1;
    ``prefill_queue_s`` is how long the deployment says it waited for its prefill.
    """

    status: int | None
    attempt: int = 1
    prefill_queue_s: float | None = None

    @property
    def is_success(self) -> bool:
        """Whether there was a completion."""
        return self.status is not None and 200 <= self.status < 300

    @property
    def is_congestion(self) -> bool:
        """Whether the deployment had no room: 429, 503 or no answer."""
        return self.status is None or self.status in _CONGESTED_STATUSES


class ConcurrencyController(Protocol):
    """Admits attempts one by one; used on the SDK's loop only."""

    in_flight: int

    async def acquire(self) -> None:
        """Wait for room for one attempt."""
        ...

    def release(self, outcome: RequestOutcome | None = None) -> None:
        """Give one attempt's room back; None where it says nothing about the deployment's load."""
        ...


class _Gate:
    """Admits in order of asking while fewer than ``_limit()`` are in flight."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.high_water = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    def _limit(self) -> int:
        raise NotImplementedError

    async def acquire(self) -> None:
        """Wait for room for one attempt."""
        if not self._waiting and self.in_flight < self._limit():
            self._enter()
            return
        ticket = asyncio.get_running_loop().create_future()
        self._waiting.append(ticket)
        try:
            await ticket
        except asyncio.CancelledError:
            if not ticket.cancelled():
                self._leave()
            with contextlib.suppress(ValueError):
                self._waiting.remove(ticket)
            raise

    def _enter(self) -> None:
        self.in_flight += 1
        self.high_water = max(self.high_water, self.in_flight)

    def _leave(self) -> None:
        if self.in_flight < 1:
            raise RuntimeError("release() must follow an acquire(), got one more release")
        self.in_flight -= 1
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self.in_flight < self._limit():
            ticket = self._waiting.popleft()
            if not ticket.done():
                self._enter()
                ticket.set_result(None)


class FixedConcurrencyController(_Gate):
    """At most ``max_concurrent`` requests in flight, counted one by one (not by groups).

    Raises:
        ConfigError: ``max_concurrent`` is below 1.
    """

    def __init__(self, max_concurrent: int) -> None:
        if max_concurrent < 1:
            raise ConfigError(f"max_concurrent must be >= 1, got {max_concurrent}")
        super().__init__()
        self.max_concurrent = max_concurrent

    def _limit(self) -> int:
        return self.max_concurrent

    def release(self, outcome: RequestOutcome | None = None) -> None:
        """Give one attempt's room back."""
        self._leave()


class AdaptiveConcurrencyController(_Gate):
    """A window of requests in flight that grows by adding and shrinks by multiplying.

    Once a deployment reports how long requests queue for their prefill, that alone steers: after
    every ``adjustment_interval`` attempts (0: never) and at ``step_completed`` the mean queue time
    goes into a moving average; above ``prefill_queue_target`` seconds the window shrinks by
    ``multiplicative_decrease``, else it grows by ``additive_increase`` times the headroom
    ``min(target / average, 4)``. Until then congestion steers: 429, 503 or no answer shrink the
    window at once (twice over from the third attempt on), at most every ``shrink_cooldown_s``; an
    interval with successes and no congestion adds ``additive_increase``.

    A window below what is in flight admits no attempt until enough have ended.
    ``now`` is the clock, in seconds.

    Raises:
        ConfigError: a bound or a rate breaks its rule.
    """

    # Each parameter is a setting of its own, with a default: callers name the few that they change.
    def __init__(
        self,
        initial_window: int = 8,
        *,
        min_window: int = 1,
        max_window: int = 256,
        prefill_queue_target: float = 0.5,
        additive_increase: float = 1.0,
        multiplicative_decrease: float = 0.5,
        ema_alpha: float = 0.3,
        adjustment_interval: int = 32,
        shrink_cooldown_s: float = 1.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 1 <= min_window <= initial_window <= max_window:
            raise ConfigError(
                "initial_window must be within 1 <= min_window <= initial_window <= max_window, "
                f"got {min_window}, {initial_window}, {max_window}"
            )
        for name, rate in (
            ("multiplicative_decrease", multiplicative_decrease),
            ("ema_alpha", ema_alpha),
        ):
            if not 0 < rate <= 1:
                raise ConfigError(f"{name} must be in (0, 1], got {rate}")
        if prefill_queue_target <= 0 or additive_increase < 0 or adjustment_interval < 0:
            raise ConfigError(
                "prefill_queue_target must be > 0, additive_increase and adjustment_interval >= 0, "
                f"got {prefill_queue_target}, {additive_increase}, {adjustment_interval}"
            )
        super().__init__()
        self._bounds = (float(min_window), float(max_window))
        self._target_s = prefill_queue_target
        self._increase = additive_increase
        self._decrease = multiplicative_decrease
        self._alpha = ema_alpha
        self._interval = adjustment_interval
        self._cooldown_s = shrink_cooldown_s
        self._now = now
        # step_completed() is called from the recipe's thread, release() on the SDK's loop.
        self._lock = threading.Lock()
        self._window = float(initial_window)
        self._queue_ema_s: float | None = None
        self._has_queue_times = False
        self._queue_times_s: list[float] = []
        self._last_shrink_s = float("-inf")
        self._finished = self._succeeded = self._congested = 0
        self._step = _StepCounts()

    @property
    def window(self) -> int:
        """How many attempts may be in flight now."""
        return int(self._window)

    def release(self, outcome: RequestOutcome | None = None) -> None:
        """Give one attempt's room back, and adapt to its outcome."""
        if outcome is not None:
            with self._lock:
                self._record_outcome(outcome)
        self._leave()

    def step_completed(self) -> dict[str, float]:
        """Adjust to the step's queue times, return the step's numbers, and reset the counts.

        ``window``, ``prefill_queue_s`` (the moving average, once there is one), ``requests``,
        ``failures``, ``congested``, ``grown``, ``shrunk`` (how often) and ``in_flight_max``.
        """
        with self._lock:
            self._adjust_to_queue()
            self._begin_interval()
            counts, self._step = self._step, _StepCounts()
            summary = {
                "window": float(self.window),
                **{name: float(count) for name, count in vars(counts).items()},
                "in_flight_max": float(self.high_water),
            }
            if self._queue_ema_s is not None:
                summary["prefill_queue_s"] = self._queue_ema_s
            self.high_water = self.in_flight
        if self._waiting:
            # Wake the waiting attempts on their own loop, which may run in another thread.
            self._waiting[0].get_loop().call_soon_threadsafe(self._admit)
        return summary

    def _limit(self) -> int:
        return self.window

    def _record_outcome(self, outcome: RequestOutcome) -> None:
        self._finished += 1
        self._step.requests += 1
        self._step.failures += not outcome.is_success
        self._step.congested += outcome.is_congestion
        self._succeeded += outcome.is_success
        self._congested += outcome.is_congestion
        if outcome.prefill_queue_s is not None:
            self._has_queue_times = True
            self._queue_times_s.append(outcome.prefill_queue_s)
        if not self._has_queue_times and outcome.is_congestion:
            self._shrink_at_once(outcome.attempt)
        if self._interval and self._finished >= self._interval:
            if self._has_queue_times:
                self._adjust_to_queue()
            elif self._succeeded and not self._congested:
                self._resize(self._window + self._increase)
            self._begin_interval()

    def _adjust_to_queue(self) -> None:
        if not self._queue_times_s:
            return
        mean_s = sum(self._queue_times_s) / len(self._queue_times_s)
        last_s = self._queue_ema_s
        ema_s = mean_s if last_s is None else self._alpha * mean_s + (1 - self._alpha) * last_s
        self._queue_ema_s = ema_s
        if ema_s > self._target_s:
            self._resize(self._window * self._decrease)
        else:
            headroom = min(self._target_s / max(ema_s, _LEAST_QUEUE_S), _MOST_HEADROOM)
            self._resize(self._window + self._increase * headroom)

    def _shrink_at_once(self, attempt: int) -> None:
        now_s = self._now()
        if now_s - self._last_shrink_s < self._cooldown_s:
            return
        self._last_shrink_s = now_s
        self._resize(self._window * self._decrease ** (1 if attempt < 3 else 2))

    def _resize(self, window: float) -> None:
        least, most = self._bounds
        window = min(most, max(least, window))
        self._step.grown += window > self._window
        self._step.shrunk += window < self._window
        self._window = window

    def _begin_interval(self) -> None:
        self._finished = self._succeeded = self._congested = 0
        self._queue_times_s = []


@dataclass
class _StepCounts:
    requests: int = 0
    failures: int = 0
    congested: int = 0
    grown: int = 0
    shrunk: int = 0
