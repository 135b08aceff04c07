"""What the steps of a recipe work on whose rollouts and weight syncs run beside training."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace

from hearth.errors import HearthError
from training.config.async_recipe import AsyncConfig
from training.platform.run_infra import RunInfra
from training.rollouts.queue import RolloutQueue, RunLinks, TakenGroup
from training.rollouts.runner import Rollouts
from training.rollouts.thread import RolloutThread
from training.run.async_metrics import (
    WAIT,
    WAIT_FOR_MORE,
    WEIGHT_UPDATE,
    overlap_metrics,
    queue_metrics,
    staleness_metrics,
)
from training.run.background_evaluation import BackgroundEvaluation
from training.run.loop import Loop
from training.run.parity_probe import ParityProbe
from training.run.publisher import Publisher
from training.run.state import Run
from training.run.watchdog import StalledError, StallLimits, Watchdog
from training.samples.groups import RowOutcome
from training.update.information_gain import credit_metrics
from training.update.policy_update import PolicyUpdate

logger = logging.getLogger(__name__)

CHECK_EVERY_S = 5.0
"""Seconds of waiting after which the trainer checks that the rollouts' thread still runs."""


@dataclass
class AsyncLoop(Loop[AsyncConfig]):
    """``Loop`` with the queue of rollouts, and the weight sync and evaluation beside it."""

    queue: RolloutQueue
    publisher: Publisher
    evaluation: BackgroundEvaluation | None = None
    phase: str = "start"
    """What the trainer does now, for the watchdog."""
    publishing: asyncio.Task[None] | None = None
    """The weight sync that is under way."""
    probe: ParityProbe = field(init=False)
    """Compares sampler and trainer after each weight sync."""
    _accepted_before: int = field(init=False)
    """Samples that earlier starts of the run have accepted and trained."""

    def __post_init__(self) -> None:
        self._accepted_before = self.run.accepted_samples
        self.probe = ParityProbe(self.config, self.infra, self.run.step)

    @property
    def trained_version(self) -> int:
        """The weight version that the trainer's weights are served as, now or soon."""
        gate = self.queue.gate
        return self.run.version + gate.step - gate.version

    async def begin(self) -> None:
        """Publish the weights if the deployment serves others, and begin the first evaluation."""
        self.run.start_step()
        if self.config.sync.before_training or self.run.must_publish(self.infra):
            with self.run.clock.span(WEIGHT_UPDATE):
                version = await self.publisher.publish(f"step-{self.run.step:05d}")
            self.run.note_version(version, self.run.step)
        if self.evaluation is not None:
            self.evaluation.begin_if_due(self.run.step, always=True)

    def before_step(self, update: PolicyUpdate) -> None:
        """To be called right before an optimizer step is asked for."""
        self.probe.before_step()
        super().before_step(update)

    async def next_piece(self, *, is_first: bool) -> list[TakenGroup]:
        """The groups that are due for forward and backward; empty when the step has all of its."""
        self.phase = "waiting for rollouts"
        clock = self.run.clock
        more = contextlib.nullcontext() if is_first else clock.span(WAIT_FOR_MORE)
        with clock.span(WAIT), more:
            return await self.queue.piece()

    async def begin_weight_sync(self, taken: Sequence[TakenGroup]) -> None:
        """Save a snapshot and have the deployment load it; off-policy, the next step does not wait.

        A checkpoint does wait: the cursor moves only when the step is published.
        """
        run = self.run
        self.phase = "weight sync"
        with run.clock.span(WEIGHT_UPDATE):
            await self.finish_weight_sync()
            self.queue.gate.end_batch()
            with run.busy.train(), run.timeline.span("sync", "save"):
                identity = await self.publisher.save(f"step-{run.step:05d}")
            self.publishing = asyncio.create_task(self._serve(identity, taken, run.step))
            if not self.config.overlaps or self.is_save_due():
                await self.finish_weight_sync()

    async def finish_weight_sync(self) -> None:
        """Wait for the weight sync that is under way, if one is."""
        publishing, self.publishing = self.publishing, None
        if publishing is not None:
            await publishing

    async def _serve(self, identity: str, taken: Sequence[TakenGroup], step: int) -> None:
        """Have a step's snapshot served; then its rows are done, and there is room for new ones."""
        try:
            with self.run.timeline.span("sync", "weight_sync"):
                version = await self.publisher.serve(identity)
                self.run.note_version(version, step)
        except Exception as error:
            self.queue.fail(error)
            raise
        self.probe.begin(step, self.run.version, [taken_group.group for taken_group in taken])
        self.run.cursor.finish(taken_group.group.row.index for taken_group in taken)
        self.run.accepted_samples += len(taken) * self.config.completions_per_prompt
        self.queue.gate.publish()
        self.queue.submit()
        if self.evaluation is not None:
            self.evaluation.begin_if_due(step)

    async def finish(self) -> None:
        """What a finished run leaves behind, and the last evaluation, which the card names."""
        await self.save_last()
        if self.evaluation is not None:
            self.phase = "last evaluation"
            await self.evaluation.finish(self.run.step)
        self.phase = "export"
        await self.export()

    @contextlib.asynccontextmanager
    async def closing(self) -> AsyncIterator[None]:
        """At the end of the ``with`` nothing runs any more; what was trained is published."""
        try:
            yield
        except Exception:
            with contextlib.suppress(HearthError):
                await self.finish_weight_sync()
            raise
        finally:
            await self.queue.close()
            if self.publishing is not None:
                self.publishing.cancel()
                await asyncio.gather(self.publishing, return_exceptions=True)
            await self.probe.close()

    def async_metrics(
        self, update: PolicyUpdate, taken: Sequence[TakenGroup], version: int
    ) -> dict[str, float]:
        """The metrics of a finished step, for ``log_step``, with those of overlapping loops."""
        parity = self.probe.take()
        metrics = parity | self.step_metrics(update, version)
        metrics["train/num_minibatches"] = float(update.optimizer_steps)
        metrics |= staleness_metrics(taken) | queue_metrics(
            self.queue, self.run, self._accepted_before
        )
        metrics["async/trained_against_version"] = float(version)
        metrics["async/realized_training_chunks"] = metrics["rollout/fwd_bwd_count"]
        metrics |= overlap_metrics(metrics)
        return metrics | credit_metrics(update.groups, metrics["perf/step_wall_time"])

    def describe(self) -> str:
        """Who waits for whom, in a few lines."""
        gate, queue, run = self.queue.gate, self.queue, self.run
        lines = [
            f"the trainer is in phase {self.phase!r} of step {run.step + 1}, weight version "
            f"{run.version}" + (", a weight sync is under way" if self.publishing else ""),
            f"{gate.running_rows} rows are being sampled ({gate.running_samples} rollouts), "
            f"{queue.num_ready} groups wait for their batch, which lacks {gate.places_left()} of "
            f"{self.config.prompt_groups_per_step}",
            f"the gate has room for {gate.rows_to_submit()} rows; late rows: "
            f"{gate.late_rows()[:8]}",
        ]
        if (oldest := queue.oldest()) is not None:
            row, age = oldest
            lines.append(f"the oldest rollout is of row {row.index}, for {age:.0f} s")
        return "\n".join(lines)


