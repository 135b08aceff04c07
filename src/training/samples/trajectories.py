"""What was sampled for a row, whatever becomes of it: for who reads samples, not for training."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hearth.sdk import SampledCompletion
from training.samples.rollout import RolloutRun, RolloutSample

WHY_DROPPED = {
    "uniform": "whose completions all earned the same reward",
    "too_few": "with fewer than two finished completions (is max_completion_tokens too small?)",
    "non_finite": "with a reward that is NaN or infinite",
    "overlong_prompt": "whose prompt leaves no room below max_seq_len",
    "failed": "whose sampling failed",
    "filtered": "that dynamic_filter_fn did not accept",
    "stale": "that were still being sampled when their last chance was over (late_row_wait_s)",
}
"""What is said of rows that are not trained."""


@dataclass(frozen=True)
class SampledTrajectory:
    """One trajectory as it was sampled and judged; without ``segments`` nothing was sampled."""

    segments: Sequence[RolloutSample] = ()
    fate: str | None = None
    """What became of it, where that is not what became of its row."""
    reason: str | None = None
    """Why, in one line."""
    reward: float | None = None
    """None: it has none."""
    started: float | None = None
    """Unix time at which its sampling began."""
    sample_s: float | None = None
    score_s: float | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What its rollout gave beside."""


def failed_trajectory(error: Exception, started: float | None = None) -> SampledTrajectory:
    """A trajectory that came to nothing."""
    return SampledTrajectory(fate="failed", reason=describe_error(error), started=started)


def trajectory_of_run(
    run: RolloutRun, started: float, completions: Sequence[SampledCompletion]
) -> SampledTrajectory:
    """A trajectory of a rollout function that began at ``started`` (unix time).

    ``completions`` are those that the rollout's sampler has seen; without any, the whole rollout
    counts as sampling.
    """
    seconds = sum(completion.sample_s for completion in completions)
    metadata = {
        name: value for name, value in (("run_id", run.run_id), ("metadata", run.metadata)) if value
    }
    return SampledTrajectory(
        run.segments,
        reward=run.reward,
        started=completions[0].started if completions else started,
        sample_s=seconds if completions else time.time() - started,
        metadata=metadata,
    )


def describe_error(error: Exception) -> str:
    """An error's type and text in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())
