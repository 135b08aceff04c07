"""Which snapshot is served and which weight syncs are under way; resolves the futures that wait."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, replace
from typing import Any, Literal

from hearth.errors import ClosedError, HearthError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ServingState:
    """What is served, and the state of the last weight sync."""

    stage: Literal["idle", "loading", "done", "error"] = "idle"
    target_identity: str | None = None
    """The snapshot that ``stage`` is about."""
    error: str | None = None
    current_identity: str | None = None
    """The snapshot that is served; None before the first weight sync."""
    is_adapter: bool = False
    weight_version: int = 0
    """The number of the weight sync that is served; 0 before the first."""

    def has_settled(self, identity: str) -> bool:
        """Whether ``identity`` is served, or could not be loaded."""
        has_failed = self.stage == "error" and self.target_identity == identity
        return self.current_identity == identity or has_failed


class SyncTracker:
    """The serving state. A backend changes it; any thread may read it or wait for a sync."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sync_ended = threading.Condition(self._lock)
        self._state = ServingState()
        self._underway: list[str] = []
        self._versions: dict[str, int] = {}
        self._last_version = 0
        self._waiters: list[tuple[str, Future[ServingState]]] = []
        self._is_closed = False

    def state(self) -> ServingState:
        """The state now."""
        return self._state

    def watch_sync(self, identity: str) -> Future[ServingState]:
        """The state once ``identity`` is served or could not be loaded."""
        future: Future[ServingState] = Future()
        with self._lock:
            if self._is_closed:
                future.set_exception(closed_error())
            elif self._state.has_settled(identity):
                future.set_result(self._state)
            else:
                self._waiters = [waiter for waiter in self._waiters if not waiter[1].done()]
                self._waiters.append((identity, future))
        return future

    def begin(self, identity: str, weight_version: int | None = None) -> bool:
        """Note that ``identity`` is to be loaded; False when it is served or under way already.

        ``weight_version`` is the number it had before a restart. If the load fails, that number
        stays taken: two sets of weights never share one.
        """
        with self._lock:
            is_last = self._state.current_identity == identity and not self._underway
            if self._is_closed or is_last or identity in self._underway:
                return False
            self._underway.append(identity)
            if weight_version is not None:
                self._versions[identity] = weight_version
                self._last_version = max(self._last_version, weight_version)
            self._show_loading()
            return True

    def wait_turn(self, identity: str) -> None:
        """Return once every load that began before that of ``identity`` has ended.

        Raises:
            ClosedError: the engine was closed meanwhile.
        """
        with self._lock:
            self._sync_ended.wait_for(lambda: self._is_closed or self._underway[:1] == [identity])
            if self._is_closed:
                raise closed_error()

    def next_version(self, identity: str) -> int:
        """The version that ``identity``, whose turn it is, will be served as."""
        with self._lock:
            return self._versions.get(identity, self._last_version + 1)

    def finish(self, identity: str, *, is_adapter: bool) -> None:
        """Note that ``identity`` is served from now on, as a new version or as its own."""
        version = self._versions.pop(identity, self._last_version + 1)
        self._last_version = max(self._last_version, version)
        state = replace(
            self._state,
            stage="done",
            target_identity=identity,
            error=None,
            current_identity=identity,
            is_adapter=is_adapter,
            weight_version=version,
        )
        self._end_sync(identity, state)

    def fail(self, identity: str, error: Exception) -> None:
        """Note that ``identity`` could not be loaded; the weights before it are still served."""
        self._versions.pop(identity, None)
        # What was asked for wrongly needs no traceback.
        trace = None if isinstance(error, HearthError) else error
        logger.warning("weight sync: %s was refused: %s", identity, error, exc_info=trace)
        message = str(error) or type(error).__name__
        state = replace(self._state, stage="error", target_identity=identity, error=message)
        self._end_sync(identity, state)

    def close(self) -> None:
        """Fail every future that still waits."""
        with self._lock:
            self._is_closed = True
            waiters, self._waiters = self._waiters, []
            self._sync_ended.notify_all()
        for _, future in waiters:
            resolve_future(future, error=closed_error())

    def _show_loading(self) -> None:
        if self._underway:
            target = self._underway[0]
            self._state = replace(self._state, stage="loading", target_identity=target, error=None)

    def _end_sync(self, identity: str, state: ServingState) -> None:
        with self._lock:
            self._state = state
            ready = [future for target, future in self._waiters if state.has_settled(target)]
            self._waiters = [waiter for waiter in self._waiters if not state.has_settled(waiter[0])]
            self._underway.remove(identity)
            self._sync_ended.notify_all()
            self._show_loading()
        for future in ready:
            resolve_future(future, result=state)


def resolve_future(
    future: Future[Any], *, result: Any = None, error: Exception | None = None
) -> None:
    """Give a future its result or error, unless its holder has cancelled it."""
    try:
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)
    except InvalidStateError:
        return


def closed_error() -> ClosedError:
    """The error of a call to a deployment that was closed."""
    return ClosedError("deployment must be open, got a closed one: it was shut down")
