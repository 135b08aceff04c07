"""The metrics of one optimizer step that every recipe writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from training.run.signal import signal_metrics
from training.run.state import Run
from training.samples.groups import PromptGroup, rollout_metrics, version_metrics
from training.update.policy_update import PolicyUpdate


def step_metrics(
    run: Run, update: PolicyUpdate, completions_per_prompt: int, version: int
) -> dict[str, float]:
    """All families but those of a single recipe; ``version`` is what the samples are compared with.

    Takes the times of the run's clocks, which then start again from 0.
    """
    groups, results = update.groups, update.results
    metrics = {f"train/{name}": value for name, value in merge_metrics(results).items()}
    metrics["train/step"] = float(run.step)  # the trainer's own count says nothing of this run
    metrics |= batch_metrics(results, completions_per_prompt)
    metrics |= rollout_metrics(run.stats, groups)
    metrics |= signal_metrics(groups) | update.parity()
    metrics |= version_metrics(groups, version)
    return metrics | step_times(run, groups)


def step_times(run: Run, groups: Sequence[PromptGroup]) -> dict[str, float]:
    """``perf/*`` of the step that ends now: seconds by phase, shares of the wall time, rates.

    Weight sync and checkpoint come after their step's record and so count in the next one.
    """
    wall = max(run.now() - run.step_started, 1e-9)
    times = run.clock.take()
    both, sampling, training = run.busy.take()
    tokens = sum(len(sample.rollout.tokens) for group in groups for sample in group.flat())
    sampled = sum(sum(group.completion_lens) for group in groups)
    train = times.get("perf/fwd_bwd_time", 0.0) + times.get("perf/optim_step_time", 0.0)
    metrics = times | {
        "perf/step_wall_time": wall,
        "perf/overlap_ratio": both / wall,
        "perf/trainer_wait_for_sampler_time": sampling,
        "perf/sampler_wait_for_trainer_time": training,
        "perf/wait_time_ratio": times.get("perf/sample_wait_time", 0.0) / wall,
        "perf/weight_sync_ratio": times.get("perf/weight_sync_time", 0.0) / wall,
        "perf/rollout_tokens_per_s": sampled / wall,
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


def merge_metrics(results: Sequence[tuple[int, Mapping[str, float]]]) -> dict[str, float]:
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
