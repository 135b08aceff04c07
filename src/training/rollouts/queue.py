"""The queue between rollouts and trainer: submits rows as the gate lets it, hands out groups.

Lives on the trainer's event loop. Rows are submitted in order; what a batch takes, and how old it
may be, is the gate's to say (``staleness``). A row that turns out to be worth nothing gives its
room back, and the next one takes its place.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from hearth.telemetry import BusyClock
from training.config.async_recipe import AsyncConfig
from training.data.rows import IndexedRow
from training.rollouts.runner import Submission
from training.rollouts.staleness import GateLimits, StalenessGate, Taken
from training.samples.batching import count_due_groups
from training.samples.groups import PromptGroup, RowOutcome


def gate_limits(config: AsyncConfig) -> GateLimits:
    """What the gate holds to; without overlap nothing is ever late.

    Raises:
        ConfigError: a limit breaks its rule.
    """
    late = config.max_head_offpolicy_versions
    return GateLimits(
        prompt_groups_per_step=config.prompt_groups_per_step,
        completions_per_prompt=config.completions_per_prompt,
        max_head_offpolicy_versions=min(0, late) if config.synchronous_training else late,
        max_concurrency_rollout_sample=config.max_concurrency_rollout_sample,
        fifo_slack=config.fifo_slack,
    )


@dataclass(frozen=True)
class TakenGroup:
    """A group that went into a batch, and how it came there."""

    group: PromptGroup
    taken: Taken


@dataclass
class _Running:
    submission: Submission
    task: asyncio.Future[None]
    since_s: float


@dataclass(frozen=True, kw_only=True)
class RunLinks:
    """What a queue asks its run, and tells it."""

    note: Callable[[RowOutcome], None]
    """Is told of every row's outcome; what it raises ends the rollouts."""
    weight_version: Callable[[], int]
    """Tells what the deployment serves now."""
    busy: BusyClock
    now: Callable[[], float]
    """The time in seconds."""
    check: Callable[[], None] = lambda: None
    """Is called while the trainer waits, and raises when waiting is in vain."""
    check_every_s: float = 5.0


class RolloutQueue:
    """Rows in, groups out, at most as stale as the config allows.

    ``run_row`` starts a row's rollouts and returns their future.
    """

    def __init__(
        self,
        config: AsyncConfig,
        rows: Iterator[IndexedRow],
        run_row: Callable[[Submission], Awaitable[RowOutcome]],
        links: RunLinks,
    ) -> None:
        self.gate = StalenessGate(gate_limits(config))
        self._config = config
        self._rows = rows
        self._run_row = run_row
        self._links = links
        self._running: dict[int, _Running] = {}
        self._given_up: set[asyncio.Future[None]] = set()
        self._groups: dict[int, PromptGroup] = {}
        self._failure: Exception | None = None
        self._changed = asyncio.Event()
        self._late_since: float | None = None

    async def piece(self) -> list[TakenGroup]:
        """The groups that go through forward and backward next.

        Empty when the batch has all its groups, or those that it has are the last.

        Raises:
            Exception: what ended the rollouts; groups that make a whole batch come before it.
        """
        while True:
            self.submit()
            if count := self._due():
                self._late_since = None
                return [
                    TakenGroup(self._groups.pop(taken.row), taken)
                    for taken in self.gate.take(count)
                ]
            if self.gate.places_left() == 0:
                return []
            if self._failure is not None:
                raise self._failure
            if not self._running and not self._groups:
                return []
            await self._wait()

    def submit(self) -> None:
        """Start as many rows as there is room for."""
        if self._failure is not None:
            return
        for row in itertools.islice(self._rows, max(0, self.gate.rows_to_submit())):
            self.gate.submit(row.index)
            submission = Submission(row, self.gate.version, self._links.weight_version())
            task = asyncio.ensure_future(self._run(submission))
            self._running[row.index] = _Running(submission, task, self._links.now())

    async def close(self) -> None:
        """Submit no more rows, cancel what runs, and wait for its end."""
        self._rows = iter(())  # a weight sync that ends meanwhile makes room
        tasks = [running.task for running in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *self._given_up, return_exceptions=True)

    @property
    def num_ready(self) -> int:
        """Groups that wait for their batch."""
        return len(self._groups)

    def oldest(self) -> tuple[IndexedRow, float] | None:
        """The row that has run longest, and for how many seconds."""
        if not self._running:
            return None
        first = next(iter(self._running.values()))
        return first.submission.row, self._links.now() - first.since_s

    def fail(self, error: Exception) -> None:
        """Submit no more rows: without what failed, none can be trained."""
        self._failure = self._failure or error
        self._changed.set()

    async def _run(self, submission: Submission) -> None:
        index = submission.row.index
        try:
            with self._links.busy.sample():
                outcome = await self._run_row(submission)
            self._links.note(outcome)
        except Exception as error:  # noqa: BLE001 - whatever a rollout function raises
            self.fail(error)
            return
        finally:
            self._running.pop(index, None)
        if outcome.group is None:
            self.gate.reject(index)
        else:
            self._groups[index] = outcome.group
            self.gate.finish(index)
        self.submit()
        self._changed.set()

    def _due(self) -> int:
        """How many groups go through forward and backward now; 0 waits for more."""
        if self._config.synchronous_training and self._running:
            return 0
        return count_due_groups(
            self._config,
            ready=self.gate.ready(),
            places=self.gate.places_left(),
            is_last=not self._running and self._failure is None,
        )

    async def _wait(self) -> None:
        """Wait until a row ends; give late rows up when their time is over."""
        self._changed.clear()
        patience = self._late_patience()
        if patience == 0:
            self._drop_late_rows()
            return
        timeout = (
            self._links.check_every_s
            if patience is None
            else min(patience, self._links.check_every_s)
        )
        try:
            # Not wait_for: before Python 3.12 it loses a cancellation that comes with the event.
            async with asyncio.timeout(timeout):
                await self._changed.wait()
        except TimeoutError:
            self._links.check()

    def _late_patience(self) -> float | None:
        """Seconds that late rows may still be waited for.

        None while the batch waits for other rows too, or where late rows have all time.
        """
        limit, late = self._config.late_row_wait_s, self.gate.late_rows()
        is_all = late and self.gate.ready() + len(late) >= self.gate.places_left()
        if limit is None or not is_all:
            self._late_since = None
            return None
        if self._late_since is None:
            self._late_since = self._links.now()
        return max(0.0, limit - (self._links.now() - self._late_since))

    def _drop_late_rows(self) -> None:
        self._late_since = None
        for index in self.gate.late_rows():
            running = self._running.pop(index)
            # While its finished rollouts can still be asked for.
            self._links.note(RowOutcome(running.submission.row, dropped="stale"))
            running.task.cancel()
            self._given_up.add(running.task)
            running.task.add_done_callback(self._given_up.discard)
            self.gate.drop(index)
