"""The state of one run, and what every recipe does with it: save, resume, evaluate, export."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import orjson

from hearth.errors import ConfigError
from hearth.telemetry import BusyClock, Stopwatch
from training.utils.checkpoints import Checkpoint, Cursor, write_atomically, write_manifest
from training.utils.config import ResumeConfig, SyncSettings
from training.utils.metrics import Display, MetricsLog
from training.utils.rl.evaluation import EvalResult, RewardFunction, evaluate
from training.utils.rl.infra import Infra
from training.utils.rl.rollout import PromptGroup, RolloutStats
from training.utils.rows import Row


def prepare_log_path(log_path: str) -> Path:
    """The run's folder, made if it is missing.

    Raises:
        ConfigError: it cannot be made or written to.
    """
    folder = Path(log_path).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"log_path must be a folder, got {log_path!r}: {error}") from None
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"log_path must be writable, got {log_path!r}")
    return folder


def write_config(log_path: Path, config: Mapping[str, Any]) -> None:
    """Write the resolved config to ``log_path/config.json``."""
    write_atomically(
        log_path / "config.json", orjson.dumps(config, option=orjson.OPT_INDENT_2, default=str)
    )


_WHY_DROPPED = {
    "uniform": "whose completions all earned the same reward",
    "too_few": "with fewer than two finished completions (is max_completion_tokens too small?)",
    "non_finite": "with a reward that is NaN or infinite",
    "overlong_prompt": "whose prompt leaves no room below max_seq_len",
    "failed": "whose sampling failed",
}


class RunConfig(Protocol):
    """The settings of a recipe that a run looks at."""

    epochs: int
    seed: int
    temperature: float
    max_completion_tokens: int
    eval_every: int
    eval_samples_per_prompt: int
    save_final_checkpoint: bool
    output_model_id: str | None
    resume: ResumeConfig

    @property
    def sync(self) -> SyncSettings:
        """Weight sync settings of all spellings together."""
        ...


@dataclass(frozen=True)
class RunSummary:
    """What a finished run reports. ``evaluations`` are (step, result) in order."""

    steps: int
    version: int
    rows: int
    policy_job_id: str
    reference_job_id: str | None
    deployment_id: str
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
    failed_in_a_row: int = 0
    first_step_s: float = math.nan
    step_started: float = field(default_factory=time.perf_counter)
    stats: RolloutStats = field(default_factory=RolloutStats)
    clock: Stopwatch = field(default_factory=Stopwatch)
    busy: BusyClock = field(default_factory=BusyClock)
    checkpoints: list[Checkpoint] = field(default_factory=list)
    evaluations: list[tuple[int, EvalResult]] = field(default_factory=list)
    model_path: Path | None = None

    def summary(self, infra: Infra) -> RunSummary:
        """What the finished run reports."""
        return RunSummary(
            steps=self.step,
            version=self.version, rows=self.cursor.count, policy_job_id=infra.policy_job_id,
            reference_job_id=infra.reference_job_id, deployment_id=infra.deployment_id,
            log_path=self.log_path, first_step_s=self.first_step_s,
            wall_s=time.perf_counter() - self.started, evaluations=self.evaluations,
            model_path=self.model_path,
        )  # fmt: skip

    async def evaluate_if_due(
        self, config: RunConfig, infra: Infra, reward_fn: RewardFunction, *, always: bool = False
    ) -> None:
        """Held-out accuracy of what the deployment serves, every ``eval_every`` steps."""
        last = self.evaluations[-1][0] if self.evaluations else 0
        is_due = always or 0 < config.eval_every <= self.step - last
        if not self.eval_rows or not is_due or (self.evaluations and last == self.step):
            return
        with self.clock.span("perf/eval_time"):
            result = await evaluate(
                infra.sampler, self.eval_rows, reward_fn, temperature=config.temperature,
                samples_per_prompt=config.eval_samples_per_prompt,
                max_tokens=config.max_completion_tokens, seed=config.seed,
            )  # fmt: skip
        self.evaluations.append((self.step, result))
        self.log.write("eval", self.step, result.metrics())
        self.display.note(f"step {self.step:>4}  held-out accuracy {result.accuracy:.3f}")

    async def save_if_due(self, config: RunConfig, infra: Infra, *, is_last: bool = False) -> None:
        """A resumable checkpoint and, only when it is written, the manifest that names it."""
        interval = config.sync.dcp_save_interval
        unsaved = self.step - (self.checkpoints[-1].step if self.checkpoints else 0)
        is_due = config.save_final_checkpoint if is_last else unsaved >= interval
        if interval == 0 or unsaved == 0 or not is_due:
            return
        name = f"step-{self.step:05d}"
        with self.clock.span("perf/dcp_save_time"):
            saving = infra.policy.save_state(name, overwrite=True)
            await saving.result_async(config.sync.dcp_timeout_s)
        beyond = sorted(self.cursor.beyond)
        point = Checkpoint(name, self.step, self.cursor.start, beyond, config.seed)
        self.checkpoints = [one for one in self.checkpoints if one.name != name] + [point]
        write_manifest(self.log_path, self.checkpoints)

    def restore(self, config: RunConfig, infra: Infra, checkpoint: Checkpoint) -> None:
        """Load a checkpoint and say what the run goes on with."""
        infra.policy.load_state_with_optimizer(checkpoint.name).result()
        self.step = config.resume.step_offset or checkpoint.step
        self.cursor = Cursor(checkpoint.cursor, set(checkpoint.beyond))
        self.display.note(
            f"resuming from {checkpoint.name}: step {self.step}, {self.cursor.count} of "
            f"{len(self.rows) * config.epochs} rows done"
        )

    async def export_model(self, config: RunConfig, infra: Infra) -> None:
        """The final weights as a Hugging Face folder, where ``output_model_id`` asks for one."""
        if config.output_model_id is None:
            return
        self.model_path = self.log_path / "models" / config.output_model_id
        await asyncio.to_thread(infra.export_model, self.model_path)
        self.display.note(f"the trained model is in {self.model_path}")

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

    def start_step(self) -> None:
        """Begin counting for the next step."""
        self.stats = RolloutStats()
        self.step_started = time.perf_counter()


def step_times(run: Run, groups: Sequence[PromptGroup]) -> dict[str, float]:
    """``perf/*`` of the step that ends now: seconds by phase, shares of the wall time, rates.

    A weight sync comes after its step's record and so counts in the next one.
    """
    wall = max(time.perf_counter() - run.step_started, 1e-9)
    times = run.clock.take()
    both, sampling, training = run.busy.take()
    tokens = sum(len(one.full_tokens) for group in groups for one in group.completions)
    drawn = sum(one.completion_len for group in groups for one in group.completions)
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
