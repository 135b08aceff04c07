"""The state of one run, and what every recipe does with it: save, resume, evaluate, export."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hearth.errors import ConfigError, HearthError, NotFoundError, RequestFailedError
from hearth.records.timeline import OLDER_CHECKPOINT
from hearth.telemetry import BusyClock, Stopwatch
from training.config.recipe import RecipeConfig
from training.config.rl import RLConfig
from training.data.rows import Row
from training.platform.run_infra import RunInfra, TrainerInfra, is_embedded
from training.run.checkpoints import (
    Checkpoint,
    Cursor,
    check_adapter,
    check_reference,
    checkpoint_reference,
)
from training.run.evaluation import EvalResult
from training.run.metrics import Display, MetricsLog
from training.run.recorder import Recorder
from training.run.signal import SignalWatch
from training.run.timeline import Timeline
from training.samples.groups import RolloutStats, RowOutcome
from training.samples.trajectories import WHY_DROPPED
from training.update.kl_control import AdaptiveKL, kl_control

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
    accepted_samples: int = 0
    """Samples of the groups that are published, in loops that overlap; earlier starts count too."""
    stale_drops: int = 0
    """Rows given up as too late; earlier starts count too."""
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
    drops_truncated: bool = False
    """Whether to say that truncated completions are left out."""
    kl: AdaptiveKL | None = None
    """What adapts the weight of the KL; None where it is fixed."""
    signal: SignalWatch = field(default_factory=SignalWatch)
    """Says when there is nothing to learn from."""
    stats: RolloutStats = field(default_factory=RolloutStats)
    clock: Stopwatch = field(default_factory=Stopwatch)
    timeline: Timeline = field(default_factory=Timeline)
    recorder: Recorder = field(default_factory=Recorder)
    busy: BusyClock = field(default_factory=BusyClock)
    checkpoints: list[Checkpoint] = field(default_factory=list)
    evaluations: list[tuple[int, EvalResult]] = field(default_factory=list)
    eval_begun: int | None = None
    """Step at which the last evaluation began, whatever became of it."""
    model_path: Path | None = None

    def summary(self, infra: TrainerInfra) -> RunSummary:
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
        self.recorder.begin_evaluation(step, self.eval_rows, result.sampled_trajectories)
        self.recorder.finish()
        self.note_held_out(step, {**result.metrics(), **(times or {})}, result.describe())

    def note_held_out(self, step: int, metrics: Mapping[str, float], told: str) -> None:
        """Write and show what was measured on held-out rows with the weights of ``step``."""
        self.log.write("eval", step, metrics)
        said = f"held-out {told}"
        self.timeline.event("eval", said, step=step)
        self.display.note(f"step {step:>4}  {said}")

    def note_version(self, version: int, step: int) -> None:
        """Count a weight sync: the deployment serves the weights of ``step`` as ``version``."""
        self.version = self.timeline.version = version
        self.timeline.event("weight_sync", f"version {version}", step=step, version=version)

    def warn(self, line: str) -> None:
        """Say what is wrong with the training, on the timeline too."""
        self.display.note(line)
        self.timeline.event("warning", line, step=self.step)

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

    def begin(
        self, config: RecipeConfig, infra: TrainerInfra, checkpoint: Checkpoint | None
    ) -> None:
        """Load what the run starts from, and say it in one line.

        This run's own checkpoint comes first, then ``init_from_checkpoint`` (its weights and
        optimizer, from step 0 and the first row), then ``warm_start_from_adapter``, else the model
        as it is.
        """
        self._check_output(config, infra)
        self.signal = SignalWatch(note=self.warn)
        if isinstance(config, RLConfig) and isinstance(infra, RunInfra):
            self._begin_sampling(config, infra)
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
        if isinstance(infra, RunInfra):
            self.synced_step = None if self.must_publish(infra) else self.step

    def _begin_sampling(self, config: RLConfig, infra: RunInfra) -> None:
        self.version = self.timeline.version = infra.served_version
        self.drops_truncated = config.truncated_completions == "drop"
        self.kl = kl_control(config)
        self.signal = SignalWatch(
            config.no_signal_patience,
            config.prompt_groups_per_step,
            self.warn,
            infra.tokenizer.decode,
        )

    def _check_output(self, config: RecipeConfig, infra: TrainerInfra) -> None:
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

    def _restore(self, config: RecipeConfig, infra: TrainerInfra, checkpoint: Checkpoint) -> None:
        checkpoint = self._load_newest(config, infra, checkpoint)
        self.step = config.resume.step_offset or checkpoint.step
        self.cursor = Cursor(checkpoint.cursor, set(checkpoint.beyond))
        self.saved = (self.step, self.cursor.count)
        self.accepted_samples = checkpoint.accepted_samples
        self.stale_drops = checkpoint.stale_drops
        if self.kl is not None and checkpoint.kl_beta is not None:
            self.kl.coefficient = checkpoint.kl_beta
        # What was trained after it is trained anew.
        self.checkpoints = self.checkpoints[: self.checkpoints.index(checkpoint) + 1]
        self.display.note(
            f"resuming from {checkpoint.name} of trainer job "
            f"{checkpoint.job or infra.policy_job_id}: step {self.step}, {self.cursor.count} of "
            f"{len(self.rows) * config.epochs} rows done"
        )
        if self.cursor.count >= len(self.rows) * config.epochs:
            self.display.note(
                'this run is finished; to train more, give more epochs with resume="force", or '
                "another log_path"
            )

    def _load_newest(
        self, config: RecipeConfig, infra: TrainerInfra, checkpoint: Checkpoint
    ) -> Checkpoint:
        """Load a checkpoint, or the newest older one where it cannot be loaded; returns which.

        Raises:
            HearthError: it cannot be loaded, and was named by the config or is followed by none
                that can.
        """
        index = self.checkpoints.index(checkpoint)
        is_named = config.resume.resume_from not in (None, "latest")
        older = [] if is_named else self.checkpoints[:index]
        first: HearthError | None = None
        for candidate in (checkpoint, *reversed(older)):
            try:
                self._check_identity(infra, candidate)
                path = candidate.name
                if candidate.job not in (None, infra.policy_job_id):
                    path = infra.policy_client.resolve_checkpoint_path(path, candidate.job)
                infra.policy.load_state_with_optimizer(path)
            except (NotFoundError, RequestFailedError) as error:
                first = first or error
                logger.warning("checkpoint %s cannot be loaded: %s", candidate.name, error)
                continue
            if candidate is not checkpoint:
                self.display.note(
                    f"{checkpoint.name} cannot be loaded ({first}): going on from the older "
                    f"{candidate.name}; its later steps are taken again"
                )
                self.log.drop_after(candidate.step)
                self.timeline.event(OLDER_CHECKPOINT, candidate.name, step=candidate.step)
            return candidate
        assert first is not None, "nothing was loaded"
        raise first

    def _check_identity(self, infra: TrainerInfra, checkpoint: Checkpoint) -> None:
        """Refuse a checkpoint that has the name of this run's but was written by another save.

        Raises:
            NotFoundError: the platform has another one under the name, as after it was set back.
        """
        job = checkpoint.job or infra.policy_job_id
        try:
            entries = infra.trainers.list_checkpoints(job)
        except NotFoundError:  # an embedded platform has the folders of jobs that it does not know
            return
        for entry in entries:
            if entry.name.rsplit("/", 1)[-1] != checkpoint.name:
                continue
            held = (entry.metadata or {}).get("save_id")
            if checkpoint.save_id is not None and held != checkpoint.save_id:
                raise NotFoundError(
                    f"checkpoint {checkpoint.name!r} of job {job!r} must be the one that this run "
                    f"saved ({checkpoint.save_id}), got {held}: was the platform's data folder set "
                    "back?"
                )

    def count_outcome(self, outcome: RowOutcome) -> None:
        """Count what became of a row; one without a group is finished.

        The first truncated completion that is left out is said.

        Raises:
            NoSignalError: for ``no_signal_patience`` steps no row had anything to learn from.
        """
        self.stats.add(outcome)
        self.recorder.see_row(outcome)
        self._see_sampling(outcome)
        if outcome.truncated and self.drops_truncated:
            self.drops_truncated = False  # it is said once
            self.display.note(
                f"{outcome.truncated} completions of row {outcome.row.index} were cut at "
                "max_completion_tokens and are left out, since they were not finished: raise it, "
                'or give truncated completions a reward with truncated_completions="score"'
            )
        if outcome.group is None:
            self.cursor.finish([outcome.row.index])
            self.display.rows(self.cursor.count)
        self.signal.see_row(outcome)

    def _see_sampling(self, outcome: RowOutcome) -> None:
        """Have the timeline show when a row was sampled, and by which weights, the newest."""
        spans = [
            (trajectory.started, trajectory.started + (trajectory.sample_s or 0.0))
            for trajectory in outcome.sampled_trajectories
            if trajectory.started is not None
        ]
        versions = [
            version
            for trajectory in outcome.sampled_trajectories
            for segment in trajectory.segments
            for version, _ in segment.versions or ()
        ]
        if spans:
            start, end = min(start for start, _ in spans), max(end for _, end in spans)
            facts = {"version": max(versions)} if versions else {}
            self.timeline.see_span(
                "sampler", "sample", start, end, rows=[outcome.row.index], **facts
            )

    def mention_untrained_rows(self) -> None:
        """Say why, when the rows since the last step left nothing to train on."""
        if not self.stats.dropped:
            return
        reasons = ", ".join(
            f"{count} {WHY_DROPPED.get(reason, reason)}"
            for reason, count in sorted(self.stats.dropped.items())
        )
        since = f"after step {self.step}" if self.step else "and no optimizer step was taken"
        self.display.note(f"{self.stats.dropped.total()} rows were dropped {since}: {reasons}")

    @property
    def comparable_version(self) -> int | None:
        """The weight version that the trainer's weights are served as; None where they are not."""
        return self.version if self.synced_step == self.step else None

    @property
    def steps_since_sync(self) -> int:
        """Optimizer steps that the trainer's weights are ahead of those that sample."""
        return self.step - (self.synced_step or 0)

    def start_step(self) -> None:
        """Begin counting for the next step."""
        self.stats = RolloutStats()
        self.step_started = self.now()
        self.timeline.begin_step(self.step + 1)
