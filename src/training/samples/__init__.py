"""What was sampled: rollouts, groups, advantages, and the datums that are trained."""

from training.samples.advantages import group_advantages, is_uniform
from training.samples.groups import PromptGroup, RowOutcome, to_datums
from training.samples.scoring import SampledRow, ScoredRow, score_row

__all__ = [
    "PromptGroup",
    "RowOutcome",
    "SampledRow",
    "ScoredRow",
    "group_advantages",
    "is_uniform",
    "score_row",
    "to_datums",
]
