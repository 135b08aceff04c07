"""What the steps of a recipe work on, and what every recipe does between its steps."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Generic, TypeVar

from hearth.errors import HearthError
from training.config.parts import is_given, plain_config
from training.config.recipe import RecipeConfig
from training.data.rows import IndexedRow, epoch_rows
from training.platform.run_infra import RunInfra
from training.rewards.scoring import AnyReward
from training.run.checkpoints import Checkpoint, write_manifest
from training.run.closing import model_card
from training.run.evaluation import evaluate
from training.run.signal import Finding
from training.run.state import Run, RunSummary
from training.run.step_metrics import step_metrics
from training.samples.groups import rollout_metrics
from training.update.parity import ParityError, parity_problem
from training.update.policy_update import PolicyUpdate

__all__ = ["Loop", "RunSummary"]

ConfigT = TypeVar("ConfigT", bound=RecipeConfig)

FINAL_MODEL = "final"
"""The trained model's name where ``output_model_id`` gives none."""
AUTOMATIC_SAVE_RATIO = 50.0
"""Automatic checkpoints are this many times as far apart as the last one took to write."""


@dataclass
class Loop(Generic[ConfigT]):
    """A run with its config and the platform that it runs on."""

    config: ConfigT
    infra: RunInfra
    run: Run

    def rows(self) -> Iterator[IndexedRow]:
        """The unfinished rows of all epochs, in training order."""
        config = self.config
        return epoch_rows(
            self.run.rows,
            epochs=config.epochs,
            shuffle=config.shuffle,
            seed=config.seed,
            done=self.run.cursor.list_finished(),
        )

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
        """To be called right before an optimizer step is asked for: the last one of an update
        leaves time to write what it trains."""
        if update.is_whole:
            step = self.run.step + update.optimizer_steps + 1
            self.run.recorder.begin_step(step, update.groups)

    def count_step(self, update: PolicyUpdate) -> None:
        """Count the optimizer steps of an update that is done."""
        run = self.run
        run.step += update.optimizer_steps
        run.recorder.begin_step(run.step, update.groups)
        if math.isnan(run.first_step_s):
            run.first_step_s = time.perf_counter() - run.started

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
        run = self.run
        run.log.write("train", run.step, metrics)
        run.display.step(run.step, run.cursor.count, metrics)
        run.signal.see_step(run.step, metrics)
        self.check_parity(metrics)
        run.start_step()

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

    async def save_if_due(self, *, is_last: bool = False) -> None:
        """A resumable checkpoint and, only when it is written, the manifest that names it."""
        config, infra, run = self.config, self.infra, self.run
        if not self.is_save_due(is_last=is_last):
            return
        name = f"step-{run.step:05d}"
        checkpoint = Checkpoint(
            name=name,
            step=run.step,
            cursor=run.cursor.start,
            beyond=sorted(run.cursor.beyond),
            seed=config.seed,
            version=run.version,
            job=infra.policy_job_id,
            kl_beta=run.kl.coefficient if run.kl else None,
            save_id=secrets.token_hex(8),
        )
        # The rows that the cursor counts already, though no step has trained them.
        run.recorder.begin_flush()
        metadata = {**asdict(checkpoint), "config": plain_config(config)}
        with run.clock.span("perf/dcp_save_time"):
            started = run.now()
            saving = infra.policy_client.save_state(name, overwrite=True, metadata=metadata)
            await saving.result_async(config.sync.dcp_timeout_s)
            run.saved_at = run.now()
            run.save_s = run.saved_at - started
        run.saved = (run.step, run.cursor.count)
        known = [older for older in run.checkpoints if older.name != name] + [checkpoint]
        run.checkpoints = await asyncio.to_thread(_find_held, known, infra)
        run.recorder.finish()
        write_manifest(run.log_path, run.checkpoints)
        run.timeline.event("checkpoint", name, step=run.step)

    def is_save_due(self, *, is_last: bool = False) -> bool:
        """Whether ``save_if_due`` would write a checkpoint now."""
        config, run = self.config, self.run
        if run.step == 0 or (run.step, run.cursor.count) == run.saved:
            return False
        interval = config.sync.dcp_save_interval
        is_automatic = not is_given(interval) and self.infra.is_embedded
        if is_last:
            return config.save_final_checkpoint and (is_automatic or interval > 0)
        if is_automatic:
            return run.now() - run.saved_at >= AUTOMATIC_SAVE_RATIO * run.save_s
        return 0 < interval <= run.step - run.saved[0]

    async def save_and_export(self) -> None:
        """What a finished run leaves behind: a last checkpoint, and the model."""
        await self.save_last()
        await self.export()

    async def save_last(self) -> None:
        """Write a last checkpoint.

        Where the rows since the last step left nothing to train on, a record and a line say why.
        """
        if self.run.stats.dropped:
            self.run.log.write("dropped", self.run.step, rollout_metrics(self.run.stats, ()))
        self.run.mention_untrained_rows()
        await self.save_if_due(is_last=True)

    async def export(self) -> None:
        """Make a model of the final weights, with its card; none where no step was taken.

        Without ``output_model_id`` an embedded platform has it as ``models/final`` in the run's
        folder, and a served one under the name of the trainer job.
        """
        config, infra, run = self.config, self.infra, self.run
        name = config.output_model_id
        if name is None:
            if run.step == 0:
                return
            name = FINAL_MODEL if infra.is_embedded else infra.policy_job_id
        saving = infra.policy_client.save_weights_for_sampler(f"final-{run.step:05d}", "base")
        saved = await saving.result_async(config.sync.dcp_timeout_s)
        model = await infra.trainers.promote_checkpoint_async(
            infra.policy_job_id,
            saved.snapshot_name,
            name,
            infra.policy_client.base_model,
            merge_adapter=config.merge_adapter,
            card=model_card(config, run),
        )
        run.model_path = Path(model.source) if model.source else None
        if not infra.is_embedded:
            serving = f": hearth deploy {model.name} serves it"
            is_whole = config.lora_rank == 0 or config.merge_adapter
            run.display.note(
                f"the trained model is {model.name}, in {model.source}{serving if is_whole else ''}"
            )


def _find_held(checkpoints: list[Checkpoint], infra: RunInfra) -> list[Checkpoint]:
    """The checkpoints that the trainer still has, and those of other jobs, which it cannot list."""
    try:
        held = infra.policy.list_checkpoints()
    except HearthError:  # the new checkpoint is written; the manifest may name older ones for now
        return checkpoints
    return [
        checkpoint
        for checkpoint in checkpoints
        if checkpoint.job != infra.policy_job_id or checkpoint.name in held
    ]
