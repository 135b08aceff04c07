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
from hearth.losses.cispo import CISPO, CISPOMask, cispo, cispo_mask
from hearth.losses.clipped import DAPO, GRPO, clipped_surrogate
from hearth.losses.corrections import TIS, KLEstimator, kl_penalty, tis_weights
from hearth.losses.crossentropy import CrossEntropy, cross_entropy
from hearth.losses.dro import DRO, dro
from hearth.losses.importance import ImportanceSampling, importance_sampling
from hearth.losses.objective import Objective, ObjectiveOutput
from hearth.losses.reduce import (
    NORMALIZATION_MODES,
    REDUCTIONS,
    GradientCounts,
    NormalizationMode,
    denominator,
    gradient_counts,
    reduce_loss,
)
from hearth.losses.reinforce import Reinforce, reinforce
from hearth.losses.sequence import GSPO, GSPO_PRESETS, gspo

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
    "cispo",
    "cispo_mask",
    "clipped_surrogate",
    "cross_entropy",
    "denominator",
    "dro",
    "gradient_counts",
    "gspo",
    "importance_sampling",
    "kl_penalty",
    "policy_loss_per_token",
    "reduce_loss",
    "reinforce",
    "resolve_objective",
    "tis_weights",
]
