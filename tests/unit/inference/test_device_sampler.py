"""Samples on a GPU, whose arithmetic runs on the CPU as well, against the CPU's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from hearth.inference.engine.device_sampler import sample_on_device
from hearth.inference.engine.sampler import SampledTokens, SamplingValues, sample, uniforms

ROWS = 400


def sample_on_both(
    logits: Tensor, temperatures: np.ndarray, seed: int = 0
) -> tuple[SampledTokens, SampledTokens]:
    """What a GPU would sample, and what the CPU samples."""
    seeds = np.arange(seed, seed + len(logits), dtype=np.uint64)
    positions = np.full(len(logits), 5)
    found = SampledTokens(*sample_on_device(logits, temperatures, uniforms(seeds, positions)))
    ones, zeros = np.ones(len(logits)), np.zeros(len(logits), np.int64)
    return found, sample(logits, SamplingValues(temperatures, ones, zeros), seeds, positions)


def assert_same(found: SampledTokens, expected: SampledTokens) -> None:
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    assert found.tokens.dtype == np.int64
    for name in ("logprobs", "sampling_logprobs"):
        left, other = getattr(found, name), getattr(expected, name)
        assert left.dtype == np.float32
        np.testing.assert_allclose(left, other, rtol=0, atol=2e-5)


# One block, a block and a token more, many blocks.
@pytest.mark.parametrize("vocabulary", [2, 255, 256, 257, 5000])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7, 0.0])
def test_a_gpu_samples_what_the_cpu_samples(vocabulary: int, temperature: float) -> None:
    logits = 3 * torch.randn(ROWS, vocabulary, generator=torch.Generator().manual_seed(vocabulary))

    found, expected = sample_on_both(logits, np.full(ROWS, temperature))

    assert_same(found, expected)
    assert len(np.unique(found.tokens)) > min(1, vocabulary - 2)


def test_rows_of_all_temperatures_are_sampled_together() -> None:
    logits = 3 * torch.randn(ROWS, 1000, generator=torch.Generator().manual_seed(1))
    temperatures = np.resize([1.0, 0.0, 0.3, 1e-9, 5.0], ROWS)

    assert_same(*sample_on_both(logits, temperatures))


def test_tokens_without_probability_are_never_sampled() -> None:
    logits = torch.full((ROWS, 600), -torch.inf)
    # At the ends of blocks, where sums of blocks and cumulative sums meet.
    logits[:, [3, 255, 256, 511, 599]] = torch.tensor([0.0, 1.0, 0.3, 2.0, 0.5])

    found, expected = sample_on_both(logits, np.ones(ROWS))

    assert set(found.tokens.tolist()) == {3, 255, 256, 511, 599}
    assert_same(found, expected)


def test_a_fraction_at_the_end_of_a_block_finds_a_token_with_mass() -> None:
    # Of so many magnitudes that sums in another order differ in float64.
    logits = 12 * torch.randn(2000, 512, generator=torch.Generator().manual_seed(0))
    logits[:, 200:256] = -torch.inf
    masses = (logits - logits.amax(1, keepdim=True)).exp()
    first, second = masses.unflatten(1, (2, 256)).sum(2, dtype=torch.float64).T
    ends = torch.nextafter(first / (first + second), torch.zeros_like(first)).numpy()

    tokens, logprobs, _ = sample_on_device(logits, np.ones(2000), ends)

    assert np.isfinite(logprobs).all()
    assert set(tokens.tolist()).isdisjoint(range(200, 256))


def test_a_tiny_temperature_takes_the_most_probable_token() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.999, -torch.inf]])

    for temperature in (1e-30, 1e-300):
        tokens, _, sampling_logprobs = sample_on_device(
            logits, np.array([temperature]), np.array([0.99])
        )
        assert tokens.tolist() == [1]
        assert sampling_logprobs.tolist() == [0.0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_have_a_logprob_that_says_so(temperature: float) -> None:
    logits = torch.zeros(2, 300)
    logits[1, 7] = torch.nan

    tokens, logprobs, sampling_logprobs = sample_on_device(
        logits, np.full(2, temperature), np.array([0.5, 0.5])
    )

    assert np.isfinite(logprobs).tolist() == [True, False]
    assert np.isfinite(sampling_logprobs).tolist() == [True, False]
    assert 0 <= tokens[1] < 300
