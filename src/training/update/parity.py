"""Whether sampler and trainer compute the same policy: logprobs of the same tokens by both.

Compared are samples whose weights the trainer still has when it scores them, before its update
moves them, so that staleness is no difference. The step's own forward knows them: it costs nothing.
Where it never sees such samples, ``parity_probe`` samples some.
A deployment that quantizes, another attention kernel, a wrong temperature or truncated sampling
(``top_p``, ``top_k``) in a rollout function show here, and before that nowhere but in the results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from hearth.errors import HearthError
from training.samples.groups import TrainSample
from training.samples.rollout import RolloutSample


class ParityError(HearthError, RuntimeError):
    """Sampler and trainer are further apart than ``parity_threshold``, and that is to end runs."""


def logprob_gaps(
    samples: Sequence[TrainSample], policy: Sequence[Sequence[float] | Tensor], version: int
) -> Tensor:
    """|trainer's logprob - sampler's logprob| of the samples' sampled tokens, flat and float64.

    ``policy`` is target-aligned, N - 1 rows for a sample of N tokens. A sample that weight version
    ``version`` has not sampled from first to last has no gaps: a token that went on from older ones
    stands on their keys and values.
    """
    pairs = zip(samples, policy, strict=True)
    compared = [(sample, rows) for sample, rows in pairs if _has_sampled(version, sample.rollout)]
    if not compared:
        return torch.zeros(0, dtype=torch.float64)
    scored = torch.cat([torch.as_tensor(rows, dtype=torch.float64) for _, rows in compared])
    behavior = torch.cat([sample.behavior_logprobs for sample, _ in compared])
    is_sampled = torch.cat([sample.mask for sample, _ in compared]) != 0
    return (scored[is_sampled] - behavior[is_sampled]).abs_()


def _has_sampled(version: int, sample: RolloutSample) -> bool:
    return {by for by, count in sample.versions or [] if count} == {version}


def parity_metrics(gaps: Sequence[Tensor]) -> dict[str, float]:
    """``parity/*`` of some gaps, in nats: percentiles, largest, mean of exp(gap), and how many.

    None without any token.
    """
    every = torch.cat([torch.zeros(0, dtype=torch.float64), *gaps]).numpy()
    if not every.size:
        return {}
    half, most = np.quantile(every, (0.5, 0.95))
    return {
        "parity/p50": float(half),
        "parity/p95": float(most),
        "parity/max": float(every.max()),
        "parity/mean_exp": float(np.exp(every).mean()),
        "parity/tokens": float(every.size),
    }


def parity_problem(metrics: Mapping[str, float], threshold: float) -> str | None:
    """What is wrong with a step's ``parity/*``; None where nothing is, or nothing was compared."""
    p95 = metrics.get("parity/p95")
    if p95 is None or p95 <= threshold:
        return None
    return (
        f"sampler and trainer must agree within parity_threshold={threshold:g} nats on 95% of the "
        f"tokens, got {p95:.3g} (largest {metrics['parity/max']:.3g}): does the rollout function "
        "sample with another temperature, top_p or top_k, does the deployment quantize, does a "
        "mixture of experts need router_replay?"
    )
