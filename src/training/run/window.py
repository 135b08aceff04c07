"""The groups between two weight syncs: sampled at once, trained as they are there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from itertools import islice
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
    """Calls ``sample(row)`` for a window's rows at once, and hands out their groups in pieces.

    The window has the groups of ``weight_sync_interval`` steps: a row that is dropped is made up
    for by the next one, as soon as it is dropped. With an interval of 0 it has all rows. The groups
    come in the order of the rows where a window is one step, so that a run repeats exactly; where
    training overlaps sampling, in the order in which they finish. A context manager: at its end the
    rows that are still being sampled are cancelled.
    """

    def __init__(
        self,
        loop: Loop[Any],
        rows: Iterator[IndexedRow],
        sample: Callable[[IndexedRow], Awaitable[RowOutcome]],
    ) -> None:
        self._config = loop.config
        self._run = loop.run
        self._rows = rows
        self._sample = sample
        self._tasks: list[asyncio.Task[RowOutcome]] = []
        self._num_counted = 0
        interval = loop.config.sync.interval
        overlaps = interval != 1 or loop.config.min_samples_per_fwd_bwd is not None
        self._finished = asyncio.Queue[asyncio.Task[RowOutcome]]() if overlaps else None
        self._places = loop.config.prompt_groups_per_step
        self._ready: list[PromptGroup] = []
        self._is_last = False
        for row in islice(rows, interval * self._places or None):
            self._begin_row(row)

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

    def _begin_row(self, row: IndexedRow) -> None:
        task = asyncio.ensure_future(self._sample_row(row))
        self._tasks.append(task)
        if self._finished is not None:
            task.add_done_callback(self._finished.put_nowait)

    async def _sample_row(self, row: IndexedRow) -> RowOutcome:
        outcome = await self._sample(row)
        if outcome.group is None and (further := next(self._rows, None)) is not None:
            self._begin_row(further)
        return outcome

    async def _wait(self) -> None:
        """Wait for one more row."""
        if self._num_counted == len(self._tasks):
            self._is_last = True
            return
        with self._run.clock.span("perf/sample_wait_time"):
            if self._finished is not None:
                outcome = await (await self._finished.get())
            else:
                outcome = await self._tasks[self._num_counted]
        self._num_counted += 1
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
