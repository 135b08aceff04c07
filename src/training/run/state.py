"""The state of one run, and what every recipe does with it: save, resume, evaluate, export."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hearth.errors import ConfigError, HearthError
from hearth.telemetry import BusyClock, Stopwatch
from training.config.parts import is_given, plain_config
from training.config.recipe import RecipeConfig
from training.data.rows import Row
from training.platform.run_infra import RunInfra, is_embedded
from training.rewards.scoring import AnyReward
from training.run.checkpoints import (
    Checkpoint,
    Cursor,
    check_adapter,
    check_reference,
    checkpoint_reference,
    write_manifest,
)
from training.run.evaluation import EvalResult, evaluate
from training.run.metrics import Display, MetricsLog
from training.run.signal import Finding, SignalWatch
from training.samples.groups import PromptGroup, RolloutStats
from training.update.kl_control import AdaptiveKL, kl_control
from training.update.parity import ParityError, parity_problem

logger = logging.getLogger(__name__)


def check_start(config: RecipeConfig) -> None:
    """Judge what a run without a checkpoint of its own starts from, before anything is provisioned.

    Raises:
        ConfigError: it is not there, or not of the right kind.
    """
    if config.init_from_checkpoint is not None:
        check_reference(config.init_from_checkpoint, is_embedded=is_embedded())
    if config.warm_start_from_adapter is not None:
        check_adapter(config.warm_start_from_adapter, is_embedded=is_embedded())


AUTOMATIC_SAVE_RATIO = 50.0
"""Checkpoints that nobody asked for wait this many times as long as the last one took."""

_WHY_DROPPED = {
    "uniform": "whose completions all earned the same reward",
    "too_few": "with fewer than two finished completions (is max_completion_tokens too small?)",
    "non_finite": "with a reward that is NaN or infinite",
    "overlong_prompt": "whose prompt leaves no room below max_seq_len",
    "failed": "whose sampling failed",
    "filtered": "that dynamic_filter_fn did not accept",
    "stale": "that were still being drawn when their last chance was over (late_row_wait_s)",
}


@dataclass(frozen=True)
class RunSummary:
    """What a finished run reports. ``evaluations`` are (step, result) in order.

    ``version`` is the deployment's: the weight syncs that it has had, those of before included.
    """

    steps: int
    version: int
    rows: int
    policy_job_id: str
    reference_job_id: str | None
    deployment_id: str | None
    log_path: Path
    first_step_s: float
    wall_s: float
    evaluations: list[tuple[int, EvalResult]]
    model_path: Path | None


@dataclass
class Run:
    """What changes while a recipe runs."""

    log_path: Path
    log: MetricsLog
    display: Display
    rows: Sequence[Row]
    eval_rows: Sequence[Row]
    started: float
    cursor: Cursor = field(default_factory=Cursor)
    step: int = 0
    version: int = 0
    """Weight syncs that the deployment has had; a deployment made anew counts from 0."""
    synced_step: int | None = None
    """The step whose weights the deployment serves; None where that is not known."""
    failed_in_a_row: int = 0
    first_step_s: float = math.nan
    now: Callable[[], float] = time.perf_counter
    """The clock of steps and automatic checkpoints, in seconds."""
    step_started: float = field(default_factory=time.perf_counter)
    on_progress: Callable[[], None] = lambda: None
    """Called after every step, for whoever watches."""
    saved_at: float = 0.0
    save_s: float = 0.0
    saved: tuple[int, int] = (0, 0)
    """Step and number of finished rows of the last checkpoint."""
    has_loaded: bool = False
    kl: AdaptiveKL | None = None
    """What adapts the weight of the KL; None where it is fixed."""
    signal: SignalWatch = field(default_factory=SignalWatch)
    """Says when there is nothing to learn from."""
    stats: RolloutStats = field(default_factory=RolloutStats)
    clock: Stopwatch = field(default_factory=Stopwatch)
    busy: BusyClock = field(default_factory=BusyClock)
    checkpoints: list[Checkpoint] = field(default_factory=list)
    evaluations: list[tuple[int, EvalResult]] = field(default_factory=list)
    eval_begun: int | None = None
    """Step at which the last evaluation began, whatever became of it."""
    model_path: Path | None = None

    def summary(self, infra: RunInfra) -> RunSummary:
        """What the finished run reports."""
        return RunSummary(
            steps=self.step,
            version=self.version,
            rows=self.cursor.count,
            policy_job_id=infra.policy_job_id,
            reference_job_id=infra.reference_job_id,
            deployment_id=infra.deployment_id,
            log_path=self.log_path,
            first_step_s=self.first_step_s,
            wall_s=time.perf_counter() - self.started,
            evaluations=self.evaluations,
            model_path=self.model_path,
        )

    async def evaluate_if_due(
        self, config: RecipeConfig, infra: RunInfra, reward_fn: AnyReward, *, always: bool = False
    ) -> None:
        """Held-out accuracy of what the deployment serves, every ``eval_every`` steps."""
        if not self.is_eval_due(config, self.step, always=always):
            return
        self.eval_begun = self.step
        with self.clock.span("perf/eval_time"):
            try:
                result = await evaluate(
                    infra.sampler,
                    self.eval_rows,
                    reward_fn,
                    temperature=config.temperature,
                    samples_per_prompt=config.eval_samples_per_prompt,
                    max_tokens=config.max_completion_tokens,
                    seed=config.seed,
                )
            except Exception as error:  # noqa: BLE001 - whatever a reward function raises
                self.note_failed_evaluation(self.step, error)
                return
        self.note_evaluation(self.step, result)

    def is_eval_due(self, config: RecipeConfig, step: int, *, always: bool = False) -> bool:
        """Whether the weights of ``step`` are to be evaluated, and have not been."""
        if not self.eval_rows or self.eval_begun == step:
            return False
        return always or 0 < config.eval_every <= step - (self.eval_begun or 0)

    def note_evaluation(
        self, step: int, result: EvalResult, times: Mapping[str, float] | None = None
    ) -> None:
        """Keep, write and show the result of an evaluation that began at ``step``."""
        self.evaluations.append((step, result))
        self.log.write("eval", step, {**result.metrics(), **(times or {})})
        self.display.note(f"step {step:>4}  held-out accuracy {result.accuracy:.3f}")

    def note_failed_evaluation(self, step: int, error: Exception) -> None:
        """Say that an evaluation has no record, with its traceback; the run goes on."""
        notes = "".join(f", {note}" for note in getattr(error, "__notes__", []))
        logger.warning(
            "the evaluation of step %d failed and has no record: %s: %s%s",
            step,
            type(error).__name__,
            error,
            notes,
            exc_info=error,
        )

    async def save_if_due(
        self, config: RecipeConfig, infra: RunInfra, *, is_last: bool = False
    ) -> None:
        """A resumable checkpoint and, only when it is written, the manifest that names it."""
        if not self.is_save_due(config, infra, is_last=is_last):
            return
        name = f"step-{self.step:05d}"
        point = Checkpoint(
            name=name,
            step=self.step,
            cursor=self.cursor.start,
            beyond=sorted(self.cursor.beyond),
            seed=config.seed,
            version=self.version,
            job=infra.policy_job_id,
            kl_beta=self.kl.coefficient if self.kl else None,
        )
        with self.clock.span("perf/dcp_save_time"):
            started = self.now()
            saving = infra.policy_client.save_state(
                name, overwrite=True, metadata={**asdict(point), "config": plain_config(config)}
            )
            await saving.result_async(config.sync.dcp_timeout_s)
            self.saved_at = self.now()
            self.save_s = self.saved_at - started
        self.saved = (self.step, self.cursor.count)
        known = [checkpoint for checkpoint in self.checkpoints if checkpoint.name != name] + [point]
        self.checkpoints = await asyncio.to_thread(_unretired, known, infra)
        write_manifest(self.log_path, self.checkpoints)

    def is_save_due(self, config: RecipeConfig, infra: RunInfra, *, is_last: bool = False) -> bool:
        """Whether ``save_if_due`` would write a checkpoint now."""
        if self.step == 0 or (self.step, self.cursor.count) == self.saved:
            return False
        interval = config.sync.dcp_save_interval
        is_automatic = not is_given(interval) and infra.is_embedded
        if is_last:
            return config.save_final_checkpoint and (is_automatic or interval > 0)
        if is_automatic:
            return self.now() - self.saved_at >= AUTOMATIC_SAVE_RATIO * self.save_s
        return 0 < interval <= self.step - self.saved[0]

    def begin(self, config: RecipeConfig, infra: RunInfra, checkpoint: Checkpoint | None) -> None:
        """Load what the run starts from, and say it in one line.

        This run's own checkpoint comes first, then ``init_from_checkpoint`` (its weights and
        optimizer, from step 0 and the first row), then ``warm_start_from_adapter``, else the model
        as it is.
        """
        self._check_output(config, infra)
        self.version = infra.served_version
        self.kl = kl_control(config)
        self.signal = SignalWatch(
            config.no_signal_patience,
            config.prompt_groups_per_step,
            self.display.note,
            infra.tokenizer.decode,
        )
        self.has_loaded = bool(
            checkpoint or config.init_from_checkpoint or config.warm_start_from_adapter
        )
        if checkpoint is not None:
            self._restore(config, infra, checkpoint)
        elif config.init_from_checkpoint is not None:
            path = checkpoint_reference(config.init_from_checkpoint, infra)
            infra.policy.load_state_with_optimizer(path)
            self.display.note(f"starting at step 0 from checkpoint {config.init_from_checkpoint}")
        elif config.warm_start_from_adapter is not None:
            infra.policy.load_adapter(str(Path(config.warm_start_from_adapter).expanduser()))
            self.display.note(f"starting at step 0 from adapter {config.warm_start_from_adapter}")
        self.synced_step = None if self.must_publish(infra) else self.step

    def _check_output(self, config: RecipeConfig, infra: RunInfra) -> None:
        """Refuse a name that another job's model has, now rather than after the training.

        Raises:
            ConfigError: it has one.
        """
        if config.output_model_id is None:
            return
        model = infra.trainers.find_model(config.output_model_id)
        own = (infra.policy_job_id, f"accounts/me/rlorTrainerJobs/{infra.policy_job_id}")
        if model is not None and model.source_job not in own:
            raise ConfigError(
                f"output_model_id must be new, got {config.output_model_id!r}, which "
                f"{model.source_job or 'the catalog'} has made: choose another"
            )

    def must_publish(self, infra: RunInfra) -> bool:
        """Whether the deployment serves other weights than the policy's before the first sample."""
        return self.has_loaded or infra.serves_older_snapshot

    def _restore(self, config: RecipeConfig, infra: RunInfra, checkpoint: Checkpoint) -> None:
        path = checkpoint.name
        if checkpoint.job not in (None, infra.policy_job_id):
            path = infra.policy_client.resolve_checkpoint_path(checkpoint.name, checkpoint.job)
        infra.policy.load_state_with_optimizer(path)
        self.step = config.resume.step_offset or checkpoint.step
        self.cursor = Cursor(checkpoint.cursor, set(checkpoint.beyond))
        self.saved = (self.step, self.cursor.count)
        if self.kl is not None and checkpoint.kl_beta is not None:
            self.kl.coefficient = checkpoint.kl_beta
        # What was trained after it is trained anew.
        self.checkpoints = self.checkpoints[: self.checkpoints.index(checkpoint) + 1]
        self.display.note(
            f"resuming from {checkpoint.name} of trainer job "
            f"{checkpoint.job or infra.policy_job_id}: step {self.step}, {self.cursor.count} of "
            f"{len(self.rows) * config.epochs} rows done"
        )

    async def export_model(self, config: RecipeConfig, infra: RunInfra) -> None:
        """Promote the final weights, where ``output_model_id`` names a model."""
        if config.output_model_id is None:
            return
        saving = infra.policy_client.save_weights_for_sampler(f"final-{self.step:05d}", "base")
        saved = await saving.result_async(config.sync.dcp_timeout_s)
        model = await asyncio.to_thread(
            infra.trainers.promote_checkpoint,
            infra.policy_job_id,
            saved.snapshot_name,
            config.output_model_id,
            infra.policy_client.base_model,
            merge_adapter=config.merge_adapter,
        )
        self.model_path = Path(model.source) if model.source else None
        self.display.note(f"the trained model is {model.name}, in {model.source}")

    def mention_untrained_rows(self) -> None:
        """Say why, when the rows since the last step left nothing to train on."""
        if not self.stats.dropped:
            return
        reasons = ", ".join(
            f"{count} {_WHY_DROPPED.get(reason, reason)}"
            for reason, count in sorted(self.stats.dropped.items())
        )
        since = f"after step {self.step}" if self.step else "and no optimizer step was taken"
        self.display.note(f"{self.stats.dropped.total()} rows were dropped {since}: {reasons}")

    @property
    def comparable_version(self) -> int | None:
        """The weight version that the trainer's weights are served as; None where they are not."""
        return self.version if self.synced_step == self.step else None

    def see_step(self, config: RecipeConfig, metrics: Mapping[str, float]) -> None:
        """Say what is wrong with a step that is written down.

        Raises:
            ParityError: sampler and trainer disagree, and ``parity_stops`` is on.
        """
        self.signal.see_step(self.step, metrics)
        problem = parity_problem(metrics, config.parity_threshold)
        if problem is None:
            return
        if config.parity_stops:
            raise ParityError(f"step {self.step}: {problem}")
        self.signal.report(self.step, Finding("parity", problem))

    def start_step(self) -> None:
        """Begin counting for the next step."""
        self.stats = RolloutStats()
        self.step_started = self.now()


