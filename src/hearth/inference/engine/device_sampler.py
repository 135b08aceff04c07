"""Samples tokens on the logits' own device: a dozen kernels, and the CPU waits for none of them.

Samples the same tokens as the loops in C: the first token whose cumulative probability, in
vocabulary order and float64, is above a row's fraction of the total. A cumulative sum over a whole
vocabulary is slow on a GPU, so it is computed over blocks first, then within one block of each row.

Legend: B rows, V vocabulary, C blocks, K tokens of a block.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hearth.inference.engine.transfers import fetch, stage

_BLOCK = 256
_LARGEST = np.finfo(np.float32).max


def sample_on_device(
    logits: Tensor, temperatures: NDArray[np.float64], fractions: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]]:
    """Tokens [B] and their logprobs [B], the model's own and those of the sampled distribution.

    ``logits`` are [B, V] (float32). A row samples ``softmax(logits / temperature)`` at its
    fraction, in [0, 1); at temperature 0 it takes the most probable token.
    """
    is_greedy = temperatures == 0
    with np.errstate(over="ignore", divide="ignore"):
        inverse = np.float32(1) / np.where(is_greedy, 1, temperatures).astype(np.float32)
    # Finite, since the largest logit's 0 times infinity would be NaN.
    scales = np.minimum(inverse, _LARGEST)
    inputs = stage(np.stack([scales, fractions, is_greedy]), logits.device)
    on_device = inputs.to(logits.device, non_blocking=True)
    sampled = _sample(
        logits, on_device, is_tempered=bool((scales != 1).any()), any_greedy=bool(is_greedy.any())
    )
    # Token ids and float32 are exact in float64.
    tokens, logprobs, sampling_logprobs = fetch(sampled)
    return (
        tokens.astype(np.int64),
        logprobs.astype(np.float32),
        sampling_logprobs.astype(np.float32),
    )


def _sample(logits: Tensor, inputs: Tensor, *, is_tempered: bool, any_greedy: bool) -> Tensor:
    """Tokens, logprobs and sampling logprobs [3, B] (float64), queued and not waited for.

    ``inputs`` [3, B] (float64) are the inverse temperatures, the fractions, and 1 for greedy rows.
    """
    scales, fractions, greedy = inputs
    shifted = logits - logits.amax(1, keepdim=True)
    blocks = _block_masses(shifted)
    sums = blocks.sum(2, dtype=torch.float64)
    whole = total = sums.sum(1)
    if is_tempered:
        blocks = _block_masses(shifted * scales.float()[:, None])
        sums = blocks.sum(2, dtype=torch.float64)
        total = sums.sum(1)
    tokens = _invert(blocks, sums, fractions)
    if any_greedy:
        tokens = torch.where(greedy > 0, shifted.argmax(1), tokens)
    # NaN logits give any token; the engine recognizes them by their NaN logprob.
    tokens = tokens.clamp(max=logits.shape[1] - 1)
    above = shifted.gather(1, tokens[:, None]).squeeze(1)
    own = above - whole.log().float()
    sampling = above * scales.float() - total.log().float()
    if any_greedy:
        is_exact = (greedy > 0) & whole.isfinite()
        sampling = torch.where(is_exact, torch.zeros_like(sampling), sampling)
    return torch.stack([tokens.double(), own.double(), sampling.double()])


def _block_masses(exponents: Tensor) -> Tensor:
    """exp of [B, V] as [B, C, K], with zeros behind the vocabulary."""
    masses = exponents.exp()
    missing = -masses.shape[1] % _BLOCK
    return torch.nn.functional.pad(masses, (0, missing)).unflatten(1, (-1, _BLOCK))


def _invert(blocks: Tensor, sums: Tensor, fractions: Tensor) -> Tensor:
    """Tokens [B] at ``fractions`` [B] of the masses ``blocks`` [B, C, K] with ``sums`` [B, C]."""
    cumulative = sums.cumsum(1)
    # Below the whole, as fractions are 1 - 2^-53 at most.
    point = fractions * cumulative[:, -1]
    block = _first_above(cumulative, point)
    rows = torch.arange(len(block), device=block.device)
    before = torch.where(block > 0, cumulative[rows, block - 1], 0.0)
    within = blocks[rows, block].cumsum(1, dtype=torch.float64)
    # Sums in another order differ by rounding; the token must have some probability nevertheless.
    total = within[:, -1]
    most = torch.nextafter(total, torch.zeros_like(total))
    point = torch.minimum((point - before).clamp(min=0.0), most)
    return block * _BLOCK + _first_above(within, point)


def _first_above(cumulative: Tensor, point: Tensor) -> Tensor:
    """Of each row, the first place [B] whose cumulative sum is above ``point`` [B]."""
    places = torch.searchsorted(cumulative, point[:, None], right=True).squeeze(1)
    return places.clamp(max=cumulative.shape[1] - 1)
