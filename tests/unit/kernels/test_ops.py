"""Sampling in loops against the same in torch, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from tests.unit.kernels.tensors import SetThreads, assert_equal, random
from torch import Tensor

from hearth.kernels.ops import Kernels

pytestmark = pytest.mark.slow

# Enough work for a second thread, which is not woken for little.
MANY = 40


def assert_close(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    """Within a part of the largest value."""
    largest = max(1e-30, float(expected.abs().max()))
    assert float((found.double() - expected).abs().max()) <= tolerance * largest


def sample(
    loops: Kernels, logits: Tensor, temperature: float = 1.0, fraction: float = 0.5
) -> tuple[Tensor, Tensor, Tensor]:
    rows = len(logits)
    return loops.sample(
        logits, torch.full((rows,), temperature), torch.full((rows,), fraction, dtype=torch.float64)
    )


@pytest.mark.usefixtures("one_or_two_threads")
@pytest.mark.parametrize("offset", [0.0, 1e4])
@pytest.mark.parametrize("temperature", [0.1, 0.7, 1.0, 1.3, 5.0])
def test_a_draw_inverts_the_cumulative_distribution(
    loops: Kernels, temperature: float, offset: float
) -> None:
    logits = random(200, 997, scale=3.0) + offset
    fractions = torch.rand(200, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    temperatures = torch.full((200,), temperature)
    tokens, logprobs, sampled_logprobs = loops.sample(logits, temperatures, fractions)

    exact = logits.double()
    picked = tokens[:, None]
    cumulative = (exact / temperature).softmax(-1).cumsum(-1)
    upper = cumulative.gather(1, picked)[:, 0]
    lower = torch.where(tokens > 0, cumulative.gather(1, (picked - 1).clamp(min=0))[:, 0], 0.0)
    assert bool((lower - 1e-6 <= fractions).all())
    assert bool((fractions <= upper + 1e-6).all())
    # So narrow a margin leaves hardly any sample undecided.
    sure = torch.searchsorted(cumulative, fractions[:, None], right=True)[:, 0]
    assert int((sure != tokens).sum()) <= 1
    assert_close(logprobs, exact.log_softmax(-1).gather(1, picked)[:, 0])
    assert_close(sampled_logprobs, (exact / temperature).log_softmax(-1).gather(1, picked)[:, 0])


LAST = math.nextafter(1.0, 0.0)


@pytest.mark.parametrize("fraction", [0.0, 0.5, LAST])
@pytest.mark.parametrize("temperature", [0.1, 1.0, 5.0])
@pytest.mark.parametrize("vocab", [5, 64, 1001])
def test_a_token_without_probability_is_never_drawn(
    loops: Kernels, vocab: int, temperature: float, fraction: float
) -> None:
    logits = random(300, vocab, scale=4.0)
    impossible = torch.rand(300, vocab, generator=torch.Generator().manual_seed(1)) < 0.8
    impossible[:, 0] = impossible[:, -1] = True
    impossible[:, 2] = False
    logits[impossible] = -math.inf
    # An exponential of this is 0 in float32, at any of these temperatures.
    logits[:, 1] = -1000.0

    tokens, logprobs, sampled_logprobs = sample(loops, logits, temperature, fraction)

    own = logits.gather(1, tokens[:, None])[:, 0]
    assert bool((own > -500).all())
    assert bool(logprobs.isfinite().all() and sampled_logprobs.isfinite().all())
    if fraction == 0.0:
        counts = (logits - logits.amax(1, keepdim=True)) / temperature >= -87
        assert torch.equal(tokens, counts.float().argmax(1))


@pytest.mark.parametrize("temperature", [1e-6, 1e-12, 1e-38, 1e-44])
@pytest.mark.parametrize("fraction", [0.0, 0.5, LAST])
def test_a_tiny_temperature_takes_the_most_probable_token(
    loops: Kernels, temperature: float, fraction: float
) -> None:
    logits = random(50, 997, scale=3.0)

    tokens, logprobs, sampled_logprobs = sample(loops, logits, temperature, fraction)

    assert torch.equal(tokens, logits.argmax(1))
    assert_close(logprobs, logits.double().log_softmax(-1).amax(1))
    assert sampled_logprobs.abs().max() <= 1e-3


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("fraction", [0.0, 0.5, LAST])
def test_logits_that_are_no_distribution_give_nan_and_harm_no_other_row(
    loops: Kernels, temperature: float, fraction: float
) -> None:
    logits = random(8, 97)
    healthy = sample(loops, logits, temperature, fraction)
    logits[0, 0], logits[1, 50], logits[2, 96] = math.nan, math.nan, math.nan
    logits[3, 7] = math.inf
    logits[4] = -math.inf
    logits[5] = math.nan

    tokens, logprobs, sampled_logprobs = sample(loops, logits, temperature, fraction)

    assert bool(logprobs[:6].isnan().all() and sampled_logprobs[:6].isnan().all())
    assert bool(((tokens >= 0) & (tokens < 97)).all())
    outputs = (tokens, logprobs, sampled_logprobs)
    assert_equal([output[6:] for output in outputs], [output[6:] for output in healthy])


def test_the_only_possible_token_is_drawn_surely(loops: Kernels) -> None:
    logits = torch.full((97, 97), -math.inf)
    logits.fill_diagonal_(-3.0)

    for fraction in (0.0, 0.5, LAST):
        tokens, logprobs, sampled_logprobs = sample(loops, logits, 0.7, fraction)
        assert tokens.tolist() == list(range(97))
        assert logprobs.abs().max() == sampled_logprobs.abs().max() == 0


def test_a_draw_has_the_same_bits_in_any_batch_on_any_threads(
    loops: Kernels, threads: SetThreads
) -> None:
    logits = random(MANY, 4099, scale=3.0)
    temperatures = torch.linspace(0.5, 1.5, MANY)
    fractions = torch.linspace(0, 0.99, MANY, dtype=torch.float64)

    together = loops.sample(logits, temperatures, fractions)
    for row in (0, 1, 17, MANY - 1):
        rows = slice(row, row + 1)
        alone = loops.sample(logits[rows].clone(), temperatures[rows].clone(), fractions[rows])
        assert_equal([output[0] for output in alone], [output[row] for output in together])
    threads(2)
    assert_equal(loops.sample(logits, temperatures, fractions), together)


def test_no_room_for_work_arrays_is_an_error_and_no_crash(loops: Kernels) -> None:
    logits, fraction = random(1, 5), torch.zeros(1, dtype=torch.float64)
    pointers = [tensor.data_ptr() for tensor in (logits, torch.ones(1), fraction)]

    with pytest.raises(MemoryError, match="hearth_sample cannot allocate"):
        loops.library.hearth_sample(
            *pointers, 1, 2**55, *(torch.empty(1).data_ptr() for _ in range(3)), 1
        )