def _unretired(checkpoints: list[Checkpoint], infra: RunInfra) -> list[Checkpoint]:
    """Those that the trainer still has; of another job's nothing is known, and they stay."""
    try:
        kept = infra.policy.list_checkpoints()
    except HearthError:  # the checkpoint is written; to tidy the manifest can wait
        return checkpoints
    return [
        checkpoint
        for checkpoint in checkpoints
        if checkpoint.job != infra.policy_job_id or checkpoint.name in kept
    ]


def step_times(run: Run, groups: Sequence[PromptGroup]) -> dict[str, float]:
    """``perf/*`` of the step that ends now: seconds by phase, shares of the wall time, rates.

    Weight sync and checkpoint come after their step's record and so count in the next one.
    """
    wall = max(run.now() - run.step_started, 1e-9)
    times = run.clock.take()
    both, sampling, training = run.busy.take()
    tokens = sum(len(one.drawn.tokens) for group in groups for one in group.flat())
    drawn = sum(sum(group.completion_lens) for group in groups)
    train = times.get("perf/fwd_bwd_time", 0.0) + times.get("perf/optim_step_time", 0.0)
    metrics = times | {
        "perf/step_wall_time": wall,
        "perf/overlap_ratio": both / wall,
        "perf/trainer_wait_for_sampler_time": sampling,
        "perf/sampler_wait_for_trainer_time": training,
        "perf/wait_time_ratio": times.get("perf/sample_wait_time", 0.0) / wall,
        "perf/weight_sync_ratio": times.get("perf/weight_sync_time", 0.0) / wall,
        "perf/rollout_tokens_per_s": drawn / wall,
        "perf/rollout_samples_per_s": run.stats.samples / wall,
    }
    if train:
        metrics["perf/train_tokens_per_s"] = tokens / train
    if times.get("perf/ref_forward_time"):
        metrics["perf/ref_tokens_per_s"] = tokens / times["perf/ref_forward_time"]
    return metrics


