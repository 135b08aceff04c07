"""What must not matter: the order of samples, how they are batched, padding, and masked content."""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hearth.losses import GRPO, OBJECTIVES, TIS, Reinforce, policy_loss_per_token

pytestmark = pytest.mark.slow

SEEDS = st.integers(min_value=0, max_value=10_000)
TIS_LEVELS = {"token": TIS(cap=1.3), "sequence": TIS(cap=1.5, level="sequence")}
quickly = settings(max_examples=12, deadline=None, derandomize=True)
every_objective = pytest.mark.parametrize("name", OBJECTIVES)
every_level = pytest.mark.parametrize("tis", TIS_LEVELS.values(), ids=TIS_LEVELS)


def run(name, tis, samples, batch_of):
    """Loss and gradient rows of every sample."""
    options = {"grpo": GRPO(kl_beta=0.2), "reinforce": Reinforce(kl_beta=0.2)}
    batch, leaf = batch_of(samples)
    per_token = policy_loss_per_token(name, batch, options.get(name), tis).per_token
    (gradient,) = torch.autograd.grad(per_token.sum(), leaf)
    lengths = [len(sample["policy"]) for sample in samples]
    return list(per_token.detach().split(lengths)), list(gradient.split(lengths))


def assert_rows_equal(left, right):
    for rows, others in zip(left, right, strict=True):
        torch.testing.assert_close(rows, others, rtol=1e-12, atol=1e-14)


@every_objective
@every_level
@quickly
@given(seed=SEEDS)
def test_permuting_the_samples_permutes_loss_and_gradient(
    seed, name, tis, random_samples, batch_of
):
    samples = random_samples(seed)
    order = random.Random(seed).sample(range(len(samples)), len(samples))

    losses, gradients = run(name, tis, samples, batch_of)
    moved_losses, moved_gradients = run(name, tis, [samples[index] for index in order], batch_of)

    assert_rows_equal(moved_losses, [losses[index] for index in order])
    assert_rows_equal(moved_gradients, [gradients[index] for index in order])


@every_objective
@every_level
@quickly
@given(seed=SEEDS, cut=st.integers(min_value=0, max_value=5))
def test_splitting_the_batch_changes_nothing(seed, cut, name, tis, random_samples, batch_of):
    samples = random_samples(seed)
    whole = run(name, tis, samples, batch_of)

    parts = [part for part in (samples[:cut], samples[cut:]) if part]
    done = [run(name, tis, part, batch_of) for part in parts]

    assert_rows_equal(whole[0], [row for losses, _ in done for row in losses])
    assert_rows_equal(whole[1], [row for _, gradients in done for row in gradients])


@every_objective
@every_level
@quickly
@given(
    seed=SEEDS,
    left=st.integers(min_value=0, max_value=3),
    right=st.integers(min_value=0, max_value=3),
    garbage=st.sampled_from([0.0, 5.0, math.nan, math.inf, -math.inf]),
)
def test_padding_with_masked_garbage_changes_nothing(
    seed, left, right, garbage, name, tis, random_samples, batch_of
):
    samples = random_samples(seed)
    padded = [
        {
            field: [0.0 if field == "mask" else garbage] * left
            + values
            + [0.0 if field == "mask" else garbage] * right
            for field, values in sample.items()
        }
        for sample in samples
    ]

    losses, gradients = run(name, tis, samples, batch_of)
    padded_losses, padded_gradients = run(name, tis, padded, batch_of)

    kept = [slice(left, left + len(sample["mask"])) for sample in samples]
    assert_rows_equal(losses, [row[s] for row, s in zip(padded_losses, kept, strict=True)])
    assert_rows_equal(gradients, [row[s] for row, s in zip(padded_gradients, kept, strict=True)])
    for before, after in ((losses, padded_losses), (gradients, padded_gradients)):
        outside = sum(map(torch.sum, after)) - sum(map(torch.sum, before))
        assert abs(float(outside)) < 1e-10


@every_objective
@quickly
@given(seed=SEEDS)
def test_prompt_and_tool_tokens_have_exactly_no_gradient(seed, name, random_samples, batch_of):
    samples = random_samples(seed)

    losses, gradients = run(name, None, samples, batch_of)

    for sample, loss, gradient in zip(samples, losses, gradients, strict=True):
        masked = torch.tensor(sample["mask"]) == 0
        assert not loss[masked].any()
        assert not gradient[masked].any()
