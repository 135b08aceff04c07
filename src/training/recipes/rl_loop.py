"""GRPO and its relatives, synchronous: sample a batch, score it, take a step, sync weights, repeat.

The phases of one step, as ``train`` runs them:

1. sample: every row of the window gets ``completions_per_prompt`` completions, all at once;
2. score: rewards, then advantages within each group; groups without spread are dropped;
3. forward and backward: reference logprobs where KL asks for them, then the policy loss;
4. one optimizer step;
5. weight sync: the deployment serves the new weights before the next window samples.

A window holds ``weight_sync_interval`` steps. With 1 (the default) nothing overlaps and every
sample is on-policy. With N > 1 the rows of N steps sample together and train as they arrive. With 0
there is one window and no sync. ``async_rl_loop`` overlaps across windows as well.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

from hearth.errors import ConfigError, NotFoundError, RequestError, TransportError
from hearth.sdk import SampledCompletion, TrainingShapeProfile
from training.config.recipe import RecipeConfig
from training.config.validation import counts_below_one, validate
from training.data.rows import IndexedRow, Row, epoch_rows, load_rows, prompt_messages
from training.data.seeds import row_seed
from training.platform.run_infra import RunInfra
from training.rewards import (
    AnyReward,
    GuardedReward,
    Score,
    Unscored,
    answer_reward,
    disagreements,
    guarded,
    scored,
)
from training.rollouts.router_replay import routing_options
from training.run.begin import begin_run
from training.run.command import refuse_inside_event_loop, run_command, run_until_signal
from training.run.signal import signal_metrics
from training.run.state import Run, RunSummary, batch_metrics, merged_metrics, step_times
from training.samples.advantages import is_uniform, usable_group
from training.samples.groups import (
    ExampleAnswer,
    PromptGroup,
    RowOutcome,
    completion_sample,
    rollout_metrics,
    version_metrics,
)
from training.samples.rollout import RolloutSample
from training.update.policy_update import PolicyUpdate

logger = logging.getLogger(__name__)

# Rows that fail in a row before the run gives up: by then it is the platform, not the row.
MAX_FAILED_ROWS = 5
# Reward functions with a time limit that run on this machine at once.
MAX_REWARDS = 8
# Losses that the trainer cannot compute itself.
WITHOUT_KERNEL = frozenset({"reinforce"})
RECOVERABLE = (TransportError, NotFoundError, RequestError, TimeoutError)


@dataclass(kw_only=True)
class Config(RecipeConfig):
    """Settings of ``rl_loop`` beside those that all recipes share."""

    log_path: str = "runs/rl_loop"
    """Folder of the run: metrics.jsonl, config.json, checkpoints."""
    max_concurrent: int = 32
    """Sampling requests in flight, counted one by one."""
    truncated_completions: Literal["drop", "score"] = "drop"
    """What becomes of completions cut by max_completion_tokens."""

    tis_enabled: bool = False
    """Truncated importance sampling against the sampler's logprobs, on top of any loss."""
    reward_timeout_s: float | None = None
    """Seconds that the reward of one completion may take, off the event loop; None: no limit."""
    reward_errors: Literal["raise", "drop"] = "raise"
    """What a reward function that fails or is late does: end the run, or drop the completion."""
    rollout_workers: Literal["loop", "process", "ray"] = "loop"
    """Where reward functions run: on this program's event loop (with reward_timeout_s on threads
    beside it), in processes of this machine, or as tasks of the Ray cluster that RAY_ADDRESS
    names; the last two need reward_timeout_s and a picklable function."""
    loss_path: Literal["client", "builtin"] = "client"
    """Where the loss runs: in this file's process, or inside the trainer (no KL there)."""

    @property
    def uses_tis(self) -> bool:
        """Whether samples are weighted by how far the sampler's policy is off."""
        return self.tis_enabled

    @property
    def runs_builtin_loss(self) -> bool:
        """Whether the loss runs inside the trainer."""
        return self.loss_path == "builtin"

    def validate(self) -> None:
        """Check everything that can be checked without loading a model.

        Raises:
            ConfigError: one line per problem.
        """
        validate(self, _own_problems(self))


