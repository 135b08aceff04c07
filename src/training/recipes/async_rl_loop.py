"""GRPO and its relatives with rollouts and training side by side, and a staleness bound that holds.

A user writes a rollout function (``training.samples.rollout``); the phases of one step are, as
``train_step`` runs them:

1. roll out: the queue keeps as many rows in flight as the off-policy gate lets it, all the time;
2. form the batch: finished groups in the order of their submission, none older than
   ``max_head_offpolicy_versions`` weight syncs; a late row is waited for;
3. forward and backward: reference logprobs where KL asks for them, then the policy loss, in pieces
   while the last groups of the batch are still being drawn;
4. one optimizer step (``ppo_n_minibatches`` of them);
5. weight sync: a snapshot is saved, and the next batch begins while the deployment loads it.

With ``max_head_offpolicy_versions=0`` (the default) the next rows wait for the weight sync: the run
is strictly on-policy and trains, to the bit, what ``rl_loop`` trains on groups with spread.
``synchronous_training`` drains all rollouts before each step as well.

Held-out rows (``eval_dataset``) go through the same rollout function beside all this
(``training.run.background_evaluation``); only the last evaluation is waited for. Off-policy a
few tokens are drawn and scored again after each weight sync (``training.run.parity_probe``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hearth.errors import ConfigError, HearthError
from training.config.async_recipe import AsyncConfig
from training.config.validation import validate
from training.data.rows import Row, check_object, epoch_rows, load_rows
from training.platform.run_infra import RunInfra
from training.rollouts.cluster import run_on_cluster
from training.rollouts.queue import RolloutQueue, TakenGroup
from training.rollouts.router_replay import routing_options
from training.rollouts.runner import GroupCredit, GroupFilter, Rollouts
from training.rollouts.thread import RolloutThread
from training.rollouts.validation import rollout_problems
from training.run.async_metrics import (
    TRAIN,
    WAIT,
    WAIT_FOR_MORE,
    WEIGHT_UPDATE,
    overlap_metrics,
    queue_metrics,
    staleness_metrics,
)
from training.run.background_evaluation import BackgroundEvaluation
from training.run.begin import begin_run
from training.run.command import refuse_inside_event_loop, run_until_signal
from training.run.parity_probe import ParityProbe
from training.run.publisher import Publisher
from training.run.signal import signal_metrics
from training.run.state import Run, RunSummary, batch_metrics, merged_metrics, step_times
from training.run.watchdog import StalledError, Watchdog
from training.samples.groups import RowOutcome, rollout_metrics, version_metrics
from training.samples.rollout import RolloutFnFactory, RolloutSetup
from training.update.information_gain import credit_metrics
from training.update.policy_update import PolicyUpdate

logger = logging.getLogger(__name__)

CHECK_EVERY_S = 5.0
"""Seconds of waiting after which the trainer looks whether the rollouts' thread still runs."""

CreditFactory = Callable[[RolloutSetup, RunInfra], GroupCredit]
"""Makes what gives a run's groups their advantages, where these are not of the rewards alone."""


@dataclass(kw_only=True)
class Config(AsyncConfig):
    """Settings of ``async_rl_loop``."""

    log_path: str = "runs/async_rl_loop"
    """Folder of the run: metrics.jsonl, config.json, checkpoints."""

    def validate(self) -> None:
        """Check everything that can be checked without loading a model.

        Raises:
            ConfigError: one line per problem.
        """
        validate(self, rollout_problems(self))


def main(
    config: Config,
    *,
    rollout_fn_factory: RolloutFnFactory,
    rows: Sequence[Row] | None = None,
    eval_rows: Sequence[Row] | None = None,
    dynamic_filter_fn: GroupFilter | None = None,
) -> RunSummary:
    """Train until the rows run out.

    ``rollout_fn_factory(setup)`` is called once and returns the rollout function, which is called
    ``completions_per_prompt`` times for each row. ``rows`` take the place of ``config.dataset`` and
    ``eval_rows`` that of ``config.eval_dataset``; neither is cut to the config's number of rows. A
    group that ``dynamic_filter_fn(group)`` refuses is replaced by the next row's. Ctrl-C and
    SIGTERM end the run cleanly.

    Raises:
        ConfigError: a setting or a row breaks its rule; nothing was started.
        StalledError: no step was finished within ``stall_timeout_s``.
        RolloutsFailingError: too many rollouts failed.
        NoSignalError: for ``no_signal_patience`` steps no row had anything to learn from.
        ParityError: sampler and trainer disagree, and ``parity_stops`` is on.
        Exception: what a rollout function raised that no second try mends.
    """
    refuse_inside_event_loop()
    config.validate()
    rows = checked_rows(config, rows)
    eval_rows = checked_eval_rows(config, eval_rows)
    logger.warning(
        "async_rl_loop is experimental: fields and the rollout protocol may change between "
        "versions; pin the version that you build on"
    )
    return run_rows(config, rows, rollout_fn_factory, dynamic_filter_fn, eval_rows=eval_rows)


