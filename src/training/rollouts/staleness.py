"""The off-policy gate: how many rows may be submitted, and which of them a batch trains.

A pure state machine. Its driver tells it what happens (a row is submitted, finished, rejected or
taken, a batch ends, a version is published) and asks it for numbers. It knows no clock, no tasks
and no tokens; how long to wait for a slow row is the driver's to say.

Legend: P rows per step, G completions per row, B = P * G samples per step, O the most versions by
which a row may be late, C the most samples in flight.

``version`` counts weight syncs, ``step`` is the index of the batch that is being formed. One
publication may still be under way while the next batch is formed and trained, so that
``version <= step <= version + 1``. A row that batch k trains has the offset ``k - submit_version``,
and no offset is above O. So a row of version v is *due* in batch v + O: then or never.

A batch takes the oldest finished rows of a *window*: of the unresolved rows (submitted, neither
taken nor rejected nor dropped) in the order of submission, as many as it has places left, and
``slack`` more. So a few slow rows do not stall the rest, and batches are not the shortest answers
first.

Why no finished row goes stale. Let r be a row of version v, submitted while batch s had taken t
rows; its elders are r itself and the rows before it. The room then left at most
``(O + v + 1 - s) * P - t`` unresolved elders. Until batch v + O begins, another
``(v + O - s) * P - t`` places are filled. If elders fill them all, at most P elders remain. Else
look at the last younger row that filled one: it stood in the window, after at most
``places left - 1 + slack`` elders, of which ``slack <= P`` remain when that batch is full. Either
way fewer than P unresolved rows stand before r when batch v + O begins. That batch therefore has a
place for every due row, and a row that is not due gets one only while more are left than due rows
want.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, takewhile

from hearth.errors import ConfigError


@dataclass(frozen=True)
class GateLimits:
    """What the gate holds to.

    Raises:
        ConfigError: a limit breaks its rule.
    """

    prompt_groups_per_step: int
    """Rows that a full batch trains (P); at least 1."""
    completions_per_prompt: int
    """Samples of a row, which are submitted together (G); at least 1."""
    max_head_offpolicy_versions: int = 0
    """Versions by which a row may be late when it is trained (O); 0 is on-policy."""
    max_concurrency_rollout_sample: int | None = None
    """Samples in flight at most (C), no fewer than a row has; None sets no limit."""
    fifo_slack: int | None = None
    """Rows that a full batch may leave behind younger ones, 0 to P; 0 trains rows strictly in the
    order of submission. None is a quarter of P, and at least 1."""

    def __post_init__(self) -> None:
        self._require_at_least(1, prompt_groups_per_step=self.prompt_groups_per_step)
        self._require_at_least(1, completions_per_prompt=self.completions_per_prompt)
        self._require_at_least(0, max_head_offpolicy_versions=self.max_head_offpolicy_versions)
        limit = self.max_concurrency_rollout_sample
        if limit is not None and limit < self.completions_per_prompt:
            raise ConfigError(
                "max_concurrency_rollout_sample must be None or >= completions_per_prompt "
                f"({self.completions_per_prompt}), got {limit}: a row's completions start together"
            )
        if not 0 <= self.slack <= self.prompt_groups_per_step:
            raise ConfigError(
                "fifo_slack must be None or between 0 and prompt_groups_per_step "
                f"({self.prompt_groups_per_step}), got {self.fifo_slack}: with more rows left "
                "behind, one batch would not have places for all that come due in it"
            )

    @staticmethod
    def _require_at_least(least: int, **fields: int) -> None:
        for name, value in fields.items():
            if value < least:
                raise ConfigError(f"{name} must be >= {least}, got {value}")

    @property
    def slack(self) -> int:
        """The slack in force, in rows."""
        if self.fifo_slack is None:
            return max(1, self.prompt_groups_per_step // 4)
        return self.fifo_slack


@dataclass(frozen=True)
class Taken:
    """A row that went into a batch. Versions count weight syncs since the start."""

    row: int
    submit_version: int
    finish_version: int
    """The version when its group became usable."""
    offset: int
    """Versions between its submission and the batch that trains it: ``in_flight + in_queue``."""

    @property
    def in_flight(self) -> int:
        """Versions that went by while it ran."""
        return self.finish_version - self.submit_version

    @property
    def in_queue(self) -> int:
        """Versions that went by while it waited for its batch."""
        return self.offset - self.in_flight


@dataclass
class _Row:
    key: int
    submit_version: int
    finish_version: int | None = None


class StalenessGate:
    """Admits rows and forms batches so that no row is trained more than O versions late.

    Rows are named by integers of the driver's choice, each used once. Every call takes O(1) time
    or O(P + slack). A call that does not fit the state raises RuntimeError and changes nothing.
    """

    def __init__(self, limits: GateLimits) -> None:
        self.limits = limits
        self.version = 0
        self.step = 0
        self.stale_drops = 0
        # Ordered dicts, since a plain dict walks over the holes that taken rows left at its front.
        self._unresolved: OrderedDict[int, _Row] = OrderedDict()
        self._running: OrderedDict[int, _Row] = OrderedDict()
        self._known: set[int] = set()
        self._num_taken = 0
        self._num_accepted = 0

    @property
    def unresolved(self) -> int:
        """Rows submitted and neither taken nor rejected nor dropped."""
        return len(self._unresolved)

    @property
    def running_rows(self) -> int:
        """Rows submitted whose group is not there yet."""
        return len(self._running)

    @property
    def running_samples(self) -> int:
        """Samples of the rows that run."""
        return self.running_rows * self.limits.completions_per_prompt

    @property
    def accepted_samples(self) -> int:
        """Samples of the rows that finished, trained ones included."""
        return self._num_accepted * self.limits.completions_per_prompt

    def staleness_room(self) -> int:
        """Samples that may still be submitted before the next weight sync.

        As long as batches are full this is ``(O + version + 1) * B - (accepted_samples +
        running_samples)``. It is counted from the current batch, so that the places which a
        partial batch left empty do not let in rows that no later batch would have places for.
        """
        limits = self.limits
        steps = limits.max_head_offpolicy_versions + self.version + 1 - self.step
        rows = steps * limits.prompt_groups_per_step - self._num_taken - self.unresolved
        return rows * limits.completions_per_prompt

    def concurrency_room(self) -> int | None:
        """Samples that may still be put in flight; None where there is no limit."""
        limit = self.limits.max_concurrency_rollout_sample
        return None if limit is None else limit - self.running_samples

    def rows_to_submit(self) -> int:
        """Rows that may be submitted now, each with all of its samples."""
        room, concurrency = self.staleness_room(), self.concurrency_room()
        if concurrency is not None:
            room = min(room, concurrency)
        return room // self.limits.completions_per_prompt

    def submit(self, row: int) -> None:
        """Start a row: it takes room for G samples.

        Raises:
            RuntimeError: there is no room, or the row was submitted before.
        """
        if row in self._known:
            raise RuntimeError(f"row must be new to the gate, got {row} again")
        if self.rows_to_submit() < 1:
            raise RuntimeError(
                f"row must wait for room, got {row} with rows_to_submit() == 0: staleness_room() "
                f"is {self.staleness_room()}, concurrency_room() is {self.concurrency_room()}"
            )
        self._known.add(row)
        self._unresolved[row] = self._running[row] = _Row(row, self.version)

    def finish(self, row: int) -> None:
        """A running row has a usable group, and waits for its batch.

        Raises:
            RuntimeError: the row does not run.
        """
        if row not in self._running:
            raise RuntimeError(f"row must be running, got {row}: only a running row can finish")
        self._running.pop(row).finish_version = self.version
        self._num_accepted += 1

    def reject(self, row: int) -> None:
        """A row that runs or waits for its batch will not be trained; its room is free again.

        Raises:
            RuntimeError: the row is not there, or a batch has it already.
        """
        if row not in self._unresolved:
            raise RuntimeError(f"row must be running or waiting for its batch, got {row}")
        record = self._unresolved.pop(row)
        if record.finish_version is None:
            del self._running[row]
        else:
            self._num_accepted -= 1

    def drop(self, row: int) -> None:
        """Give a late row up, as ``reject`` does, and count it in ``stale_drops``.

        Raises:
            RuntimeError: the row is not among ``late_rows()``.
        """
        if row not in self._running or not self._is_due(self._running[row]):
            raise RuntimeError(f"row must be late, got {row}: late_rows() is {self.late_rows()}")
        self.reject(row)
        self.stale_drops += 1

    def ready(self) -> int:
        """Rows that ``take`` would give now."""
        return sum(1 for _ in self._takeable())

    def take(self, most: int | None = None) -> list[Taken]:
        """Move finished rows into the current batch, oldest first, at most ``most`` of them.

        A batch may be taken in several parts; empty when nothing is ready.
        """
        rows = list(islice(self._takeable(), most))
        for row in rows:
            del self._unresolved[row.key]
        self._num_taken += len(rows)
        return [self._take_row(row) for row in rows]

    def places_left(self) -> int:
        """Rows that the current batch still has to take."""
        return self.limits.prompt_groups_per_step - self._num_taken

    def late_rows(self) -> list[int]:
        """Rows that the current batch must train and that still run, oldest first.

        The batch does not become full before each of them is finished, rejected or dropped.
        """
        return [row.key for row in takewhile(self._is_due, self._running.values())]

    def end_batch(self) -> None:
        """The current batch is trained, and the next one begins.

        The batch is full, or partial with at least one row and nothing unresolved. So a due row is
        never left behind: ``take`` keeps its place free until it is taken, rejected or dropped.

        Raises:
            RuntimeError: the batch is empty or can still be filled, or the batch before it is not
                published yet.
        """
        if self._num_taken == 0 or (self.places_left() > 0 and self.unresolved > 0):
            raise RuntimeError(
                f"a batch must be full when it ends, or have the last rows, got {self._num_taken} "
                f"rows of {self.limits.prompt_groups_per_step} with {self.unresolved} unresolved, "
                f"{len(self.late_rows())} of them late: take, reject or drop those first"
            )
        if self.step > self.version:
            raise RuntimeError(
                f"step must be at most version + 1, got the end of step {self.step} at version "
                f"{self.version}: call publish() for the batch before it first"
            )
        self.step += 1
        self._num_taken = 0

    def publish(self) -> None:
        """Publish the last trained batch: rows submitted from now on are a version younger.

        Raises:
            RuntimeError: every trained batch is published already.
        """
        if self.version == self.step:
            raise RuntimeError(
                f"version must be at most step, got a publication at version {self.version} and "
                f"step {self.step}: end a batch before it is published"
            )
        self.version += 1

    def _is_due(self, row: _Row) -> bool:
        return row.submit_version + self.limits.max_head_offpolicy_versions <= self.step

    def _takeable(self) -> Iterator[_Row]:
        """Finished rows of the window that leave a place for every due row, oldest first."""
        places = self.places_left()
        window = list(islice(self._unresolved.values(), places + self.limits.slack))
        # Due rows are the oldest and at most as many as places, so the window has all of them.
        free = places - sum(map(self._is_due, window))
        for row in window:
            if row.finish_version is None:
                continue
            if not self._is_due(row):
                if free == 0:
                    return
                free -= 1
            yield row

    def _take_row(self, row: _Row) -> Taken:
        assert row.finish_version is not None
        offset = self.step - row.submit_version
        return Taken(row.key, row.submit_version, row.finish_version, offset)
