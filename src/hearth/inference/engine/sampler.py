"""Samples tokens: one vectorized step for all rows of logits. Legend: B rows, V vocabulary.

A token depends only on its logits, sampling values, seed and position, so a completion does not
depend on the other sequences of its batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hearth.inference.backend import TopLogprobs
from hearth.inference.engine.device_sampler import sample_on_device
from hearth.kernels.ops import kernels

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True)
class SamplingValues:
    """Per-row sampling values, arrays of B; see ``SampleRequest`` for their meaning."""

    temperature: NDArray[np.float64]
    top_p: NDArray[np.float64]
    top_k: NDArray[np.int64]
    top_logprobs: NDArray[np.int64] | None = None
    """None when no row needs them."""

    @property
    def are_simple(self) -> NDArray[np.bool_]:
        """Which rows sample from all tokens, at some temperature."""
        return (self.temperature > 0) & (self.top_p >= 1) & (self.top_k <= 0)

    def select(self, rows: NDArray[np.int64]) -> SamplingValues:
        """Those of some rows, without ``top_logprobs``."""
        return SamplingValues(self.temperature[rows], self.top_p[rows], self.top_k[rows])


@dataclass(frozen=True)
class TopTokens:
    """The most probable tokens [R, K] of some rows of logits, likeliest first."""

    tokens: NDArray[np.int64]
    logprobs: NDArray[np.float32]

    def select(self, row: int, count: int) -> TopLogprobs:
        """The ``count`` likeliest of a row."""
        pairs = zip(self.tokens[row, :count], self.logprobs[row, :count], strict=True)
        return [(int(token), float(logprob)) for token, logprob in pairs]


@dataclass(frozen=True)
class SampledTokens:
    """Tokens [B] with the model's own logprobs and those of the sampled distribution, float32."""

    tokens: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    sampling_logprobs: NDArray[np.float32]
    top: TopTokens | None = None
    """Of those rows that need them."""


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in [0, 1) for each (seed, position), by counter-based hashing (SplitMix64)."""
    # The seed is mixed first, so that seeds that differ by a multiple of _GOLDEN are independent.
    start = _mix(seeds + _GOLDEN)
    counter = (positions + 1).astype(np.uint64) * _GOLDEN
    return (_mix(start + counter) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def sample(
    logits: Tensor, values: SamplingValues, seeds: NDArray[np.uint64], positions: NDArray[np.int64]
) -> SampledTokens:
    """Sample one token per row of ``logits`` [B, V] (float32).

    ``positions`` are those of the new tokens. Inverts the cumulative distribution, in float64 and
    in vocabulary order.
    """
    numbers = uniforms(seeds, positions)
    wanted, top = values.top_logprobs, None
    if wanted is not None:
        top = find_top(logits[_index(wanted > 0, logits)], int(wanted.max()))
    fast = _sample_fast(logits, values, numbers)
    fractions = torch.from_numpy(numbers)
    if fast is None:
        return replace(_sample(logits, values, fractions), top=top)
    sampled, others = fast
    if others.size:
        index = torch.from_numpy(others)
        other = _sample(logits[index], values.select(others), fractions[index])
        sampled.tokens[others], sampled.logprobs[others] = other.tokens, other.logprobs
        sampled.sampling_logprobs[others] = other.sampling_logprobs
    return replace(sampled, top=top)


def _sample_fast(
    logits: Tensor, values: SamplingValues, fractions: NDArray[np.float64]
) -> tuple[SampledTokens, NDArray[np.int64]] | None:
    """Tokens of the rows that sample from all tokens, and the other rows; None without kernels.

    Whether a row is sampled here depends on its own values alone.
    """
    simple = values.are_simple
    if logits.device.type == "cuda":
        simple |= values.temperature == 0
        temperatures = np.where(simple, values.temperature, 1.0)
        return SampledTokens(*sample_on_device(logits, temperatures, fractions)), np.flatnonzero(
            ~simple
        )
    loops = kernels() if logits.device.type == "cpu" else None
    if loops is None:
        return None
    temperatures = np.where(simple, values.temperature, 1.0).astype(np.float32)
    tokens, logprobs, sampled_logprobs = loops.sample(
        logits.contiguous(), torch.from_numpy(temperatures), torch.from_numpy(fractions)
    )
    sampled = SampledTokens(tokens.numpy(), logprobs.numpy(), sampled_logprobs.numpy())
    return sampled, np.flatnonzero(~simple)


def _sample(logits: Tensor, values: SamplingValues, fractions: Tensor) -> SampledTokens:
    """The same in torch, for any values."""
    raw = torch.log_softmax(logits, dim=-1)
    distribution = _find_sampling_logprobs(logits, raw, values)
    tokens = _invert(distribution, fractions.to(logits.device))
    index = tokens.unsqueeze(1)
    own = raw.gather(1, index).squeeze(1).cpu().numpy()
    if distribution is raw:
        return SampledTokens(tokens.cpu().numpy(), own, own)
    sampling = distribution.gather(1, index).squeeze(1).cpu().numpy()
    return SampledTokens(tokens.cpu().numpy(), own, sampling)


def find_top(logits: Tensor, most: int) -> TopTokens:
    """The ``most`` most probable tokens of logits [R, V] (float32), with the model's logprobs."""
    top = torch.log_softmax(logits, dim=-1).topk(min(most, logits.shape[1]), dim=1)
    return TopTokens(top.indices.cpu().numpy(), top.values.cpu().numpy())


