"""From a recipe's config to the options of its objective."""

from __future__ import annotations

from dataclasses import asdict

from hearth.losses.cispo import CISPOMask
from hearth.losses.clipped import GRPO
from hearth.losses.corrections import TIS
from hearth.losses.objective import Objective
from hearth.losses.policy_gradients import ImportanceSampling, Reinforce
from training.config.rl import RLConfig


def objective_options(config: RLConfig) -> Objective:
    """The options of ``config.policy_loss``, as they are given; ``validate`` judges them."""
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
            return ImportanceSampling(
                ratio_log_cap=cap, ratio_min=config.ratio_min, ratio_max=config.ratio_max
            )
        case "reinforce":
            return Reinforce(
                kl_beta=config.kl_beta, kl_estimator=config.kl_estimator, ratio_log_cap=cap
            )
        case "dapo":
            return config.dapo
        case "dro":
            return config.dro
        case "gspo":
            return config.gspo
        case "cispo_mask":
            return CISPOMask(**asdict(config.cispo))
        case _:
            return config.cispo


def tis_options(config: RLConfig) -> TIS | None:
    """Truncated importance sampling as configured, or None when it is off."""
    return config.tis if config.uses_tis else None
