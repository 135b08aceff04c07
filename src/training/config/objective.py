"""From a recipe's config to the options of its objective."""

from __future__ import annotations

from dataclasses import asdict

from hearth.losses.cispo import CISPO
from hearth.losses.clipped import DAPO, GRPO
from hearth.losses.corrections import TIS
from hearth.losses.dro import DRO
from hearth.losses.importance import ImportanceSampling
from hearth.losses.objective import Objective
from hearth.losses.reinforce import Reinforce
from hearth.losses.sequence import GSPO
from training.config.recipe import RecipeConfig


def objective_options(config: RecipeConfig) -> Objective:
    """The options of ``config.policy_loss``.

    Raises:
        ConfigError: an option breaks its rule.
    """
    cap = config.ratio_log_cap
    match config.policy_loss:
        case "grpo":
            return GRPO(
                kl_beta=config.kl_beta,
                kl_estimator=config.kl_estimator,
                eps_clip=config.eps_clip,
                eps_clip_high=config.eps_clip_high,
                ratio_log_cap=cap,
            )
        case "importance_sampling":
            return ImportanceSampling(ratio_log_cap=cap)
        case "reinforce":
            return Reinforce(
                kl_beta=config.kl_beta, kl_estimator=config.kl_estimator, ratio_log_cap=cap
            )
        case "dapo":
            return DAPO(**asdict(config.dapo))
        case "dro":
            return DRO(**asdict(config.dro))
        case "gspo":
            return GSPO(**asdict(config.gspo))
        case _:
            return CISPO(**asdict(config.cispo))


def tis_options(config: RecipeConfig) -> TIS | None:
    """Truncated importance sampling as configured, or None when it is off.

    Raises:
        ConfigError: the cap, the level or the threshold breaks its rule.
    """
    if not config.uses_tis:
        return None
    tis = config.tis
    return TIS(
        cap=tis.cap,
        level=tis.level,
        sequence_mean=tis.sequence_mean,
        icepop_threshold=tis.icepop_threshold,
    )
