"""How many sampling requests may be in flight."""

from __future__ import annotations

import asyncio
from typing import Protocol

from hearth.errors import ConfigError


class ConcurrencyController(Protocol):
    """Admits requests one by one; used on the SDK's loop only."""

    async def acquire(self) -> None:
        """Wait for room for one request."""
        ...

    def release(self) -> None:
        """Give one request's room back."""
        ...


class FixedConcurrencyController:
    """At most ``max_concurrent`` requests in flight, counted one by one (not by groups).

    Raises:
        ConfigError: ``max_concurrent`` is below 1.
    """

    def __init__(self, max_concurrent: int) -> None:
        if max_concurrent < 1:
            raise ConfigError(f"max_concurrent must be >= 1, got {max_concurrent}")
        self.max_concurrent = max_concurrent
        self.in_flight = 0
        self.high_water = 0
        self._semaphore: asyncio.Semaphore | None = None

    async def acquire(self) -> None:
        """Wait for room for one request."""
        if self._semaphore is None:
            self._semaphore = asyncio.Semaphore(self.max_concurrent)
        await self._semaphore.acquire()
        self.in_flight += 1
        self.high_water = max(self.high_water, self.in_flight)

    def release(self) -> None:
        """Give one request's room back."""
        assert self._semaphore is not None, "release() without acquire()"
        self.in_flight -= 1
        self._semaphore.release()
