"""Metrics that every objective reports. Means are over the batch's active tokens."""

from __future__ import annotations

from torch import Tensor

from hearth.losses.batch import TokenBatch
from hearth.losses.corrections import kl_penalty
from hearth.losses.objective import Metrics


def shared_metrics(batch: TokenBatch, policy_term: Tensor, penalty: Tensor | None) -> Metrics:
    """Metrics of any batch; a key is absent when its logprobs are.

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