def batch_metrics(
    results: Sequence[tuple[int, Mapping[str, float]]], completions_per_prompt: int
) -> dict[str, float]:
    """How the step was cut into calls: (samples, metrics) of each; 0 samples is an optimizer's.

    Groups are counted as ``completions_per_prompt`` samples.
    """
    samples = [count for count, _ in results if count]
    optimizer_calls = sum(count == 0 for count, _ in results)
    groups = [count / completions_per_prompt for count in samples]
    return {
        "rollout/fwd_bwd_count": float(len(samples)),
        "train/effective_grad_accum_steps": len(samples) / max(1, optimizer_calls),
        "batch/mean_samples_per_fwd_bwd": sum(samples) / len(samples),
        "batch/mean_prompt_groups_per_fwd_bwd": sum(groups) / len(groups),
        "batch/max_prompt_groups_per_fwd_bwd": max(groups),
        "batch/min_prompt_groups_per_fwd_bwd": min(groups),
    }


def merged_metrics(results: Sequence[tuple[int, Mapping[str, float]]]) -> dict[str, float]:
    """Metrics of a step's calls as one: sums for ``name:sum``, else means.

    Means weigh each forward and backward call by its samples, and optimizer calls equally.
    """
    totals: dict[str, float] = {}
    weights: dict[str, float] = {}
    for count, metrics in results:
        for name, value in metrics.items():
            is_sum = name.endswith(":sum")
            name = name.removesuffix(":mean").replace(":", "_")
            weight = 1.0 if is_sum or count == 0 else float(count)
            totals[name] = totals.get(name, 0.0) + weight * value
            weights[name] = 1.0 if is_sum else weights.get(name, 0.0) + weight
    return {name: total / weights[name] for name, total in totals.items()}
