"""One trajectory on a capture server: its address, its key and its completions."""

from __future__ import annotations

import contextlib
import itertools
import secrets
import threading
from collections.abc import Callable, Iterator
from typing import Any

from hearth.errors import ClosedError
from hearth.sdk.background import APIFuture
from hearth.sdk.capture.policy import request_seed
from hearth.sdk.capture.turns import CapturedTurn, TurnChain, build_chains


class CaptureSession:
    """``base_url`` and ``api_key`` are for an OpenAI client; ``close`` or ``with`` ends it.

    ``turns`` are the answers in the order in which they were finished, and stay after the end. A
    request that failed, or whose client did not wait for the answer, leaves none. Usable from any
    thread.
    """

    def __init__(
        self, session_id: str, base_url: str, *, seed: int | None, on_close: Callable[[], object]
    ) -> None:
        self.id = session_id
        self.base_url = base_url
        self.api_key = secrets.token_urlsafe(24)
        self.turns: list[CapturedTurn] = []
        self._seed = seed
        self._on_close = on_close
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._running: set[APIFuture[Any]] = set()
        self._is_closed = False
        self._has_warned = False

    def __enter__(self) -> CaptureSession:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def chains(self) -> list[TurnChain]:
        """What was captured so far, as sequences to train on: see ``build_chains``."""
        return build_chains(list(self.turns))

    def close(self) -> None:
        """Refuse further requests; those that still run end, and are not captured."""
        with self._lock:
            self._is_closed = True
            running = list(self._running)
        for answer in running:
            answer.cancel()
        self._on_close()

    def next_seed(self) -> int | None:
        """The seed of the next request, in order of arrival; None for a session without one."""
        number = next(self._numbers)
        return None if self._seed is None else request_seed(self._seed, number)

    def claim_warning(self) -> bool:
        """True for the first caller, who logs the session's one warning."""
        is_first, self._has_warned = not self._has_warned, True
        return is_first

    @contextlib.contextmanager
    def track(self, answer: APIFuture[Any]) -> Iterator[None]:
        """Let ``close`` cancel ``answer`` while the ``with`` block runs.

        Raises:
            ClosedError: the session has ended.
        """
        with self._lock:
            self._running.add(answer)
            is_closed = self._is_closed
        try:
            if is_closed:
                raise self.closed_error()
            yield
        finally:
            answer.cancel()
            with self._lock:
                self._running.discard(answer)

    def keep(self, turn: CapturedTurn) -> None:
        """Add a finished answer.

        Raises:
            ClosedError: the session has ended.
        """
        with self._lock:
            if self._is_closed:
                raise self.closed_error()
            self.turns.append(turn)

    def closed_error(self) -> ClosedError:
        """The error of a request that comes too late."""
        return ClosedError(
            f"session {self.id} must be open, got a closed one: its trajectory has ended"
        )