def _own_problems(config: Config) -> Iterator[str]:
    yield from counts_below_one(config, "max_concurrent")
    if config.reward_timeout_s is not None and not config.reward_timeout_s > 0:
        yield f"reward_timeout_s must be > 0 seconds or None, got {config.reward_timeout_s}"
    if config.reward_errors not in ("raise", "drop"):
        yield f"reward_errors must be 'raise' or 'drop', got {config.reward_errors!r}"
    if config.rollout_workers not in ("loop", "process", "ray"):
        yield f"rollout_workers must be 'loop', 'process' or 'ray', got {config.rollout_workers!r}"
    elif config.rollout_workers != "loop" and config.reward_timeout_s is None:
        yield (
            f"reward_timeout_s must be given with rollout_workers={config.rollout_workers!r}, got "
            "None: a call elsewhere that never ends would be waited for"
        )
    if config.loss_path == "client":
        return
    if config.kl_beta > 0:
        yield (
            f"kl_beta must be 0 with loss_path='builtin', got {config.kl_beta}: the trainer's "
            "built-in losses have no KL; set kl_beta=0 or loss_path='client'"
        )
    if config.policy_loss in WITHOUT_KERNEL:
        yield (
            f"policy_loss must have a built-in kernel with loss_path='builtin', got "
            f"{config.policy_loss!r}: use loss_path='client'"
        )
    if config.policy_loss == "dro" and config.dro.gated:
        yield "dro.gated must be False with loss_path='builtin', got True: use 'client'"


def main(
    config: Config,
    rows: Sequence[Row] | None = None,
    *,
    reward_fn: AnyReward = answer_reward,
    eval_rows: Sequence[Row] | None = None,
) -> RunSummary:
    """Train until the rows run out.

    ``rows`` take the place of ``config.dataset`` and ``eval_rows`` that of ``config.eval_dataset``;
    neither is cut to the config's number of rows.
    ``reward_fn(text, row)`` scores one completion; it may be async, or guarded. Ctrl-C and SIGTERM
    end the run cleanly: what was trained is in ``log_path``, and the platform is taken down.

    Raises:
        ConfigError: a setting or a row breaks its rule; nothing was started, or the shape that the
            platform chose does not fit, and what was started is taken down.
        NoSignalError: for ``no_signal_patience`` steps no row had anything to learn from.
        ParityError: sampler and trainer disagree, and ``parity_stops`` is on.
    """
    refuse_inside_event_loop()
    config.validate()
    reward_fn = guarded_reward(config, reward_fn)
    if rows is None:
        rows = load_rows(config.dataset, config.max_rows)
    if eval_rows is None:
        eval_rows = load_rows(config.eval_dataset, config.eval_rows) if config.eval_dataset else []
    with begin_run(config, rows, eval_rows, max_concurrent=config.max_concurrent) as (infra, run):
        refuse_pipelined_trainer(config, infra.policy_profile)
        run_until_signal(train(config, infra, run, reward_fn))
        return run.summary(infra)


def refuse_pipelined_trainer(config: Config, shape: TrainingShapeProfile | None) -> None:
    """Judge the policy trainer's shape, which is known only once the platform has named it.

    Raises:
        ConfigError: the loss is to run inside a trainer that cuts its model into stages.
    """
    if config.runs_builtin_loss and shape is not None and shape.pipeline_parallelism > 1:
        raise ConfigError(
            f"loss_path must be 'client' on {shape.training_shape_version}, got 'builtin': the "
            f"built-in losses need the whole model in one stage, not {shape.pipeline_parallelism}"
        )


def guarded_reward(config: Config, reward_fn: AnyReward) -> AnyReward:
    """The reward function, guarded where the config asks for it.

    Raises:
        ConfigError: it asks, and the function is guarded already.
    """
    if config.reward_timeout_s is None and config.reward_errors == "raise":
        return reward_fn
    if isinstance(reward_fn, GuardedReward):
        raise ConfigError(
            "reward_timeout_s and reward_errors must not be given with a guarded reward_fn, got "
            f"{config.reward_timeout_s} and {config.reward_errors!r}: it has its own"
        )
    workers = config.rollout_workers
    return guarded(
        reward_fn,
        timeout_s=config.reward_timeout_s,
        on_error=config.reward_errors,
        isolation="thread" if workers == "loop" else workers,
        max_concurrent=config.max_concurrent if workers == "ray" else MAX_REWARDS,
    )


async def train(config: Config, infra: RunInfra, run: Run, reward_fn: AnyReward) -> None:
    """All windows, with weights published between them."""
    is_synced = config.sync.interval > 0
    if config.sync.before_training or (is_synced and run.must_publish(infra)):
        await sync_weights(infra, run)
    await run.evaluate_if_due(config, infra, reward_fn, always=True)

    for window in windows(config, run):
        first_step = run.step
        await train_window(config, infra, run, window, reward_fn)
        if is_synced and run.step > first_step:
            await sync_weights(infra, run)  # 5.
        await run.evaluate_if_due(config, infra, reward_fn)

    run.mention_untrained_rows()
    await run.evaluate_if_due(config, infra, reward_fn, always=True)
    await run.save_if_due(config, infra, is_last=True)
    await run.export_model(config, infra)


