import numpy as np
import pytest
import torch

from hearth.inference.engine.sampler import SampledTokens, SamplingValues, sample, uniforms

LOGITS = [2.0, 1.5, 1.5, 0.3, 0.0, -0.4, -1.0, -1.1, -2.0, -2.5, -4.0, -30.0]


def sample_rows(
    logits, count=1, *, temperature=1.0, top_p=1.0, top_k=0, first_seed=0
) -> SampledTokens:
    """``count`` samples from the same logits, with seeds in a row, at position 5."""
    values = SamplingValues(
        np.full(count, temperature), np.full(count, top_p), np.full(count, top_k)
    )
    seeds = np.arange(first_seed, first_seed + count, dtype=np.uint64)
    rows = torch.tensor([logits]).expand(count, -1).contiguous()
    return sample(rows, values, seeds, np.full(count, 5))


def naive_distribution(logits, *, temperature=1.0, top_p=1.0, top_k=0) -> np.ndarray:
    """Temperature, then top_k, then top_p over what is left, one token at a time."""
    mass = np.exp(np.array(logits, np.float64) / temperature)
    mass /= mass.sum()
    ranked = sorted(range(len(mass)), key=lambda token: (-mass[token], token))
    ranked = ranked[:top_k] if top_k else ranked
    left = sum(mass[token] for token in ranked)
    kept, held = [], 0.0
    for token in ranked:
        if kept and held >= top_p and top_p < 1:
            break
        kept.append(token)
        held += mass[token] / left
    result = np.zeros(len(mass))
    result[kept] = mass[kept] / mass[kept].sum()
    return result


CASES = {
    "plain": {},
    "cold": {"temperature": 0.6},
    "hot": {"temperature": 1.7},
    "top_k": {"top_k": 4},
    "top_k_in_a_tie": {"top_k": 2},
    "top_p": {"top_p": 0.8},
    "all": {"temperature": 0.9, "top_k": 6, "top_p": 0.85},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_samples_follow_the_distribution_that_was_asked_for(options):
    expected = naive_distribution(LOGITS, **options) * 20_000

    counts = np.bincount(sample_rows(LOGITS, 20_000, **options).tokens, minlength=len(LOGITS))

    assert counts[expected == 0].sum() == 0
    seen = expected > 1
    chi_square = ((counts - expected)[seen] ** 2 / expected[seen]).sum()
    assert chi_square < 31.3  # 0.999 quantile for 11 degrees of freedom


@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_sampling_logprob_is_that_of_the_distribution_sampled_from(options):
    expected = naive_distribution(LOGITS, **options)

    sampled = sample_rows(LOGITS, 500, **options)

    np.testing.assert_allclose(
        sampled.sampling_logprobs, np.log(expected[sampled.tokens]), rtol=0, atol=2e-6
    )


@pytest.mark.parametrize("top_p", [0.05, 0.3, 0.5, 0.77, 0.95, 0.999])
@pytest.mark.parametrize("top_k", [0, 1, 7, 40])
def test_truncation_keeps_exactly_the_naive_set(top_p, top_k):
    logits = torch.randn(50, generator=torch.Generator().manual_seed(top_k)).tolist()
    expected = naive_distribution(logits, top_p=top_p, top_k=top_k)

    sampled = sample_rows(logits, 3000, top_p=top_p, top_k=top_k)

    assert set(sampled.tokens) <= set(np.flatnonzero(expected))
    np.testing.assert_allclose(
        np.exp(sampled.sampling_logprobs), expected[sampled.tokens], rtol=3e-6
    )


@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_raw_logprob_is_the_models_own_whatever_is_sampled_from(options):
    raw = torch.log_softmax(torch.tensor(LOGITS), -1).numpy()

    sampled = sample_rows(LOGITS, 100, **options)

    np.testing.assert_array_equal(sampled.logprobs, raw[sampled.tokens])


def test_without_truncation_at_temperature_1_both_logprobs_have_the_same_bits():
    sampled = sample_rows(LOGITS, 100)

    np.testing.assert_array_equal(sampled.logprobs, sampled.sampling_logprobs)


@pytest.mark.parametrize("temperature", [0.0, 1e-5, 1e-30])
def test_a_temperature_near_zero_takes_the_most_probable_token(temperature):
    sampled = sample_rows(LOGITS, 200, temperature=temperature)

    assert set(sampled.tokens) == {0}
    assert set(sampled.sampling_logprobs) == {0.0}


def test_tokens_without_probability_are_never_sampled():
    logits = [-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]

    sampled = sample_rows(logits, 50_000)

    assert set(sampled.tokens) == {1, 3}


def test_rows_do_not_depend_on_the_rows_beside_them():
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(40, 300, generator=generator)
    values = SamplingValues(
        np.resize([1.0, 0.0, 0.7, 1.0], 40), np.resize([1.0, 0.9, 0.8], 40), np.resize([0, 5], 40)
    )
    seeds, positions = np.arange(40, dtype=np.uint64), np.arange(40)

    together = sample(logits, values, seeds, positions)

    for row in range(40):
        own = np.array([row])
        alone = sample(logits[own], values.select(own), seeds[own], positions[own])
        assert alone.tokens[0] == together.tokens[row]
        assert alone.logprobs[0] == together.logprobs[row]
        assert alone.sampling_logprobs[0] == together.sampling_logprobs[row]


def test_uniforms_are_even_and_uncorrelated():
    seeds = np.repeat(np.arange(200, dtype=np.uint64), 200)
    positions = np.tile(np.arange(200), 200)

    numbers = uniforms(seeds, positions).reshape(200, 200)

    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
    assert ((counts - 2000) ** 2 / 2000).sum() < 43.8  # 0.999 quantile for 19 degrees of freedom
    assert abs(np.corrcoef(numbers[:, :-1].ravel(), numbers[:, 1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(numbers[:-1].ravel(), numbers[1:].ravel())[0, 1]) < 0.02


def test_seeds_one_stride_apart_share_no_numbers():
    stride = np.uint64(0x9E3779B97F4A7C15)
    seeds = np.arange(1, 9, dtype=np.uint64) * stride

    numbers = uniforms(np.repeat(seeds, 50), np.tile(np.arange(50), 8))

    assert len(set(numbers.tolist())) == 400
