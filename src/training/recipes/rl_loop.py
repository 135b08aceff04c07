"""GRPO and its relatives, synchronous: sample, score, take a step, sync weights, repeat.

The algorithm is the three functions ``train``, ``sample_group`` and ``train_step`` of this file.
To try another advantage, loss or filter, copy the file and change the line (docs/fork_a_recipe.md).

A window holds the groups of ``weight_sync_interval`` steps, which are sampled together; a row that
is dropped is made up for by the next one. With 1 (the default) nothing overlaps and every sample is
on-policy. With N > 1 the N steps train their groups as these arrive, and ratios correct for the
weights that are older. With 0 there is one window and no sync. ``async_rl_loop`` overlaps across
windows too.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from training.config.single_turn import SingleTurnConfig
from training.config.validation import validate
from training.data.rows import IndexedRow, Row
from training.environments.choose import Given, GivenEnvironment, choose_scored_rows
from training.rewards import AnyReward
from training.rollouts.single_turn import sample_row
from training.run.begin import begin_run
from training.run.command import recipe, run_command, run_until_signal
from training.run.loop import Loop, RunSummary
from training.run.window import SampledWindow
from training.samples import RowOutcome, group_advantages, is_uniform, score_row, to_datums
from training.update import PolicyUpdate, policy_loss, refuse_pipelined_trainer


@dataclass(kw_only=True)
class Config(SingleTurnConfig):
    """Settings of ``rl_loop`` beside those that recipes share (``training.config``)."""

    log_path: str = "runs/rl_loop"
    """Folder of the run: metrics.jsonl, config.json, checkpoints."""
    tis_enabled: bool = False
    """Truncated importance sampling against the sampler's logprobs, on top of any loss."""
    loss_path: Literal["client", "builtin"] = "client"
    """Where the loss runs: in this process, or inside the trainer (no KL there)."""

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
        validate(self)


@recipe
def main(
    config: Config,
    rows: Sequence[Row] | None = None,
    *,
    reward_fn: AnyReward | None = None,
    eval_rows: Sequence[Row] | None = None,
    environment: GivenEnvironment | None = None,
) -> RunSummary:
    """Train until the rows run out.

    ``rows`` replace ``config.dataset`` and ``eval_rows`` replace ``config.eval_dataset``; neither
    is cut to the config's number of rows. ``reward_fn(text, row)`` scores one completion; it may be
    async, or guarded, and None takes ``config.reward``. A plain one is tried before anything is
    started (``config.try_reward``). ``environment`` replaces rows and rewards. Ctrl-C and SIGTERM
    end the run cleanly: what was trained is in ``log_path``, and the platform is taken down.

    Raises:
        ConfigError: a setting or a row breaks its rule; nothing was started, or the shape that the
            platform chose does not fit, and what was started is taken down.
        NoSignalError: for ``no_signal_patience`` steps no row had anything to learn from.
        ParityError: sampler and trainer disagree, and ``parity_stops`` is on.
    """
    config.validate()
    given = Given(environment, rows, eval_rows)
    rows, eval_rows, reward_fn = choose_scored_rows(config, given, reward_fn)
    with begin_run(config, rows, eval_rows, max_concurrent=config.max_concurrent) as (infra, run):
        refuse_pipelined_trainer(config, infra.policy_profile)
        run_until_signal(train(Loop(config, infra, run), reward_fn))
        return run.summary(infra)


async def train(loop: Loop[Config], reward_fn: AnyReward) -> None:
    """All windows, with a weight sync after each."""
    sync, run = loop.config.sync, loop.run
    if sync.before_training or (sync.interval > 0 and run.must_publish(loop.infra)):
        await loop.sync_weights()
    await loop.evaluate_if_due(reward_fn, always=True)
    for rows in loop.windows():
        first_step = run.step
        async with SampledWindow(loop, rows, partial(sample_group, loop, reward_fn)) as window:
            while await train_step(loop, window):
                pass
        if sync.interval > 0 and run.step > first_step:
            await loop.sync_weights()
        await loop.evaluate_if_due(reward_fn)
    await loop.evaluate_if_due(reward_fn, always=True)
    await loop.save_and_export()


async def sample_group(loop: Loop[Config], reward_fn: AnyReward, row: IndexedRow) -> RowOutcome:
    """One row: its completions, their rewards, advantages and datums; or why it is dropped."""
    config = loop.config
    with loop.run.busy.sample():
        sampled = await sample_row(config, loop.infra, row)
    scored = await score_row(config, sampled, reward_fn)
    if scored.dropped:
        return scored.drop(scored.dropped)
    if is_uniform(scored.rewards):
        return scored.drop("uniform")
    advantages = group_advantages(scored.rewards)
    datums = to_datums(scored.trajectories, advantages, config.replay)
    return scored.keep(advantages, datums)


async def train_step(loop: Loop[Config], window: SampledWindow) -> bool:
    """One optimizer step on the window's next groups, as they arrive; False when none are left."""
    config, run = loop.config, loop.run
    update = PolicyUpdate(
        config, loop.infra, run.clock, run.kl, run.comparable_version, loop.before_step
    )
    trained_version = run.version + run.steps_since_sync
    while groups := await window.next_piece():
        with run.busy.train():
            for batch in await update.prepare(groups):
                loss_fn = policy_loss(config, batch)
                await update.forward_backward(batch, loss_fn)
    if not update.groups:
        return False
    with run.busy.train():
        await update.optim_step()
    loop.count_step(update)
    run.cursor.finish(group.row.index for group in update.groups)
    loop.log_step(loop.step_metrics(update, trained_version))
    # After its record: a resumed run drops the records of steps that its checkpoint does not hold.
    await loop.save_if_due()
    return True


def command(arguments: Sequence[str] | None = None, program: str | None = None) -> int:
    """Train with the settings that files and flags give; returns the exit code."""
    return run_command(Config(), main, arguments, program=program)


if __name__ == "__main__":
    sys.exit(command())