async def train_window(
    config: Config, infra: RunInfra, run: Run, window: list[IndexedRow], reward_fn: AnyReward
) -> None:
    """Sample all rows of a window together and train their groups as they come, to the last."""
    batch = next_batch(config, infra, run)
    run.step_started = run.now()
    async with aclosing(sample_window(config, infra, run, window, reward_fn)) as draws:
        async for draw in draws:  # 1. and 2.
            note_draw(run, draw)
            if draw.group is not None:
                batch.waiting.append(draw.group)
            while piece := batch.next_piece(config):
                with run.busy.train():
                    await batch.update.add(piece)  # 3.
            if batch.is_full(config):
                await finish_step(config, infra, run, batch)  # 4.
                batch = next_batch(config, infra, run)
    if batch.num_groups():
        await finish_step(config, infra, run, batch)


def windows(config: Config, run: Run) -> Iterator[list[IndexedRow]]:
    """Unfinished rows in order, cut where the deployment gets new weights."""
    left = epoch_rows(
        run.rows,
        epochs=config.epochs,
        shuffle=config.shuffle,
        seed=config.seed,
        done=run.cursor.finished(),
    )
    size = config.sync.interval * config.prompt_groups_per_step
    while window := list(islice(left, size) if size else left):
        yield window


async def sample_window(
    config: Config, infra: RunInfra, run: Run, window: list[IndexedRow], reward_fn: AnyReward
) -> AsyncGenerator[RowOutcome]:
    """Outcomes of a window's rows, all sampled at once.

    In the order of the rows where a window is one step, so that a run repeats exactly; where
    training overlaps sampling, in the order in which they finish.
    """
    tasks = [asyncio.create_task(draw_row(config, infra, run, row, reward_fn)) for row in window]
    overlaps = config.sync.interval != 1 or config.min_samples_per_fwd_bwd is not None
    try:
        for task in asyncio.as_completed(tasks) if overlaps else tasks:
            with run.clock.span("perf/sample_wait_time"):
                draw = await task
            yield draw
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def draw_row(
    config: Config, infra: RunInfra, run: Run, row: IndexedRow, reward_fn: AnyReward
) -> RowOutcome:
    """Completions, rewards and advantages of one row, or the reason why it is dropped."""
    try:
        with run.busy.draw():
            completions = await infra.sampler.sample_with_tokens(
                prompt_messages(row.row),
                n=config.completions_per_prompt,
                max_tokens=config.max_completion_tokens,
                temperature=config.temperature,
                max_seq_len=config.max_seq_len,
                seed=row_seed(config.seed, row.index),
                **routing_options(config.replay, has_experts=infra.has_experts),
            )
    except RECOVERABLE as error:
        return RowOutcome(row, dropped="failed", error=error)
    if not completions:
        return RowOutcome(row, dropped="overlong_prompt")
    return await scored_draw(config, row, completions, reward_fn)


async def scored_draw(
    config: Config, row: IndexedRow, completions: Sequence[SampledCompletion], reward_fn: AnyReward
) -> RowOutcome:
    """The group of a row's completions; one whose reward failed is left out."""
    judged = [
        completion for completion in completions if is_scored(config, completion.finish_reason)
    ]
    outcomes = await scored(reward_fn, [one.text for one in judged], row.row)
    pairs = zip(judged, outcomes, strict=True)
    kept = [
        completion_sample(one, score.reward, parsed=score.parsed)
        for one, score in pairs
        if isinstance(score, Score)
    ]
    errors = [outcome.error for outcome in outcomes if isinstance(outcome, Unscored)]
    rewards = [one.reward for one in kept]
    reason = usable_group(rewards) or ("uniform" if is_uniform(rewards) else None)
    if reason == "too_few" and errors:
        reason = "failed"
    return RowOutcome(
        row,
        group=None
        if reason
        else PromptGroup.from_rollouts(row, [[one] for one in kept], replay=config.replay),
        dropped=reason,
        completions=len(completions),
        truncated=sum(completion.finish_reason == "length" for completion in completions),
        rewards=rewards,
        error=errors[-1] if reason == "failed" else None,
        failed_rewards=len(errors),
        disagreements=disagreements(outcomes),
        example=example_of(completions[0], kept),
        parsed=[one.parsed for one in kept if one.parsed is not None],
    )


