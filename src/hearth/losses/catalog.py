"""Objectives by name, and the one entry point that the trainer and the client closures call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import Tensor

from hearth.errors import ConfigError
from hearth.losses.batch import TokenBatch
from hearth.losses.cispo import CISPO, CISPOMask
from hearth.losses.clipped import DAPO, GRPO
from hearth.losses.corrections import TIS, WithReference, kl_penalty
from hearth.losses.objective import Metrics, Objective, ObjectiveOutput
from hearth.losses.policy_gradients import DRO, CrossEntropy, ImportanceSampling, Reinforce
from hearth.losses.sequence import GSPO


@dataclass(frozen=True)
class PolicyLoss:
    """One entry of the catalog."""

    name: str
    """Its ``policy_loss`` name."""
    options: type[Objective]
    """The frozen dataclass of its options; without arguments it has the documented defaults."""
    summary: str
    """What it is, in one line."""

    @property
    def has_kl(self) -> bool:
        """Whether its options have ``kl_beta``."""
        return issubclass(self.options, WithReference)


def _by_name(*losses: PolicyLoss) -> Mapping[str, PolicyLoss]:
    return MappingProxyType({loss.name: loss for loss in losses})


POLICY_LOSSES = _by_name(
    PolicyLoss("grpo", GRPO, "REINFORCE + KL penalty, with PPO clipping"),
    PolicyLoss("importance_sampling", ImportanceSampling, "ratio weighting, optional clipping"),
    PolicyLoss("reinforce", Reinforce, "REINFORCE, with the ratio to the behavior policy"),
    PolicyLoss("dapo", DAPO, "asymmetric PPO clipping"),
    PolicyLoss("dro", DRO, "quadratic pull toward the old policy"),
    PolicyLoss("gspo", GSPO, "sequence-level clipping"),
    PolicyLoss("cispo", CISPO, "clipped importance weights that keep every gradient"),
)
"""The values of ``policy_loss``."""

OBJECTIVES = _by_name(
    *POLICY_LOSSES.values(),
    PolicyLoss("cispo_mask", CISPOMask, "importance-sampling masking"),
    PolicyLoss("cross_entropy", CrossEntropy, "weighted cross-entropy"),
)
"""The policy losses and the other objectives that have a name."""


def resolve_objective(name: str, config: Objective | None = None) -> Objective:
    """``config``, or the default options of ``name``.

    Raises:
        ConfigError: the name is unknown (it is a ValueError and lists the policy losses), or
            ``config`` belongs to another objective or breaks a rule.
    """
    named = OBJECTIVES.get(name)
    if named is None:
        raise ConfigError(
            f"policy_loss must be one of {', '.join(POLICY_LOSSES)}, got {name!r}; "
            "cispo_mask and cross_entropy are objectives too"
        )
    if config is None:
        return named.options()
    if type(config) is not named.options:
        raise ConfigError(
            f"config must be {named.options.__name__} for {name!r}, got {type(config).__name__}"
        )
    config.validate()
    return config


def policy_loss_per_token(
    name: str, batch: TokenBatch, config: Objective | None = None, tis: TIS | None = None
) -> ObjectiveOutput:
    """TIS weight times policy term, plus ``kl_beta`` times KL where the objective has one.

    The weight never multiplies the KL, nor DRO's quadratic pull. The result is raw: its sum is
    the loss, and the optimizer or the caller divides it.

    Raises:
        ConfigError: unknown name, wrong config, ``kl_beta > 0`` without reference logprobs, or
            ``tis`` without behavior logprobs.
        NumericsError: a value on an active token is unusable; the datum is named.
    """
    return evaluate(resolve_objective(name, config), batch, tis)


def evaluate(objective: Objective, batch: TokenBatch, tis: TIS | None = None) -> ObjectiveOutput:
    """``policy_loss_per_token`` for options that are already resolved."""
    batch.validate()
    if tis is None:
        term = objective.policy_term(batch)
    else:
        tis.validate()
        term = objective.weighted_term(batch, tis.weights(batch))
    penalty = objective.penalty(batch)
    metrics = _shared_metrics(batch, term, penalty) | objective.metrics(batch)
    if tis is not None:
        metrics |= tis.metrics(batch)
    return ObjectiveOutput(term if penalty is None else term + penalty, metrics)


def _shared_metrics(batch: TokenBatch, policy_term: Tensor, penalty: Tensor | None) -> Metrics:
    """Metrics of any objective, means over active tokens; a key is absent when its logprobs are.

    ``mean_loss`` = ``mean_adv_loss`` (the policy term) + ``mean_kl_penalty``; ``ppo_kl`` is k3
    from policy to old; ``inference_diff`` and ``inference_kld`` compare policy and behavior;
    ``mean_kl`` is the mean of policy - ref (k1) and ``ref_kl`` its k3 estimate.
    """
    policy = batch.policy_logprobs.detach()
    metrics = {
        "active_tokens": batch.active.sum().to(batch.mask.dtype),
        "mean_adv_loss": batch.active_mean(policy_term),
        "ppo_kl": batch.active_mean(kl_penalty(batch.anchor, policy)),
    }
    metrics["mean_loss"] = metrics["mean_adv_loss"]
    if penalty is not None:
        metrics["mean_kl_penalty"] = batch.active_mean(penalty)
        metrics["mean_loss"] = metrics["mean_adv_loss"] + metrics["mean_kl_penalty"]
    if batch.behavior_logprobs is not None:
        behavior = batch.behavior_logprobs
        metrics["inference_diff"] = batch.active_mean((policy - behavior).abs())
        metrics["inference_kld"] = batch.active_mean(kl_penalty(behavior, policy))
    if batch.ref_logprobs is not None:
        metrics["mean_kl"] = batch.active_mean(policy - batch.ref_logprobs)
        metrics["ref_kl"] = batch.active_mean(kl_penalty(policy, batch.ref_logprobs))
    return metrics
