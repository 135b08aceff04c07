"""The GRPO closures of documents 001 and 003, to the letter, for people who write their own loop.

They z-score all rewards they are given, take k1 for the KL, and divide by the number of samples:
use them with the optimizer's normalization ``none``, and one prompt at a time. The recipes'
closures come from ``policy_losses``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tinker
import torch
from torch import Tensor

from hearth.errors import ConfigError
from training.samples.advantages import group_advantages
from training.update.policy_losses import LossFunction, Rows, require_counts


def make_grpo_loss_fn(
    rewards: Sequence[float],
    ref_logprobs_list: Sequence[Rows],
    kl_beta: float = 0.001,
    eps: float = 1e-8,
) -> LossFunction:
    """Mean over samples of ``-A sum(w policy) + kl_beta sum(w (policy - ref))``.

    ``w`` are the datum's ``weights``. Rows of different lengths are cut to the shortest. Advantages
    are ``(reward - mean) / (std + eps)`` with the sample std, and exactly 0 for equal rewards.
    The metrics are ``grpo_loss`` and ``mean_kl``, both means over samples.

    Raises:
        ConfigError: fewer than two rewards, one that is not finite, or not one reference row list
            per reward.
    """
    advantages = _document_advantages(rewards, eps)
    references = _tensors("ref_logprobs_list", ref_logprobs_list, len(advantages))

    def loss_fn(
        data: list[tinker.Datum], logprobs: list[Tensor]
    ) -> tuple[Tensor, dict[str, float]]:
        require_counts(len(advantages), data, logprobs)
        terms: list[Tensor] = []
        kls: list[Tensor] = []
        for advantage, row, reference, datum in zip(
            advantages, logprobs, references, data, strict=True
        ):
            sums = _sum_weighted(datum, row, reference)
            terms.append(-advantage * sums.policy + kl_beta * sums.kl)
            kls.append(sums.kl)
        return _mean_with_metrics(terms, kls)

    return loss_fn


def make_offpolicy_grpo_loss_fn(
    rewards: Sequence[float],
    ref_logprobs_list: Sequence[Rows],
    behavior_logprobs_list: Sequence[Rows],
    kl_beta: float = 0.001,
    clip_rho: float = 10.0,
) -> LossFunction:
    """``make_grpo_loss_fn`` with each sample's term multiplied by a ratio to the behavior policy.

    The ratio ``rho = min(exp(sum(w (policy - behavior)) / sum(w)), clip_rho)`` has a gradient, as
    the document writes it, and multiplies the KL too. A sample without response tokens adds 0.
    Adds the metric ``mean_rho``, over samples that have response tokens.

    Raises:
        ConfigError: as ``make_grpo_loss_fn``.
    """
    advantages = _document_advantages(rewards, 1e-8)
    references = _tensors("ref_logprobs_list", ref_logprobs_list, len(advantages))
    behaviors = _tensors("behavior_logprobs_list", behavior_logprobs_list, len(advantages))

    def loss_fn(
        data: list[tinker.Datum], logprobs: list[Tensor]
    ) -> tuple[Tensor, dict[str, float]]:
        require_counts(len(advantages), data, logprobs)
        terms: list[Tensor] = []
        kls: list[Tensor] = []
        rhos: list[float] = []
        for advantage, row, reference, behavior, datum in zip(
            advantages, logprobs, references, behaviors, data, strict=True
        ):
            sums = _sum_weighted(datum, row, reference, behavior)
            rho = (sums.log_ratio / max(sums.weight, 1.0)).exp().clamp(max=clip_rho)
            terms.append(rho * (-advantage * sums.policy + kl_beta * sums.kl))
            kls.append(sums.kl)
            if sums.weight > 0:
                rhos.append(float(rho.detach()))
        loss, metrics = _mean_with_metrics(terms, kls)
        return loss, metrics | {"mean_rho": sum(rhos) / max(1, len(rhos))}

    return loss_fn


class _Sums(NamedTuple):
    """Sums over one sample, each token counted by its weight; scalars."""

    policy: Tensor
    kl: Tensor
    log_ratio: Tensor
    weight: float


def _sum_weighted(
    datum: tinker.Datum, policy: Tensor, reference: Tensor, behavior: Tensor | None = None
) -> _Sums:
    weights = datum.loss_fn_inputs["weights"].to_torch().float()
    behavior = policy.detach() if behavior is None else behavior
    length = min(len(policy), len(reference), len(weights), len(behavior))
    weights = weights[:length]
    # where, not only a product: a masked NaN times 0 is NaN.
    live = weights != 0
    row, reference, behavior = (
        torch.where(live, logprobs[:length].float(), 0.0)
        for logprobs in (policy, reference, behavior)
    )
    return _Sums(
        policy=torch.dot(row, weights),
        kl=torch.dot(row - reference, weights),
        log_ratio=torch.dot(row - behavior, weights),
        weight=float(weights.sum()),
    )


def _document_advantages(rewards: Sequence[float], eps: float) -> list[float]:
    """Z-scores as the document writes them: ``eps`` is added, and a spread below it counts as 1."""
    if not any(group_advantages(rewards)):
        return [0.0] * len(rewards)
    values = torch.tensor(rewards, dtype=torch.float64)
    spread = float(values.std())
    spread = 1.0 if spread < eps else spread
    return [float(score) for score in (values - values.mean()) / (spread + eps)]


def _tensors(field: str, samples: Sequence[Rows], count: int) -> list[Tensor]:
    if len(samples) != count:
        raise ConfigError(f"{field} must have one entry per reward, got {len(samples)} for {count}")
    return [torch.as_tensor(rows, dtype=torch.float32).detach() for rows in samples]


def _mean_with_metrics(terms: list[Tensor], kls: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
    loss = torch.stack(terms).sum() / len(terms)
    mean_kl = torch.stack(kls).detach().mean()
    return loss, {"grpo_loss": float(loss.detach()), "mean_kl": float(mean_kl)}