def example_of(completion: SampledCompletion, kept: Sequence[RolloutSample]) -> ExampleAnswer:
    """A rewarded answer where there is one, else the first, which has no reward."""
    if kept:
        one = min(kept, key=lambda one: one.parsed is not False)  # one without an answer, if any
        drawn = one.tokens[one.prompt_len :]
        return ExampleAnswer(one.text, drawn, one.reward, one.finish_reason, one.parsed)
    drawn = completion.full_tokens[completion.prompt_len :]
    return ExampleAnswer(completion.text, drawn, None, completion.finish_reason)


def is_scored(config: Config, finish_reason: str) -> bool:
    """Whether a completion may carry a reward."""
    return finish_reason != "length" or config.truncated_completions == "score"


def note_draw(run: Run, draw: RowOutcome) -> None:
    """Count an outcome.

    Raises:
        HearthError: several rows failed one after the other; the last one's error.
        NoSignalError: for ``no_signal_patience`` steps no row had anything to learn from.
    """
    run.stats.add(draw)
    run.signal.see_row(draw)
    if draw.group is None:
        run.cursor.finish([draw.row.index])
    if draw.error is None:
        run.failed_in_a_row = 0
        return
    run.failed_in_a_row += 1
    logger.warning("row %d is dropped: %s", draw.row.index, draw.error)
    if run.failed_in_a_row >= MAX_FAILED_ROWS:
        raise draw.error


@dataclass
class Batch:
    """The groups of one optimizer step on their way into the update, in pieces of one call each."""

    update: PolicyUpdate
    waiting: list[PromptGroup] = field(default_factory=list[PromptGroup])

    def num_groups(self) -> int:
        """Groups that the step has so far."""
        return len(self.update.groups) + len(self.waiting)

    def is_full(self, config: Config) -> bool:
        """Whether the step has all its groups."""
        return self.num_groups() >= config.prompt_groups_per_step

    def next_piece(self, config: Config, *, flush: bool = False) -> list[PromptGroup]:
        """Groups that are due for a forward and backward call: enough of them, or the last ones.

        Minibatches are cut from the whole batch, so it is then one piece.
        """
        most = config.max_samples_per_fwd_bwd // config.completions_per_prompt
        least = most
        if config.min_samples_per_fwd_bwd is not None:
            least = config.min_samples_per_fwd_bwd // config.completions_per_prompt
        if config.ppo_n_minibatches > 1:
            most = least = config.prompt_groups_per_step
        if not (flush or self.is_full(config) or len(self.waiting) >= least):
            return []
        piece, self.waiting = self.waiting[:most], self.waiting[most:]
        return piece


def next_batch(config: Config, infra: RunInfra, run: Run) -> Batch:
    """The batch of the step that begins."""
    return Batch(PolicyUpdate(config, infra, run.clock, run.kl, run.comparable_version))


async def finish_step(config: Config, infra: RunInfra, run: Run, batch: Batch) -> None:
    """Train what still waits, step the optimizer, and report."""
    with run.busy.train():
        while piece := batch.next_piece(config, flush=True):
            await batch.update.add(piece)
        await batch.update.finish()
    run.step += batch.update.optimizer_steps
    if math.isnan(run.first_step_s):
        run.first_step_s = time.perf_counter() - run.started
    run.cursor.finish(group.row.index for group in batch.update.groups)
    report_step(config, run, batch.update)
    # After its record: a resumed run drops the records of steps that its checkpoint does not hold.
    await run.save_if_due(config, infra)


async def sync_weights(infra: RunInfra, run: Run) -> None:
    """Publish the policy's weights; the next sample is drawn under them."""
    with run.clock.span("perf/weight_sync_time"):
        await asyncio.to_thread(infra.syncer.save_and_hotload, f"step-{run.step:05d}")
    run.version = infra.syncer.version
    run.synced_step = run.step


def report_step(config: Config, run: Run, update: PolicyUpdate) -> None:
    """Write the step's metrics and start counting for the next one."""
    metrics = {f"train/{name}": value for name, value in merged_metrics(update.results).items()}
    metrics["train/step"] = float(run.step)  # the trainer's own count says nothing of this run
    metrics |= batch_metrics(update.results, config.completions_per_prompt)
    metrics |= rollout_metrics(run.stats, update.groups)
    metrics |= signal_metrics(update.groups) | update.parity()
    metrics |= version_metrics(update.groups, run.version)
    metrics |= step_times(run, update.groups)
    run.log.write("train", run.step, metrics)
    run.display.step(run.step, run.cursor.count, metrics)
    run.see_step(config, metrics)
    run.start_step()


def command(arguments: Sequence[str] | None = None) -> int:
    """Train with the rl_loop recipe; every field of its config is a flag."""
    return run_command(Config, main, arguments, program="python -m training.recipes.rl_loop")


if __name__ == "__main__":
    sys.exit(command())
