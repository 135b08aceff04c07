"""A run with its config and its platform, and what every recipe does between its steps."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Generic, TypeVar

import tinker

from hearth.errors import HearthError
from training.config.parts import is_given, plain_config
from training.config.recipe import RecipeConfig
from training.data.rows import IndexedRow, epoch_rows
from training.platform.run_infra import TrainerInfra
from training.run.checkpoints import Checkpoint, write_manifest
from training.run.closing import model_card
from training.run.state import Run
from training.samples.groups import rollout_metrics
from training.update.optimizer import StepPlace, adam_params, scheduled_rate

ConfigT = TypeVar("ConfigT", bound=RecipeConfig)
InfraT = TypeVar("InfraT", bound=TrainerInfra)

FINAL_MODEL = "final"
"""The trained model's name where ``output_model_id`` gives none."""
AUTOMATIC_SAVE_RATIO = 50.0
"""Automatic checkpoints are this many times as far apart as the last one took to write."""


@dataclass
class BaseLoop(Generic[ConfigT, InfraT]):
    """A run with its config and the platform that it runs on."""

    config: ConfigT
    infra: InfraT
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

    def adam_params(self, rows: Sequence[int], steps_taken: int = 0) -> tinker.AdamParams:
        """What the optimizer is given for a step on rows of these places in the training order.

        ``steps_taken`` are optimizer steps that the run has not counted yet.
        """
        config, run = self.config, self.run
        place = StepPlace(
            step=run.step + steps_taken,
            first=min(rows),
            end=max(rows) + 1,
            total=len(run.rows) * config.epochs,
        )
        return adam_params(config, scheduled_rate(config, place))

    def count_steps(self, count: int = 1) -> None:
        """Count optimizer steps that are done."""
        self.run.step += count
        if math.isnan(self.run.first_step_s):
            self.run.first_step_s = time.perf_counter() - self.run.started

    def log_step(self, metrics: dict[str, float]) -> None:
        """Write, show and judge a step's metrics, and start counting for the next step."""
        run = self.run
        run.log.write("train", run.step, metrics)
        run.display.step(run.step, run.cursor.count, metrics)
        run.signal.see_step(run.step, metrics)
        run.start_step()

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
            accepted_samples=run.accepted_samples,
            stale_drops=run.stale_drops,
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


def _find_held(checkpoints: list[Checkpoint], infra: TrainerInfra) -> list[Checkpoint]:
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
