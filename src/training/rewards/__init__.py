"""Reward functions: what a completion is worth, from its text and its row.

A reward function is ``(completion, row) -> float``, plain or async; one that knows more, such as
that it found no answer, returns a ``Score``. ``guarded`` and ``RewardEnsemble`` are made of other
reward functions; ``scored`` is how a recipe calls any of them.
"""

from training.rewards.answers import answer_reward, exact_match, marked_answer, same_answer
from training.rewards.check import check_reward
from training.rewards.code import CodeReward, code_reward, find_code
from training.rewards.ensemble import RewardEnsemble
from training.rewards.errors import RewardDiedError, RewardTimeoutError, StuckRewardsError
from training.rewards.form import pattern_reward, soft_overlong_reward, tags_reward
from training.rewards.guard import GuardedReward, guarded
from training.rewards.mathematics import math_reward
from training.rewards.score import RewardFunction, Score, ScoringReward, Unscored
from training.rewards.scoring import AnyReward, choose_reward, disagreements, guard_reward, scored
from training.rewards.unrewarded import no_reward

__all__ = [
    "AnyReward",
    "CodeReward",
    "GuardedReward",
    "RewardDiedError",
    "RewardEnsemble",
    "RewardFunction",
    "RewardTimeoutError",
    "Score",
    "ScoringReward",
    "StuckRewardsError",
    "Unscored",
    "answer_reward",
    "check_reward",
    "choose_reward",
    "code_reward",
    "disagreements",
    "exact_match",
    "find_code",
    "guard_reward",
    "guarded",
    "marked_answer",
    "math_reward",
    "no_reward",
    "pattern_reward",
    "same_answer",
    "scored",
    "soft_overlong_reward",
    "tags_reward",
]