def run_rows(
    config: Config,
    rows: Sequence[Row],
    rollout_fn_factory: RolloutFnFactory,
    dynamic_filter_fn: GroupFilter | None,
    credit: CreditFactory | None = None,
    *,
    eval_rows: Sequence[Row] = (),
) -> RunSummary:
    """Provision, train on the rows, take down."""
    if config.rollout_workers == "ray":
        rollout_fn_factory = run_on_cluster(rollout_fn_factory, config.rollout_worker_count)
    running_requests = "keep" if config.in_flight_weight_updates else "drain"
    with begin_run(
        config,
        rows,
        eval_rows,
        max_concurrent=config.max_concurrent,
        running_requests=running_requests,
    ) as (infra, run):
        setup = rollout_setup(config, infra)
        with setup.closing, RolloutThread() as thread:
            rollout_fn = rollout_fn_factory(setup)
            rollouts = Rollouts(
                rollout_fn,
                config,
                num_rows=len(rows),
                accepts=dynamic_filter_fn,
                credit=credit(setup, infra) if credit is not None else None,
            )
            evaluation = BackgroundEvaluation(config, run, rollout_fn, thread.submit)
            run_until_signal(run_loop(config, infra, run, rollouts, thread, evaluation))
            return run.summary(infra)


def checked_rows(config: Config, rows: Sequence[Row] | None) -> Sequence[Row]:
    """The rows to train on: given ones, or those of the dataset.

    Raises:
        ConfigError: there are none, or one is no object.
    """
    if rows is None and not config.dataset:
        raise ConfigError("rows must be given where config.dataset is empty, got neither")
    if rows is None:
        return load_rows(config.dataset, config.max_rows, needs_messages=False)
    if not rows:
        raise ConfigError("rows must hold at least one row, got []")
    return [check_object(row, where=f"rows[{place}]") for place, row in enumerate(rows)]


def checked_eval_rows(config: Config, rows: Sequence[Row] | None) -> Sequence[Row]:
    """The held-out rows: given ones, or those of ``eval_dataset``; none where there is neither.

    Raises:
        ConfigError: one is no object, or the dataset cannot be read.
    """
    if rows is not None:
        return [check_object(row, where=f"eval_rows[{place}]") for place, row in enumerate(rows)]
    if config.eval_dataset is None:
        return []
    return load_rows(config.eval_dataset, config.eval_rows, needs_messages=False)


def rollout_setup(config: Config, infra: RunInfra) -> RolloutSetup:
    """What the rollout function's factory is handed."""
    assert infra.inference_model is not None, "provisioned with inference"
    return RolloutSetup(
        tokenizer=infra.tokenizer,
        tokenizer_id=config.deployment.tokenizer_model,
        sample_kwargs={
            "max_tokens": config.max_completion_tokens,
            "temperature": config.temperature,
            "top_p": 1.0,
            "top_k": 0,
            "max_seq_len": config.max_seq_len,
            "http_timeout": config.deployment.sample_timeout,
            "logprobs": True,
            **routing_options(config.replay, has_experts=infra.has_experts),
        },
        inference_base_url=infra.inference_url,
        api_key=infra.api_key,
        model=infra.inference_model,
        completions_per_prompt=config.completions_per_prompt,
        extras=dict(config.rollout_extras),
        boot_timeout_s=config.deployment.deployment_timeout_s,
        concurrency=infra.sampler.concurrency,
    )


@dataclass
class Loop:
    """What the steps of a run work on."""

    config: Config
    infra: RunInfra
    run: Run
    queue: RolloutQueue
    publisher: Publisher
    phase: str = "start"
    """What the trainer does now, for the watchdog."""
    publishing: asyncio.Task[None] | None = None
    """The weight sync that is under way."""
    evaluation: BackgroundEvaluation | None = None
    """What evaluates meanwhile."""
    probe: ParityProbe = field(init=False)
    """What compares sampler and trainer after each weight sync."""

    def __post_init__(self) -> None:
        self.probe = ParityProbe(self.config, self.infra, self.run.step)


