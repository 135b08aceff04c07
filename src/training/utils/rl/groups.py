"""Groups of completions: what one row's draws become before they are trained."""

from __future__ import annotations

import hashlib
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hearth.sdk import SampledCompletion
from training.utils.rl.datums import align_behavior_logprobs
from training.utils.rows import IndexedRow


@dataclass(frozen=True)
class PromptGroup:
    """The scored completions of one row. Lists are parallel.

    ``behavior_logprobs`` are target-aligned rows of N - 1 values, zero on the prompt.
    """

    row: IndexedRow
    completions: list[SampledCompletion]
    rewards: list[float]
    advantages: list[float]
    behavior_logprobs: list[list[float]]


@dataclass(frozen=True)
class Draw:
    """The outcome of one row: a group to train on, or the reason why there is none."""

    row: IndexedRow
    group: PromptGroup | None = None
    dropped: str | None = None
    completions: Sequence[SampledCompletion] = ()
    rewards: Sequence[float] = ()
    error: Exception | None = None


@dataclass
class RolloutStats:
    """Counts over the draws since the last step."""

    rows: int = 0
    samples: int = 0
    truncated: int = 0
    rewards: list[float] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)

    def add(self, draw: Draw) -> None:
        """Count one row's outcome."""
        self.rows += 1
        self.samples += len(draw.completions)
        self.truncated += sum(one.finish_reason == "length" for one in draw.completions)
        self.rewards.extend(draw.rewards)
        if draw.dropped is not None:
            self.dropped[draw.dropped] += 1


def row_seed(seed: int, index: int) -> int:
    """The sampling seed of a row: the same for every run with ``seed``, below 2**63."""
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def behavior_rows(completion: SampledCompletion) -> list[float]:
    """The sampler's logprobs as N - 1 target-aligned rows, zero on the prompt.

    Raises:
        ConfigError: the deployment sent no logprobs, or not one per drawn token.
    """
    return align_behavior_logprobs(
        completion.inference_logprobs, num_tokens=len(completion.full_tokens),
        prompt_len=completion.prompt_len, is_echoed=completion.logprobs_echoed,
    )  # fmt: skip


def rollout_metrics(stats: RolloutStats, groups: Sequence[PromptGroup]) -> dict[str, float]:
    """``rollout/*`` of one step: raw numbers over all draws, the rest over what is trained."""
    completions = [one for group in groups for one in group.completions]
    rewards = [reward for group in groups for reward in group.rewards]
    lengths = [one.completion_len for one in completions]
    metrics = {
        "rollout/raw_reward": _mean(stats.rewards),
        "rollout/accuracy": _mean([float(reward > 0.5) for reward in stats.rewards]),
        "rollout/reward": _mean(rewards),
        "rollout/samples_completed": float(stats.samples),
        "rollout/valid_prompt_groups": float(len(groups)),
        "rollout/total_sampled": float(stats.rows),
        "rollout/filter_reject_ratio": stats.dropped["uniform"] / max(1, stats.rows),
        "rollout/sample_fail_count": float(stats.dropped["failed"]),
        "rollout/truncated_ratio": stats.truncated / max(1, stats.samples),
        "rollout/entropy": entropy_estimate(groups),
    }
    if stats.rewards:
        metrics["rollout/reward_min"] = min(stats.rewards)
        metrics["rollout/reward_max"] = max(stats.rewards)
    for reason, count in sorted(stats.dropped.items()):
        metrics[f"rollout/dropped/{reason}"] = float(count)
    if lengths:
        metrics |= {
            "rollout/response_len/mean": _mean(lengths),
            "rollout/response_len/median": float(statistics.median(lengths)),
            "rollout/response_len/max": float(max(lengths)),
            "rollout/response_len/min": float(min(lengths)),
        }
    return metrics


def entropy_estimate(groups: Iterable[PromptGroup]) -> float:
    """Estimated entropy in nats per token: mean of minus the behavior logprob over drawn tokens."""
    total, count = 0.0, 0
    for group in groups:
        for completion, rows in zip(group.completions, group.behavior_logprobs, strict=True):
            drawn = rows[completion.prompt_len - 1 :]
            total -= sum(drawn)
            count += len(drawn)
    return total / count if count else 0.0


def version_metrics(groups: Sequence[PromptGroup], version: int) -> dict[str, float]:
    """How many weight syncs old the trained samples are."""
    ages = [version - one.weight_version for group in groups for one in group.completions]
    if not ages:
        return {}
    return {
        "version/sample_staleness_mean": _mean(ages),
        "version/sample_staleness_max": float(max(ages)),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
