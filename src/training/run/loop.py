"""What the steps of a recipe that samples work on, and what it does between its steps."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Generic, TypeVar

from training.config.rl import RLConfig
from training.data.rows import IndexedRow
from training.platform.run_infra import RunInfra
from training.rewards.scoring import AnyReward
from training.run.base_loop import BaseLoop
from training.run.evaluation import evaluate
from training.run.signal import Finding
from training.run.state import RunSummary
from training.run.step_metrics import step_metrics
from training.update.parity import ParityError, parity_problem
from training.update.policy_update import PolicyUpdate

__all__ = ["Loop", "RunSummary"]

ConfigT = TypeVar("ConfigT", bound=RLConfig)


@dataclass
class Loop(BaseLoop[ConfigT, RunInfra], Generic[ConfigT]):
    """``BaseLoop`` with what is sampled, published and evaluated."""

    def windows(self) -> Iterator[Iterator[IndexedRow]]:
        """The same rows once for each window, which takes as many of them as it needs."""
        rows = self.rows()
        for row in rows:
            yield chain([row], rows)

    async def sync_weights(self) -> None:
        """Publish the policy's weights: the deployment samples with them from now on."""
        with self.run.clock.span("perf/weight_sync_time"):
            await asyncio.to_thread(self.infra.syncer.save_and_hotload, f"step-{self.run.step:05d}")
            self.run.note_version(self.infra.syncer.version, self.run.step)
        self.run.synced_step = self.run.step

    def before_step(self, update: PolicyUpdate) -> None:
        """To be called right before an optimizer step is asked for: it gets its learning rate, and
        the last one of an update leaves time to write what it trains."""
        rows = [group.row.index for group in update.groups]
        update.adam_params = self.adam_params(rows, update.optimizer_steps)
        if update.is_whole:
            step = self.run.step + update.optimizer_steps + 1
            self.run.recorder.begin_step(step, update.groups)

    def count_step(self, update: PolicyUpdate) -> None:
        """Count the optimizer steps of an update that is done."""
        self.count_steps(update.optimizer_steps)
        self.run.recorder.begin_step(self.run.step, update.groups)

    def step_metrics(self, update: PolicyUpdate, version: int) -> dict[str, float]:
        """The metrics of a finished step, for ``log_step``; its samples are on disk then."""
        with self.run.clock.span("perf/record_wait_time"):
            self.run.recorder.finish()
        return step_metrics(self.run, update, self.config.completions_per_prompt, version)

    def log_step(self, metrics: dict[str, float]) -> None:
        """Write, show and judge a step's metrics, and start counting for the next step.

        Raises:
            ParityError: sampler and trainer disagree, and ``parity_stops`` is on.
        """
        super().log_step(metrics)
        self.check_parity(metrics)

    def check_parity(self, metrics: dict[str, float]) -> None:
        """Log it, or end the run, when sampler and trainer disagree.

        Raises:
            ParityError: they do, and ``parity_stops`` is on.
        """
        problem = parity_problem(metrics, self.config.parity_threshold)
        if problem is None:
            return
        if self.config.parity_stops:
            raise ParityError(f"step {self.run.step}: {problem}")
        self.run.signal.report(self.run.step, Finding("parity", problem))

    async def evaluate_if_due(self, reward_fn: AnyReward, *, always: bool = False) -> None:
        """Held-out accuracy of what the deployment serves, every ``eval_every`` steps."""
        config, run = self.config, self.run
        if not run.is_eval_due(config, run.step, always=always):
            return
        run.eval_begun = run.step
        with run.clock.span("perf/eval_time"):
            try:
                result = await evaluate(self.infra.sampler, run.eval_rows, reward_fn, config)
            except Exception as error:  # noqa: BLE001 - whatever a reward function raises
                run.note_failed_evaluation(run.step, error)
                return
        run.note_evaluation(run.step, result)
