"""Events while runs grow: watches their files only while somebody listens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

import orjson

from hearth.errors import BusyError
from hearth.viewer.library import Library
from hearth.viewer.run import Signature

LOOK_EVERY_S = 0.4
STATES_EVERY_S = 2.0
"""States change without a file: a process dies."""
_SIGN_OF_LIFE_S = 15.0
MOST_LISTENERS = 32

_Seen = dict[str, tuple[Signature, str | None]]


class Live:
    """Tells every listener when the files of a run change. Used on one event loop."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._queues: set[asyncio.Queue[bytes | None]] = set()
        self._watcher: asyncio.Task[None] | None = None
        self._is_closed = False

    async def listen(self) -> AsyncGenerator[bytes]:
        """Server-sent events, until the listener leaves or the viewer ends.

        Raises:
            BusyError: as many listen as may.
        """
        if len(self._queues) >= MOST_LISTENERS:
            raise BusyError(f"listeners must be at most {MOST_LISTENERS}, got one more")
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(1000)
        self._queues.add(queue)
        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.create_task(self._watch())
        try:
            yield b"retry: 1000\n\n"
            while not self._is_closed:
                try:
                    event = await asyncio.wait_for(queue.get(), _SIGN_OF_LIFE_S)
                except TimeoutError:
                    event = b": still here\n\n"
                if event is None:
                    return
                yield event
        finally:
            self._queues.discard(queue)
            if not self._queues and self._watcher is not None:
                self._watcher.cancel()
                self._watcher = None

    def close(self) -> None:
        """End all listeners' streams."""
        self._is_closed = True
        self._tell(None)

    async def _watch(self) -> None:
        seen = await asyncio.to_thread(self._look, {}, True)
        asked_states = time.monotonic()
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            with_states = time.monotonic() - asked_states >= STATES_EVERY_S
            now = await asyncio.to_thread(self._look, seen, with_states)
            if with_states:
                asked_states = time.monotonic()
            if now == seen:
                continue
            for event in await asyncio.to_thread(self._describe, seen, now):
                self._tell(b"data: " + orjson.dumps(event) + b"\n\n")
            seen = now

    def _look(self, seen: _Seen, with_states: bool) -> _Seen:
        found: _Seen = {}
        for run in self._library.runs():
            signature = run.signature()
            before = seen.get(run.key)
            state = before[1] if before is not None else None
            if with_states or before is None or before[0] != signature:
                state = run.state().state
            found[run.key] = (signature, state)
        return found

    def _describe(self, seen: _Seen, now: _Seen) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        for run in self._library.runs():
            if run.key in now and seen.get(run.key) != now[run.key]:
                run.refresh()
                state = now[run.key][1]
                step = run.metrics.step
                events.append({"run": run.key, "step": step, "state": state})
        gone = [key for key in seen if key not in now]
        return events + [{"run": key, "step": None, "state": None} for key in gone]

    def _tell(self, event: bytes | None) -> None:
        for queue in self._queues:
            # Who does not read looks at everything again with the next event anyway.
            if not queue.full():
                queue.put_nowait(event)
