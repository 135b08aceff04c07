"""How rewards lie within groups and between them: what a run can learn from its rows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from training.rewards.spread import population_std

CORRECT = 0.5
"""A reward above it counts as a right answer."""


def group_reward_metrics(groups: Sequence[Sequence[float]]) -> dict[str, float]:
    """``rollout/group_*`` over the sampled groups of a step, trained or not.

    Deviations are population deviations, over groups of two finite rewards or more; none of these,
    no metrics. ``group_uniform_ratio`` is the share of groups that teach nothing,
    ``group_solved_ratio`` and ``group_unsolved_ratio`` those where all answers are right, or none.
    """
    kept = [group for group in groups if len(group) > 1 and all(map(math.isfinite, group))]
    if not kept:
        return {}
    stds = [population_std(rewards) for rewards in kept]
    right = [sum(reward > CORRECT for reward in rewards) for rewards in kept]
    return {
        "rollout/group_reward_std_mean": statistics.fmean(stds),
        "rollout/group_reward_std_min": min(stds),
        "rollout/group_reward_std_max": max(stds),
        "rollout/group_reward_mean_std": population_std(
            [statistics.fmean(rewards) for rewards in kept]
        ),
        "rollout/group_uniform_ratio": statistics.fmean(
            float(max(rewards) == min(rewards)) for rewards in kept
        ),
        "rollout/group_solved_ratio": statistics.fmean(
            float(count == len(rewards)) for count, rewards in zip(right, kept, strict=True)
        ),
        "rollout/group_unsolved_ratio": statistics.fmean(float(count == 0) for count in right),
    }


def parse_metrics(parsed: Sequence[bool], family: str) -> dict[str, float]:
    """``<family>/parse_fail_ratio``: the share of completions in which no answer was found.

    It is over those whose reward says so; none of these, no metric.
    """
    if not parsed:
        return {}
    return {f"{family}/parse_fail_ratio": parsed.count(False) / len(parsed)}


def disagreement_metrics(disagreements: Sequence[float]) -> dict[str, float]:
    """``rollout/reward_disagreement/*`` of a reward ensemble over a step's completions."""
    if not disagreements:
        return {}
    return {
        "rollout/reward_disagreement/mean": statistics.fmean(disagreements),
        "rollout/reward_disagreement/max": max(disagreements),
    }
