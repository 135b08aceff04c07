"""The rows between two weight syncs: all sampled at once, trained as their groups are there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from training.data.rows import IndexedRow
from training.run.loop import Loop
from training.run.state import Run
from training.samples.batching import count_due_groups
from training.samples.groups import PromptGroup, RowOutcome

logger = logging.getLogger(__name__)

MAX_FAILED_ROWS = 5
"""Rows that fail one after the other before the run gives up: the platform is then at fault."""


class SampledWindow:
    """Calls ``sample(row)`` for all rows at once, and hands out their groups in pieces.

    The groups come in the order of the rows where a window is one step, so that a run repeats
    exactly; where training overlaps sampling, in the order in which they finish. A context
    manager: at its end the rows that are still being sampled are cancelled.
    """

    def __init__(
        self,
        loop: Loop[Any],
        rows: Sequence[IndexedRow],
        sample: Callable[[IndexedRow], Awaitable[RowOutcome]],
    ) -> None:
        self._config = loop.config
        self._run = loop.run
        self._tasks = [asyncio.ensure_future(sample(row)) for row in rows]
        overlaps = loop.config.sync.interval != 1 or loop.config.min_samples_per_fwd_bwd is not None
        self._unfinished = iter(asyncio.as_completed(self._tasks) if overlaps else self._tasks)
        self._places = loop.config.prompt_groups_per_step
        self._ready: list[PromptGroup] = []
        self._is_last = False

    async def __aenter__(self) -> SampledWindow:
        self._run.step_started = self._run.now()
        return self

    async def __aexit__(self, *_error: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def next_piece(self) -> list[PromptGroup]:
        """The groups that go through forward and backward next.

        Empty when the step has all its groups, or the window has no more.

        Raises:
            HearthError: several rows failed one after the other; the last one's error.
            NoSignalError: for ``no_signal_patience`` steps no row had anything to learn from.
        """
        while self._places:
            count = count_due_groups(
                self._config, ready=len(self._ready), places=self._places, is_last=self._is_last
            )
            if count:
                piece, self._ready = self._ready[:count], self._ready[count:]
                self._places -= count
                return piece
            if self._is_last:
                break
            await self._wait()
        self._places = self._config.prompt_groups_per_step
        return []

    async def _wait(self) -> None:
        """Wait for one more row."""
        result = next(self._unfinished, None)
        if result is None:
            self._is_last = True
            return
        with self._run.clock.span("perf/sample_wait_time"):
            outcome = await result
        count_outcome(self._run, outcome)
        if outcome.group is not None:
            self._ready.append(outcome.group)


def count_outcome(run: Run, outcome: RowOutcome) -> None:
    """Count what became of a row; one without a group is finished.

    Raises:
        HearthError: several rows failed one after the other; the last one's error.
        NoSignalError: for ``no_signal_patience`` steps no row had anything to learn from.
    """
    run.count_outcome(outcome)
    if outcome.error is None:
        run.failed_in_a_row = 0
        return
    run.failed_in_a_row += 1
    logger.warning("row %d is dropped: %s", outcome.row.index, outcome.error)
    if run.failed_in_a_row >= MAX_FAILED_ROWS:
        raise outcome.error
