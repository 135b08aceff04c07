"""Finds token sequences that share a prefix, so that a forward pass computes it once.

Completions of one prompt share it; prompts may share a system text. Every example belongs to one
cluster, whose common prefix is computed once (one level: no prefixes of prefixes).

Legend: T tokens of an example, P tokens of a prefix.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class Cluster:
    """Examples by their indices, and the number of first tokens that they share."""

    members: tuple[int, ...]
    prefix: int

    def tokens(self, lengths: Sequence[int]) -> int:
        """Tokens to compute: the prefix once, and the rest of every member."""
        return self.prefix + sum(lengths[member] - self.prefix for member in self.members)

    def split(self, lengths: Sequence[int], most: int) -> list[Cluster]:
        """The cluster in parts of at most ``most`` tokens, each with the prefix.

        A longer member becomes a part of its own.
        """
        parts: list[Cluster] = []
        members: list[int] = []
        room = most - self.prefix
        for member in self.members:
            own = lengths[member] - self.prefix
            if members and own > room:
                parts.append(Cluster(tuple(members), self.prefix))
                members, room = [], most - self.prefix
            members.append(member)
            room -= own
        return [*parts, Cluster(tuple(members), self.prefix)]


def find_clusters(sequences: Sequence[Tensor]) -> list[Cluster]:
    """A partition of token sequences (int64 [T] each) that saves many tokens.

    Members of a cluster are neighbors in lexicographic order; of clusters that nest in each other,
    those that save the most are taken. O(n log n) comparisons for n sequences, plus one pass over
    the tokens.
    """
    arrays = [sequence.numpy() for sequence in sequences]
    # Any order of bytes puts sequences with a common beginning side by side.
    keys = [array.tobytes() for array in arrays]
    order = sorted(range(len(arrays)), key=keys.__getitem__)
    shared = [
        _common_length(arrays[left], arrays[right]) for left, right in itertools.pairwise(order)
    ]
    clusters: list[Cluster] = []
    for start, stop, prefix in _best_cuts(shared, len(order)):
        is_alone = stop - start == 1
        members = tuple(sorted(order[start:stop]))
        clusters.append(Cluster(members, arrays[members[0]].size if is_alone else prefix))
    return sorted(clusters, key=lambda cluster: cluster.members)


def _common_length(left: NDArray[np.int64], right: NDArray[np.int64]) -> int:
    """The length of the common prefix."""
    size = min(left.size, right.size)
    differs = np.flatnonzero(left[:size] != right[:size])
    return int(differs[0]) if differs.size else size


def _best_cuts(shared: Sequence[int], count: int) -> list[tuple[int, int, int]]:
    """(start, stop, prefix) of the ranges of sorted sequences that save the most together.

    A range saves its smallest overlap of neighbors once for each member but the first; splitting it
    at that overlap may save more. Ranges nest, so one pass with a stack finds the best.
    """
    if not count:
        return []
    stack: list[_Range] = []
    for place, overlap in enumerate([*shared, -1]):
        current = _Range(place, place + 1, overlap, 0, [(place, place + 1, 0)])
        while stack and stack[-1].overlap > overlap:
            current = _merge(stack.pop(), current)
        if stack and stack[-1].overlap == overlap:
            current = stack.pop().with_next(current)
        current.overlap = overlap
        stack.append(current)
    return [cut for merged in stack for cut in merged.cuts]


@dataclass
class _Range:
    """Sequences start..stop, their best cuts, and the overlap with the next sequence."""

    start: int
    stop: int
    overlap: int
    saved: int
    cuts: list[tuple[int, int, int]]

    def with_next(self, other: _Range) -> _Range:
        """Both, side by side; ``self`` must not be used afterwards."""
        self.cuts.extend(other.cuts)
        return _Range(self.start, other.stop, self.overlap, self.saved + other.saved, self.cuts)


def _merge(left: _Range, right: _Range) -> _Range:
    """Two neighbors that overlap in ``left.overlap``, as one cluster where that saves more."""
    both = left.with_next(right)
    saved = (both.stop - both.start - 1) * left.overlap
    if saved > both.saved:
        cut = (both.start, both.stop, left.overlap)
        return _Range(both.start, both.stop, left.overlap, saved, [cut])
    return both