async def run_loop(
    config: Config,
    infra: RunInfra,
    run: Run,
    rollouts: Rollouts,
    thread: RolloutThread,
    evaluation: BackgroundEvaluation,
) -> None:
    """The whole run, watched: rollouts on their thread, the trainer's steps here."""
    rows = epoch_rows(
        run.rows,
        epochs=config.epochs,
        shuffle=config.shuffle,
        seed=config.seed,
        done=run.cursor.finished(),
    )
    queue = RolloutQueue(
        config,
        rows,
        draw=lambda submission: thread.submit(lambda: rollouts.draw(submission)),
        note=lambda draw: note_draw(run, draw, rollouts),
        weight_version=lambda: run.version,
        busy=run.busy,
        now=run.now,
        check=lambda: check_responsive(config, thread),
        check_every_s=min(CHECK_EVERY_S, config.rollout_timeout_s or CHECK_EVERY_S),
    )
    loop = Loop(config, infra, run, queue, Publisher(infra.syncer), evaluation=evaluation)
    event_loop = asyncio.get_running_loop()
    work = asyncio.create_task(train(loop))
    stall: list[StalledError] = []

    def end(error: StalledError) -> None:
        stall.append(error)
        event_loop.call_soon_threadsafe(work.cancel)

    def report() -> str:
        return "\n".join([describe(loop), *rollouts.places(8), *evaluation.places(2)])

    with Watchdog(config.stall_timeout_s, report, log_path=run.log_path, on_stall=end) as watchdog:
        run.on_progress = watchdog.beat
        try:
            await work
        except asyncio.CancelledError:
            if not stall:
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
                raise
            raise stall[0] from None


async def train(loop: Loop) -> None:
    """All steps, then what a finished run leaves behind, and the last evaluation."""
    config, infra, run = loop.config, loop.infra, loop.run
    try:
        await train_steps(loop)
        run.mention_untrained_rows()
        await run.save_if_due(config, infra, is_last=True)
        await run.export_model(config, infra)
        if loop.evaluation is not None:
            loop.phase = "last evaluation"
            await loop.evaluation.finish(run.step)
    finally:
        if loop.evaluation is not None:
            await loop.evaluation.close()


async def train_steps(loop: Loop) -> None:
    """All steps, the last one published."""
    config, infra, run = loop.config, loop.infra, loop.run
    try:
        run.start_step()
        if config.sync.before_training or run.must_publish(infra):
            with run.clock.span(WEIGHT_UPDATE):
                run.version = await loop.publisher.publish(f"step-{run.step:05d}")
        if loop.evaluation is not None:
            loop.evaluation.begin_if_due(run.step, always=True)
        while await train_step(loop):
            run.on_progress()
        await finish_publishing(loop)
    except Exception:
        with contextlib.suppress(HearthError):
            await finish_publishing(loop)  # what is trained already is published
        raise
    finally:
        await loop.queue.close()
        if loop.publishing is not None:
            loop.publishing.cancel()
            await asyncio.gather(loop.publishing, return_exceptions=True)
        await loop.probe.close()


async def train_step(loop: Loop) -> bool:
    """One step on the next batch; False when no rows are left for one."""
    run = loop.run
    update = PolicyUpdate(
        loop.config, loop.infra, run.clock, run.kl, trained_version(loop), loop.probe.before_step
    )
    batch: list[TakenGroup] = []
    while piece := await next_piece(loop, is_first=not batch):  # 1. and 2.
        batch.extend(piece)
        loop.phase = "forward and backward"
        with run.busy.train(), run.clock.span(TRAIN):
            await update.add([one.group for one in piece])  # 3.
    if not batch:
        return False
    loop.phase = "optimizer step"
    with run.busy.train(), run.clock.span(TRAIN):
        await update.finish()  # 4.
    run.step += update.optimizer_steps
    if math.isnan(run.first_step_s):
        run.first_step_s = time.perf_counter() - run.started
    version = trained_version(loop)
    await publish(loop, batch)  # 5.
    report_step(loop, batch, update, version)
    if loop.publishing is None:  # else it became due just now, and the cursor lacks this step
        # After its record: a resumed run drops the records of steps that its checkpoint lacks.
        await run.save_if_due(loop.config, loop.infra)
    return True


def trained_version(loop: Loop) -> int:
    """The weight version that the trainer's weights are served as, now or soon."""
    gate = loop.queue.gate
    return loop.run.version + gate.step - gate.version


async def next_piece(loop: Loop, *, is_first: bool) -> list[TakenGroup]:
    """The groups that are due for forward and backward."""
    loop.phase = "waiting for rollouts"
    clock = loop.run.clock
    more = contextlib.nullcontext() if is_first else clock.span(WAIT_FOR_MORE)
    with clock.span(WAIT), more:
        return await loop.queue.piece()


