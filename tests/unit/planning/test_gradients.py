"""Which gradients a rank has room for."""

from __future__ import annotations

import pytest

from hearth.planning.gradients import fits_whole_gradient

GIB = 2**30
BILLION = 10**9


@pytest.mark.parametrize(
    ("parameters", "ranks", "is_whole"),
    [
        (4 * BILLION, 8, True),
        (8 * BILLION, 8, False),
        (8 * BILLION, 16, True),
        (32 * BILLION, 16, False),
        (32 * BILLION, 1024, False),
    ],
)
def test_a_gpu_of_80_gib_has_room_for_whole_gradients_of_small_models(parameters, ranks, is_whole):
    held = 16 * parameters // ranks

    assert fits_whole_gradient(parameters, held=held, memory=80 * GIB) is is_whole


def test_the_whole_gradient_and_what_is_held_take_half_of_the_memory_at_most():
    assert fits_whole_gradient(10, held=60, memory=200)
    assert not fits_whole_gradient(10, held=61, memory=200)
