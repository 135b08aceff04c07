"""Random tensors and their comparison to the bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

SetThreads = Callable[[int], None]
EPS = 1e-6


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def assert_equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for tensor, other in zip(found, expected, strict=True):
        assert torch.equal(tensor, other)
