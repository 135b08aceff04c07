"""The state of one run: step, cursor, metrics, and the manifest that makes it resumable."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson

from hearth.errors import ConfigError
from hearth.telemetry import BusyClock, Stopwatch
from training.utils.metrics import Display, MetricsLog
from training.utils.rl.evaluation import EvalResult
from training.utils.rl.infra import Infra
from training.utils.rl.rollout import PromptGroup, RolloutStats
from training.utils.rows import Row

MANIFEST = "run.json"


@dataclass
class Cursor:
    """Which rows are finished: all below ``start``, and those in ``beyond``.

    A row is finished when the step that trained it is done, or when it was dropped for good. Rows
    finish out of order inside a window; the set stays exact, so that a resumed run neither repeats
    nor skips one.
    """

    start: int = 0
    beyond: set[int] = field(default_factory=set)

    def finish(self, indices: Iterable[int]) -> None:
        """Mark rows as finished."""
        self.beyond.update(index for index in indices if index >= self.start)
        while self.start in self.beyond:
            self.beyond.remove(self.start)
            self.start += 1

    @property
    def count(self) -> int:
        """Number of finished rows."""
        return self.start + len(self.beyond)

    def finished(self) -> frozenset[int]:
        """All finished rows' indices."""
        return frozenset(range(self.start)) | self.beyond


@dataclass(frozen=True)
class Checkpoint:
    """One resumable point: the trainer's checkpoint and what the recipe knew when it was written.

    Example: ``{"name": "step-00004", "step": 4, "cursor": 9, "beyond": [11], "seed": 0}``
    """

    name: str
    step: int
    cursor: int
    beyond: list[int]
    seed: int


def write_manifest(log_path: Path, checkpoints: list[Checkpoint]) -> None:
    """Replace ``log_path/run.json`` at once: after a crash it is the old one or the new one."""
    write_atomically(
        log_path / MANIFEST,
        orjson.dumps(
            {"checkpoints": [asdict(one) for one in checkpoints]}, option=orjson.OPT_INDENT_2
        ),
    )


def read_manifest(log_path: Path) -> list[Checkpoint]:
    """The checkpoints of a run, oldest first; none where the run never wrote one.

    Raises:
        ConfigError: the manifest is damaged. Starting fresh must be somebody's decision.
    """
    path = log_path / MANIFEST
    if not path.exists():
        return []
    try:
        return [Checkpoint(**one) for one in orjson.loads(path.read_bytes())["checkpoints"]]
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} must be a run's manifest, got a damaged file ({error}): repair it, or move it "
            "away to start from the base model"
        ) from None


def choose_checkpoint(
    checkpoints: list[Checkpoint], wanted: str | None, seed: int
) -> Checkpoint | None:
    """The checkpoint to go on from: the named one, else the newest, else None.

    Raises:
        ConfigError: the named one does not exist, or the run had another seed, under which the
            cursor would mean other rows.
    """
    chosen = _named_or_newest(checkpoints, wanted)
    if chosen is not None and chosen.seed != seed:
        raise ConfigError(
            f"seed must be {chosen.seed} to go on from {chosen.name}, got {seed}: the rows' order "
            "depends on it; choose another log_path to start anew"
        )
    return chosen


def _named_or_newest(checkpoints: list[Checkpoint], wanted: str | None) -> Checkpoint | None:
    if wanted is None or wanted == "latest":
        if wanted == "latest" and not checkpoints:
            raise ConfigError("resume.resume_from must name a checkpoint, got 'latest' of none")
        return checkpoints[-1] if checkpoints else None
    for one in checkpoints:
        if one.name == wanted:
            return one
    known = [one.name for one in checkpoints]
    raise ConfigError(f"resume.resume_from must be one of {known}, got {wanted!r}")


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


def write_atomically(path: Path, content: bytes) -> None:
    """Write a whole file or nothing."""
    temporary = path.with_name(path.name + ".new")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


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

    def save_manifest(self, name: str, seed: int) -> None:
        """Add a written checkpoint to the manifest."""
        beyond = sorted(self.cursor.beyond)
        point = Checkpoint(name, self.step, self.cursor.start, beyond, seed)
        self.checkpoints = [one for one in self.checkpoints if one.name != name] + [point]
        write_manifest(self.log_path, self.checkpoints)

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
