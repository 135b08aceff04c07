from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hearth.models.prefixes import Cluster, find_clusters

pytestmark = pytest.mark.slow

# Few tokens and short sequences: they share beginnings, contain each other, and repeat.
SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=24)


def clusters_of(sequences: Sequence[Sequence[int]]) -> list[Cluster]:
    return find_clusters([torch.tensor(sequence) for sequence in sequences])


def cost(sequences: Sequence[Sequence[int]], found: Sequence[Cluster]) -> int:
    lengths = [len(sequence) for sequence in sequences]
    return sum(cluster.tokens(lengths) for cluster in found)


def common(sequences: Sequence[Sequence[int]]) -> int:
    """How many first tokens are those of all."""
    length = min(map(len, sequences))
    columns = zip(*(sequence[:length] for sequence in sequences), strict=True)
    return next((place for place, column in enumerate(columns) if len(set(column)) > 1), length)


@given(SEQUENCES)
def test_every_sequence_is_in_one_cluster_with_the_longest_prefix_of_its_members(
    sequences: list[list[int]],
) -> None:
    found = clusters_of(sequences)

    members = [member for cluster in found for member in cluster.members]
    assert sorted(members) == list(range(len(sequences)))
    for cluster in found:
        assert cluster.prefix == common([sequences[member] for member in cluster.members])


@given(SEQUENCES)
def test_sharing_never_costs_more_than_not_sharing(sequences: list[list[int]]) -> None:
    found = clusters_of(sequences)

    alone = sum(len(sequence) for sequence in sequences)
    assert cost(sequences, found) <= alone
    # A cluster without a prefix would be none.
    assert all(cluster.prefix > 0 for cluster in found)


def most_saved(ordered: Sequence[Sequence[int]]) -> int:
    """What sorted sequences save as one cluster, or apart where they have least in common."""
    if len(ordered) == 1:
        return 0
    prefix = common(ordered)
    cuts = [place for place in range(1, len(ordered)) if common(ordered[place - 1 :][:2]) == prefix]
    parts = [
        ordered[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(ordered)], strict=True)
    ]
    return max((len(ordered) - 1) * prefix, sum(map(most_saved, parts)))


@given(SEQUENCES)
def test_of_clusters_that_nest_those_are_taken_that_save_most(sequences: list[list[int]]) -> None:
    saved = sum(map(len, sequences)) - cost(sequences, clusters_of(sequences))

    assert saved == most_saved(sorted(sequences))


@given(SEQUENCES, st.randoms(use_true_random=False))
def test_what_is_computed_does_not_depend_on_the_order(
    sequences: list[list[int]], random: Random
) -> None:
    shuffled = list(sequences)
    random.shuffle(shuffled)

    def texts(given: list[list[int]]) -> list[tuple[int, list[list[int]]]]:
        return sorted(
            (cluster.prefix, sorted(given[member] for member in cluster.members))
            for cluster in clusters_of(given)
        )

    assert texts(shuffled) == texts(sequences)


def test_completions_of_a_prompt_are_one_cluster_though_prompts_begin_alike() -> None:
    rng = np.random.default_rng(0)
    system = rng.integers(0, 90, 10).tolist()
    prompts = [[*system, prompt, *rng.integers(0, 90, 30).tolist()] for prompt in range(6)]
    # Datum by datum over all prompts, as a shuffled batch has them.
    sequences = [
        [*prompts[place % 6], 90 + place // 6, *rng.integers(0, 90, 20).tolist()]
        for place in range(48)
    ]

    found = clusters_of(sequences)

    assert [cluster.members for cluster in found] == [tuple(range(at, 48, 6)) for at in range(6)]
    assert [cluster.prefix for cluster in found] == [41] * 6


@pytest.mark.parametrize(
    ("sequences", "expected"),
    [
        ([[1, 2, 3]], [Cluster((0,), 3)]),
        ([[1, 2], [1, 2], [1, 2]], [Cluster((0, 1, 2), 2)]),
        ([[1, 2, 3, 4], [1, 2]], [Cluster((0, 1), 2)]),
        ([[1, 2, 3], [2, 2, 3]], [Cluster((0,), 3), Cluster((1,), 3)]),
        # The long prefix of two is worth more than the short one of three.
        ([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 9]], [Cluster((0, 1), 4), Cluster((2,), 2)]),
        # And less than that of many.
        ([[1, 2, 3], [1, 2, 4], [1, 5], [1, 6], [1, 7]], [Cluster((0, 1, 2, 3, 4), 1)]),
        # Ids that no byte holds, in the order of numbers.
        ([[256, 1], [1, 1], [256, 2]], [Cluster((0, 2), 1), Cluster((1,), 2)]),
    ],
)
def test_clusters_are(sequences: list[list[int]], expected: list[Cluster]) -> None:
    assert clusters_of(sequences) == expected


def test_no_sequences_have_no_clusters() -> None:
    assert find_clusters([]) == []


def ascending(count: int) -> list[list[int]]:
    """Each shares one token more with the next: as many nested ranges as sequences."""
    return [[1] * place + [0] for place in range(count)]


def groups(count: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, 99, (count // 8, 12)).tolist()
    return [[*prompts[place % len(prompts)], place] for place in range(count)]


def count_calls(sequences: Sequence[Sequence[int]]) -> int:
    """Python functions that are called to find the clusters."""
    tensors = [torch.tensor(sequence) for sequence in sequences]
    events: list[str] = []
    sys.setprofile(lambda _frame, event, _arg: events.append(event))
    find_clusters(tensors)
    sys.setprofile(None)
    return events.count("call")


@pytest.mark.parametrize("kind", [ascending, groups])
def test_work_grows_with_the_number_of_sequences_and_no_faster(
    kind: Callable[[int], list[list[int]]],
) -> None:
    assert count_calls(kind(1024)) <= 2.1 * count_calls(kind(512))