async def publish(loop: Loop, batch: Sequence[TakenGroup]) -> None:
    """Save a snapshot and have the deployment load it; off-policy, the next batch does not wait.

    Before a checkpoint it is waited for: the cursor moves only when the step is published.
    """
    config, run = loop.config, loop.run
    loop.phase = "weight sync"
    with run.clock.span(WEIGHT_UPDATE):
        await finish_publishing(loop)
        loop.queue.gate.end_batch()
        with run.busy.train():
            identity = await loop.publisher.save(f"step-{run.step:05d}")
        loop.publishing = asyncio.create_task(serve(loop, identity, batch, run.step))
        loop.probe.expect(run.step, loop.publishing)
        if not config.overlaps or run.is_save_due(config, loop.infra):
            await finish_publishing(loop)


async def serve(loop: Loop, identity: str, batch: Sequence[TakenGroup], step: int) -> None:
    """Have a step's snapshot served; then its rows are done, and there is room for new ones."""
    try:
        loop.run.version = await loop.publisher.serve(identity)
    except Exception as error:
        loop.queue.fail(error)
        raise
    loop.probe.begin(loop.run.version, [one.group for one in batch])
    loop.run.cursor.finish(one.group.row.index for one in batch)
    loop.queue.gate.published()
    loop.queue.submit()
    if loop.evaluation is not None:
        loop.evaluation.begin_if_due(step)


async def finish_publishing(loop: Loop) -> None:
    """Wait for the weight sync that is under way, if one is."""
    publishing, loop.publishing = loop.publishing, None
    if publishing is not None:
        await publishing


def note_draw(run: Run, draw: RowOutcome, rollouts: Rollouts) -> None:
    """Count a row's outcome; one that gives no group is done.

    Raises:
        NoSignalError: for ``no_signal_patience`` steps no row had anything to learn from.
    """
    run.stats.add(draw)
    if draw.dropped == "stale":
        run.stats.stale_lengths.extend(rollouts.lengths.get(draw.row.index, []))
    if draw.group is None:
        run.cursor.finish([draw.row.index])
        if draw.dropped != "filtered":
            logger.warning(
                "row %d is dropped (%s): %s", draw.row.index, draw.dropped, draw.error or "no error"
            )
    run.signal.see_row(draw)


def check_responsive(config: Config, thread: RolloutThread) -> None:
    """Refuse to wait for a rollout function that holds up all others.

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


def report_step(
    loop: Loop, batch: Sequence[TakenGroup], update: PolicyUpdate, version: int
) -> None:
    """Write the step's metrics and start counting for the next one."""
    config, run = loop.config, loop.run
    metrics = {f"train/{name}": value for name, value in merged_metrics(update.results).items()}
    metrics["train/step"] = float(run.step)  # the trainer's own count says nothing of this run
    metrics["train/num_minibatches"] = float(update.optimizer_steps)
    metrics |= batch_metrics(update.results, config.completions_per_prompt)
    metrics |= rollout_metrics(run.stats, update.groups)
    metrics |= signal_metrics(update.groups) | loop.probe.take() | update.parity()
    metrics |= version_metrics(update.groups, version)
    metrics |= staleness_metrics(batch) | queue_metrics(loop.queue, run)
    metrics["async/trained_against_version"] = float(version)
    metrics["async/realized_training_chunks"] = metrics["rollout/fwd_bwd_count"]
    times = step_times(run, update.groups)
    metrics |= times | overlap_metrics(times)
    metrics |= credit_metrics(update.groups, times["perf/step_wall_time"])
    run.log.write("train", run.step, metrics)
    run.display.step(run.step, run.cursor.count, metrics)
    run.see_step(config, metrics)
    run.start_step()


def describe(loop: Loop) -> str:
    """Who waits for whom, in a few lines."""
    gate, queue, run = loop.queue.gate, loop.queue, loop.run
    oldest = queue.oldest()
    lines = [
        f"the trainer is in phase {loop.phase!r} of step {run.step + 1}, weight version "
        f"{run.version}" + (", a weight sync is under way" if loop.publishing else ""),
        f"{gate.running_rows} rows are being drawn ({gate.running_samples} rollouts), "
        f"{queue.num_ready} groups wait for their batch, which lacks {gate.places_left()} of "
        f"{loop.config.prompt_groups_per_step}",
        f"the gate has room for {gate.rows_to_submit()} rows; late rows: {gate.late_rows()[:8]}",
    ]
    if oldest is not None:
        row, age = oldest
        lines.append(f"the oldest rollout is of row {row.index}, for {age:.0f} s")
    return "\n".join(lines)
