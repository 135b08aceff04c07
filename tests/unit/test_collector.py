"""What the garbage collector's thresholds are inside and after ``collect_rarely``."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from hearth.collector import COLLECT_EVERY, collect_rarely


@pytest.fixture(autouse=True)
def thresholds_as_before() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


@pytest.mark.parametrize(
    ("usual", "inside"),
    [(700, COLLECT_EVERY), (COLLECT_EVERY + 1, COLLECT_EVERY + 1), (0, 0)],
    ids=["Python's own", "set higher", "switched off"],
)
def test_the_threshold_is_raised_for_a_while_and_never_lowered(usual: int, inside: int) -> None:
    gc.set_threshold(usual, 10, 10)

    with collect_rarely():
        assert gc.get_threshold() == (inside, 10, 10)

    assert gc.get_threshold() == (usual, 10, 10)
