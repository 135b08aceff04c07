"""GRPO and its relatives with rollouts and training side by side, and a staleness bound that holds.

The algorithm is the three functions ``train``, ``make_group`` and ``train_step`` of this file. A
user writes a rollout function (``training.samples.rollout``), which samples and scores.

The queue keeps as many rows in flight as the off-policy gate allows, all the time. A step takes
finished groups in the order of their submission, none older than ``max_head_offpolicy_versions``
weight syncs, and trains them in pieces while its last groups are still being sampled. The next step
begins while the deployment loads the step's snapshot.

With ``max_head_offpolicy_versions=0`` (the default) the next rows wait for the weight sync: the run
is strictly on-policy and trains, to the bit, what ``rl_loop`` trains on groups with spread.
``synchronous_training`` also waits for all rollouts before each step.

Held-out rows (``eval_dataset``) go through the same rollout function meanwhile
(``training.run.background_evaluation``); only the last evaluation is waited for. Off-policy, a few
tokens are sampled and scored again after each weight sync (``training.run.parity_probe``).
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from training.config.async_recipe import AsyncConfig
from training.config.validation import validate
from training.data.rows import Row
from training.environments.choose import Given, GivenEnvironment, choose_rolled_out_rows
from training.platform.run_infra import RunInfra
from training.rollouts.cluster import run_on_cluster
from training.rollouts.queue import TakenGroup
from training.rollouts.runner import GroupCredit, GroupFilter, Rollouts, Submission
from training.rollouts.setup import rollout_setup
from training.rollouts.thread import RolloutThread
from training.rollouts.validation import rollout_problems
from training.run.async_loop import AsyncLoop, rollout_queue, run_watched
from training.run.async_metrics import TRAIN
from training.run.background_evaluation import BackgroundEvaluation
from training.run.begin import begin_run
from training.run.command import recipe, run_command, run_until_signal
from training.run.publisher import Publisher
from training.run.state import RunSummary
from training.samples import PromptGroup, group_advantages, to_datums
from training.samples.rollout import RolloutFnFactory, RolloutRun, RolloutSetup
from training.update import PolicyUpdate, policy_loss

logger = logging.getLogger(__name__)

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


@recipe
def main(
    config: Config,
    *,
    rollout_fn_factory: RolloutFnFactory | None = None,
    rows: Sequence[Row] | None = None,
    eval_rows: Sequence[Row] | None = None,
    environment: GivenEnvironment | None = None,
    dynamic_filter_fn: GroupFilter | None = None,
) -> RunSummary:
    """Train until the rows run out.

    ``rollout_fn_factory(setup)`` is called once and returns the rollout function, which is called
    ``completions_per_prompt`` times for each row; None takes ``config.rollout``. ``rows`` take the
    place of ``config.dataset`` and ``eval_rows`` that of ``config.eval_dataset``; neither is cut to
    the config's number of rows. ``environment`` takes the place of all of these. A group that
    ``dynamic_filter_fn(group)`` refuses is replaced by the next row's. Ctrl-C and SIGTERM end the
    run cleanly.

    Raises:
        ConfigError: a setting or a row breaks its rule; nothing was started.
        StalledError: no step was finished within ``stall_timeout_s``.
        RolloutsFailingError: too many rollouts failed.
        NoSignalError: for ``no_signal_patience`` steps no row had anything to learn from.
        ParityError: sampler and trainer disagree, and ``parity_stops`` is on.
        Exception: what a rollout function raised that no second try mends.
    """
    config.validate()
    given = Given(environment, rows, eval_rows)
    rows, eval_rows, rollout_fn_factory = choose_rolled_out_rows(config, given, rollout_fn_factory)
    logger.warning(
        "async_rl_loop is experimental: fields and the rollout protocol may change between "
        "versions; pin the version that you build on"
    )
    return run_rows(config, rows, rollout_fn_factory, dynamic_filter_fn, eval_rows=eval_rows)


def run_rows(
    config: AsyncConfig,
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
    with begin_run(
        config,
        rows,
        eval_rows,
        max_concurrent=config.max_concurrent,
        running_requests="keep" if config.in_flight_weight_updates else "drain",
    ) as (infra, run):
        setup = rollout_setup(config, infra)
        with setup.closing, RolloutThread() as thread:
            rollout_fn = rollout_fn_factory(setup)
            rollouts = Rollouts(
                rollout_fn,
                config,
                num_rows=len(rows),
                make_group=partial(make_group, config),
                accepts=dynamic_filter_fn,
                credit=credit(setup, infra) if credit is not None else None,
            )

            async def run_loop() -> None:
                queue = rollout_queue(config, infra, run, rollouts, thread)
                evaluation = BackgroundEvaluation(config, run, rollout_fn, thread.submit)
                loop = AsyncLoop(config, infra, run, queue, Publisher(infra.syncer), evaluation)
                await run_watched(asyncio.create_task(train(loop)), loop, rollouts)

            run_until_signal(run_loop())
            return run.summary(infra)


async def train(loop: AsyncLoop) -> None:
    """All steps, the last one published; then what a finished run leaves behind."""
    try:
        async with loop.closing():
            await loop.begin()
            while await train_step(loop):
                loop.run.on_progress()
            await loop.finish_weight_sync()
        await loop.finish()
    finally:
        if loop.evaluation is not None:
            await loop.evaluation.close()


def make_group(
    config: AsyncConfig,
    submission: Submission,
    runs: Sequence[RolloutRun],
    row_meta: dict[str, Any] | None = None,
) -> PromptGroup:
    """Advantages and datums of a row's trajectories; the samples of one share its advantage.

    Raises:
        ConfigError: fewer than two trajectories, a reward that is not finite, or experts to replay
            that are not one per token.
    """
    rewards = [float(run.reward) for run in runs]
    advantages = group_advantages(rewards)
    datums = to_datums([run.segments for run in runs], advantages, config.replay)
    return PromptGroup(submission.row, rewards, advantages, datums, row_meta, submission.version)


async def train_step(loop: AsyncLoop) -> bool:
    """One step on the next groups, and its weight sync; False when no rows are left for one."""
    config, run = loop.config, loop.run
    update = PolicyUpdate(
        config, loop.infra, run.clock, run.kl, loop.trained_version, loop.before_step
    )
    taken: list[TakenGroup] = []
    while piece := await loop.next_piece(is_first=not taken):
        taken.extend(piece)
        loop.phase = "forward and backward"
        with run.busy.train(), run.clock.span(TRAIN):
            for batch in await update.prepare([taken_group.group for taken_group in piece]):
                loss_fn = policy_loss(config, batch)
                await update.forward_backward(batch, loss_fn)
    if not taken:
        return False
    loop.phase = "optimizer step"
    with run.busy.train(), run.clock.span(TRAIN):
        await update.optim_step()
    loop.count_step(update)
    version = loop.trained_version
    await loop.begin_weight_sync(taken)
    loop.log_step(loop.async_metrics(update, taken, version))
    if loop.publishing is None:  # else it became due just now, and the cursor lacks this step
        # After its record: a resumed run drops the records of steps that its checkpoint lacks.
        await loop.save_if_due()
    return True


def command(arguments: Sequence[str] | None = None, program: str | None = None) -> int:
    """Train with the settings that files and flags give; returns the exit code."""
    return run_command(Config(), main, arguments, program=program)


if __name__ == "__main__":
    sys.exit(command())
