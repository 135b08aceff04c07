"""``async/*`` of one step, and the ``perf/*`` that only overlapping loops have."""

from __future__ import annotations

from collections.abc import Sequence

from training.rollouts.queue import RolloutQueue, TakenGroup
from training.run.state import Run

# Phases of the trainer's loop. They follow each other, so their seconds add up to a step's at most;
# WAIT_FOR_MORE is the part of WAIT that comes after a batch's first piece.
TRAIN, WAIT, WAIT_FOR_MORE, WEIGHT_UPDATE = (
    "perf/train_time",
    "perf/train_wait_time",
    "perf/train_chunk_wait_time",
    "perf/weight_update_time",
)


def staleness_metrics(batch: Sequence[TakenGroup]) -> dict[str, float]:
    """How many weight syncs late each trained group was: in all, while sampled, and while waiting.

    ``async/version_offset_*`` counts from the row's submission, so it never exceeds
    ``max_head_offpolicy_versions``.
    """
    offsets = [group.taken.offset for group in batch]
    count = len(offsets)
    return {
        "async/version_offset_mean": sum(offsets) / count,
        "async/version_offset_max": float(max(offsets)),
        "async/version_offset_min": float(min(offsets)),
        "async/version_offset_in_flight_mean": sum(group.taken.in_flight for group in batch)
        / count,
        "async/version_offset_in_queue_mean": sum(group.taken.in_queue for group in batch) / count,
    }


def queue_metrics(queue: RolloutQueue, run: Run, accepted_before: int) -> dict[str, float]:
    """What runs and waits while the step ends, how much room the gate has, and what was dropped.

    ``accepted_before`` are the samples that earlier starts of the run have accepted and trained.
    ``async/concurrency_capacity_at_step`` is -1 where nothing limits the samples in flight.
    """
    gate, stats = queue.gate, run.stats
    concurrency = gate.concurrency_room()
    metrics = {
        "async/in_flight": float(gate.running_rows),
        "async/running_samples": float(gate.running_samples),
        "async/accepted_samples": float(accepted_before + gate.accepted_samples),
        "async/ready_groups": float(queue.num_ready),
        "async/staleness_capacity_at_step": float(gate.staleness_room()),
        "async/concurrency_capacity_at_step": -1.0 if concurrency is None else float(concurrency),
        "async/sample_fails": float(stats.failed_samples),
        "async/empty_samples": float(stats.empty_samples),
        "async/filter_drops": float(stats.dropped["filtered"]),
        "async/stale_drops": float(stats.dropped["stale"]),
        "async/total_stale_drops": float(run.stale_drops),
    }
    if stats.stale_lengths:
        lengths = stats.stale_lengths
        metrics["async/stale_drop_response_len_mean"] = sum(lengths) / len(lengths)
    return metrics


def overlap_metrics(times: dict[str, float]) -> dict[str, float]:
    """Shares of the step in which trainer and sampler had nothing to do, from ``step_times``."""
    wall = times["perf/step_wall_time"]
    trained = times["perf/overlap_ratio"] * wall + times["perf/sampler_wait_for_trainer_time"]
    sampled = times["perf/overlap_ratio"] * wall + times["perf/trainer_wait_for_sampler_time"]
    phases = {name: times.get(name, 0.0) for name in (TRAIN, WAIT, WAIT_FOR_MORE, WEIGHT_UPDATE)}
    return phases | {
        "perf/step_time": wall,
        "perf/wait_time_ratio": phases[WAIT] / wall,
        "perf/weight_sync_ratio": phases[WEIGHT_UPDATE] / wall,
        "perf/trainer_idle_ratio": max(0.0, 1.0 - trained / wall),
        "perf/sampler_idle_ratio": max(0.0, 1.0 - sampled / wall),
    }
