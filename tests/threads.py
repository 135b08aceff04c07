"""The number of threads that tests of tiny models compute with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Models this small gain nothing from a second thread, and lose much where cores are busy.

    It counts from the first test of a folder whose ``conftest.py`` imports it to the session's end.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
