"""How examples are split over ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hearth.trainer.ranks.passes import assign_sequences


def texts(*lengths: int) -> list[torch.Tensor]:
    """Token sequences that have no beginning in common."""
    return [torch.full((length,), number) for number, length in enumerate(lengths)]


@pytest.mark.slow
@given(
    st.lists(st.integers(1, 60), max_size=20), st.integers(1, 5), st.booleans(), st.integers(1, 3)
)
def test_every_sequence_is_one_ranks(
    lengths: list[int], ranks: int, shares_prefixes: bool, kinds: int
) -> None:
    sequences = [torch.full((length,), place % kinds) for place, length in enumerate(lengths)]

    split = assign_sequences(sequences, ranks, shares_prefixes=shares_prefixes)

    assert len(split) == ranks
    assert sorted(place for places in split for place in places) == list(range(len(lengths)))
    assert all(places == sorted(places) for places in split)


@pytest.mark.slow
@given(st.lists(st.integers(1, 60), min_size=1, max_size=20), st.integers(1, 5))
def test_no_rank_has_more_than_a_fair_share_and_the_longest(lengths: list[int], ranks: int) -> None:
    split = assign_sequences(texts(*lengths), ranks, shares_prefixes=False)

    most = max(sum(lengths[place] for place in places) for places in split)
    assert most <= sum(lengths) / ranks + max(lengths)


def test_a_long_text_is_weighed_against_several_short_ones() -> None:
    assert assign_sequences(texts(30, 10, 10, 10), 2, shares_prefixes=False) == [[0], [1, 2, 3]]


def test_fewer_texts_than_ranks_leave_some_with_none() -> None:
    assert assign_sequences(texts(5), 3, shares_prefixes=False) == [[0], [], []]
    assert assign_sequences([], 2, shares_prefixes=True) == [[], []]


def groups() -> list[torch.Tensor]:
    """Two prompts of 20 tokens with two answers of 5 each, as they alternate."""
    prompts = [torch.arange(20), torch.arange(100, 120)]
    return [torch.cat([prompts[place % 2], torch.full((5,), 50 + place)]) for place in range(4)]


def test_what_shares_a_beginning_stays_together_where_it_is_computed_once() -> None:
    assert assign_sequences(groups(), 2, shares_prefixes=True) == [[0, 2], [1, 3]]


def test_a_beginning_that_all_share_is_computed_by_each_rank() -> None:
    sequences = [sequence for place, sequence in enumerate(groups()) if place % 2 == 0] * 4

    split = assign_sequences(sequences, 2, shares_prefixes=True)

    assert all(split)