def rollout_queue(
    config: AsyncConfig, infra: RunInfra, run: Run, rollouts: Rollouts, thread: RolloutThread
) -> RolloutQueue:
    """The queue of a run's rows, whose rollouts run on ``thread``."""
    links = RunLinks(
        note=lambda outcome: count_outcome(run, outcome, rollouts),
        weight_version=lambda: run.version,
        busy=run.busy,
        now=run.now,
        check=lambda: check_responsive(config, thread),
        check_every_s=min(CHECK_EVERY_S, config.rollout_timeout_s or CHECK_EVERY_S),
    )
    return RolloutQueue(
        config,
        Loop(config, infra, run).rows(),
        lambda submission: thread.submit(lambda: rollouts.run_row(submission)),
        links,
    )


async def run_watched(work: asyncio.Task[None], loop: AsyncLoop, rollouts: Rollouts) -> None:
    """Wait for the run's task; it is cancelled when no step is finished for ``stall_timeout_s``.

    Raises:
        StalledError: it was.
    """
    event_loop = asyncio.get_running_loop()
    stall: list[StalledError] = []

    def end(error: StalledError) -> None:
        stall.append(error)
        event_loop.call_soon_threadsafe(work.cancel)

    def report() -> str:
        held_out = [] if loop.evaluation is None else loop.evaluation.places(2)
        return "\n".join([loop.describe(), *rollouts.places(8), *held_out])

    limits = StallLimits(loop.config.stall_timeout_s)
    with Watchdog(limits, report, log_path=loop.run.log_path, on_stall=end) as watchdog:
        loop.run.on_progress = watchdog.beat
        try:
            await work
        except asyncio.CancelledError:
            if not stall:
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
                raise
            raise stall[0] from None


def count_outcome(run: Run, outcome: RowOutcome, rollouts: Rollouts) -> None:
    """Count what became of a row, and log why one that is dropped is.

    Raises:
        NoSignalError: for ``no_signal_patience`` steps no row had anything to learn from.
    """
    if outcome.dropped == "stale":
        run.stale_drops += 1
        finished = list(rollouts.sampled_trajectories.get(outcome.row.index, ()))
        run.stats.stale_lengths.extend(
            sum(segment.completion_len for segment in trajectory.segments)
            for trajectory in finished
        )
        outcome = replace(outcome, sampled_trajectories=finished)
    if outcome.group is None and outcome.dropped != "filtered":
        reason = outcome.error or "no error"
        logger.warning("row %d is dropped (%s): %s", outcome.row.index, outcome.dropped, reason)
    run.count_outcome(outcome)


def check_responsive(config: AsyncConfig, thread: RolloutThread) -> None:
    """Refuse to wait for a rollout function that blocks all others.

    Raises:
        TimeoutError: nothing else has run on the rollouts' thread for ``rollout_timeout_s``.
    """
    blocked = thread.blocked_s()
    if config.rollout_timeout_s is not None and blocked > config.rollout_timeout_s:
        raise TimeoutError(
            f"a rollout function must let others run, got {blocked:.0f} s without an await "
            f"(rollout_timeout_s={config.rollout_timeout_s}): put what computes or waits into "
            f"`await asyncio.to_thread(...)`; it is in\n{thread.stack()}"
        )
