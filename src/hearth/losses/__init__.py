"""The arithmetic of every objective, in pure torch: flat token batches in, loss per token out."""

from hearth.losses.batch import LOGPROB_TOLERANCE, TokenBatch
from hearth.losses.builtin import BUILTIN_LOSSES, BuiltinObjective, builtin_objective
from hearth.losses.catalog import (
    OBJECTIVES,
    POLICY_LOSSES,
    PolicyLoss,
    policy_loss_per_token,
    resolve_objective,
)
from hearth.losses.cispo import CISPO, CISPOMask
from hearth.losses.clipped import DAPO, GRPO
from hearth.losses.corrections import TIS, KLEstimator, kl_penalty
from hearth.losses.objective import Objective, ObjectiveOutput
from hearth.losses.policy_gradients import DRO, CrossEntropy, ImportanceSampling, Reinforce
from hearth.losses.reduce import (
    NORMALIZATION_MODES,
    REDUCTIONS,
    GradientCounts,
    NormalizationMode,
    count_gradients,
    reduce_loss,
)
from hearth.losses.sequence import GSPO, GSPO_PRESETS

__all__ = [
    "BUILTIN_LOSSES",
    "CISPO",
    "DAPO",
    "DRO",
    "GRPO",
    "GSPO",
    "GSPO_PRESETS",
    "LOGPROB_TOLERANCE",
    "NORMALIZATION_MODES",
    "OBJECTIVES",
    "POLICY_LOSSES",
    "REDUCTIONS",
    "TIS",
    "BuiltinObjective",
    "CISPOMask",
    "CrossEntropy",
    "GradientCounts",
    "ImportanceSampling",
    "KLEstimator",
    "NormalizationMode",
    "Objective",
    "ObjectiveOutput",
    "PolicyLoss",
    "Reinforce",
    "TokenBatch",
    "builtin_objective",
    "count_gradients",
    "kl_penalty",
    "policy_loss_per_token",
    "reduce_loss",
    "resolve_objective",
]
