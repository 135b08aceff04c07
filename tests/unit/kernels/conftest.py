from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from hearth.kernels.ops import Kernels, kernels


@pytest.fixture(autouse=True)
def threads() -> Iterator[Callable[[int], None]]:
    """Set torch's number of threads; a test starts with one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(params=[1, 2])
def one_or_two_threads(request: pytest.FixtureRequest, threads: Callable[[int], None]) -> None:
    threads(request.param)


@pytest.fixture
def loops() -> Kernels:
    loops = kernels()
    if loops is None:
        pytest.skip("needs a C compiler")
    return loops
