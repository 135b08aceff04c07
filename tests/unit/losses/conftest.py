"""Ragged random samples, and flat batches over them."""

import random
from collections.abc import Callable, Sequence

import pytest
import torch

from hearth.losses import TokenBatch

Sample = dict[str, list[float]]
LOGPROBS = ("policy", "old", "behavior", "ref")


def _random_samples(seed: int) -> list[Sample]:
    """One to five samples of 0 to 9 tokens with random masks, ratios on both sides of any clip."""
    rng = random.Random(seed)
    samples: list[Sample] = []
    for _ in range(rng.randint(1, 5)):
        length = rng.choice([0, 1, 3, 6, 9])
        sample: Sample = {"policy": [rng.uniform(-3, -0.05) for _ in range(length)]}
        for name in LOGPROBS[1:]:
            sample[name] = [min(value + rng.gauss(0, 0.5), -0.01) for value in sample["policy"]]
        sample["advantages"] = [rng.choice([0.0, rng.gauss(0, 1.5)]) for _ in range(length)]
        sample["mask"] = [float(rng.random() < 0.6) for _ in range(length)]
        samples.append(sample)
    return samples


def _batch_of(
    samples: Sequence[Sample], dtype: torch.dtype = torch.float64, without: Sequence[str] = ()
) -> tuple[TokenBatch, torch.Tensor]:
    """The flat batch of some samples and the leaf [T] whose gradient is asked for."""
    leaf = torch.tensor([value for sample in samples for value in sample["policy"]], dtype=dtype)
    leaf.requires_grad_(True)
    rows = list(leaf.split([len(sample["policy"]) for sample in samples]))

    def field(name: str) -> list[torch.Tensor] | None:
        if name in without:
            return None
        return [torch.tensor(sample[name], dtype=dtype) for sample in samples]

    batch = TokenBatch.concat(
        rows,
        advantages=field("advantages") or [],
        mask=field("mask") or [],
        old_logprobs=field("old"),
        behavior_logprobs=field("behavior"),
        ref_logprobs=field("ref"),
    )
    return batch, leaf


@pytest.fixture(scope="session")
def random_samples() -> Callable[[int], list[Sample]]:
    return _random_samples


@pytest.fixture(scope="session")
def batch_of() -> Callable[..., tuple[TokenBatch, torch.Tensor]]:
    return _batch_of