def split_top(parts: Sequence[TopTokens], counts: Sequence[int]) -> list[TopTokens]:
    """The rows of all ``parts`` end to end, in pieces of ``counts`` rows."""
    places = np.cumsum(counts)[:-1]
    tokens = np.split(np.concatenate([part.tokens for part in parts]), places)
    logprobs = np.split(np.concatenate([part.logprobs for part in parts]), places)
    return [TopTokens(*pair) for pair in zip(tokens, logprobs, strict=True)]


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def _find_sampling_logprobs(logits: Tensor, raw: Tensor, values: SamplingValues) -> Tensor:
    """Log-probabilities [B, V] of the distribution to sample; ``raw`` itself when it is that."""
    greedy = values.temperature == 0
    tempered = ~greedy & (values.temperature != 1)
    truncated = ~greedy & ((values.top_p < 1) | (values.top_k > 0))
    if not (greedy.any() or tempered.any() or truncated.any()):
        return raw
    rows = raw.clone()
    if tempered.any():
        index = _index(tempered, logits)
        scale = torch.from_numpy(values.temperature[tempered]).to(logits.device).unsqueeze(1)
        chosen = logits[index]
        # The largest logit is 0 before the division: a tiny temperature gives -inf, never NaN.
        shifted = (chosen - chosen.amax(1, keepdim=True)).double() / scale
        rows[index] = torch.log_softmax(shifted, dim=-1).float()
    if truncated.any():
        index = _index(truncated, logits)
        top_k = torch.from_numpy(values.top_k[truncated]).to(logits.device)
        top_p = torch.from_numpy(values.top_p[truncated]).to(logits.device)
        rows[index] = _truncate(rows[index], top_k, top_p)
    if greedy.any():
        index = _index(greedy, logits)
        best = logits[index].argmax(1)
        point = torch.full_like(rows[index], -torch.inf)
        rows[index] = point.scatter_(1, best.unsqueeze(1), 0.0)
    return rows


def _truncate(rows: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Rows of log-probabilities with all but the top_k, then the top_p, at -inf; renormalized.

    ``top_p`` keeps a token while those before it hold less than ``top_p`` of what ``top_k`` left.
    Equal probabilities rank by token id.
    """
    ordered, order = rows.double().sort(dim=1, descending=True, stable=True)
    rank = torch.arange(rows.shape[1], device=rows.device)
    limit = torch.where(top_k > 0, top_k, rows.shape[1]).unsqueeze(1)
    ordered = ordered.masked_fill(rank >= limit, -torch.inf)
    mass = ordered.softmax(1)
    before = mass.cumsum(1) - mass
    cut = (before >= top_p.unsqueeze(1)) & (rank > 0)
    ordered = ordered.masked_fill(cut & (top_p < 1).unsqueeze(1), -torch.inf)
    kept = ordered.log_softmax(1).float()
    return torch.empty_like(rows).scatter_(1, order, kept)


def _invert(rows: Tensor, fractions: Tensor) -> Tensor:
    """Tokens [B] at the given fractions of the cumulative distributions of ``rows``."""
    cumulative = rows.exp().cumsum(1, dtype=torch.float64)
    total = cumulative[:, -1:]
    # Strictly below the total, so that no token of probability 0 is chosen.
    below = torch.nextafter(total, torch.zeros_like(total))
    point = torch.minimum(fractions.unsqueeze(1) * total, below)
    tokens = torch.searchsorted(cumulative, point, right=True).squeeze(1)
    # NaN logits match no token; the engine recognizes them by their NaN logprob.
    return tokens.clamp(max=rows.shape[1] - 1)


def _index(mask: NDArray[np.bool_], like: Tensor) -> Tensor:
    return torch.from_numpy(np.flatnonzero(mask)).to(like.device)
