"""Which rank computes which examples: balanced by tokens, common beginnings together.

Legend: T tokens of an example.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hearth.models.prefixes import Cluster, clusters


def shares(sequences: Sequence[Tensor], ranks: int, *, shares_prefixes: bool) -> list[list[int]]:
    """For each rank, the places of its token sequences (int64 [T] each), in rising order.

    The longest first, each to the rank that has the fewest tokens, so that no rank has more than a
    fair share and the longest piece. Where a pass computes a common beginning once
    (``shares_prefixes``), sequences that have one stay together, up to a fair share. All ranks come
    to the same answer.
    """
    lengths = [sequence.numel() for sequence in sequences]
    if shares_prefixes:
        found = clusters(sequences)
        fair = -(-sum(one.tokens(lengths) for one in found) // ranks)
        pieces = [part for one in found for part in one.cut(lengths, fair)]
    else:
        pieces = [Cluster((place,), length) for place, length in enumerate(lengths)]
    pieces.sort(key=lambda piece: (-piece.tokens(lengths), piece.members))
    taken: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for piece in pieces:
        rank = min(range(ranks), key=lambda one: (loads[one], one))
        taken[rank] += piece.members
        loads[rank] += piece.tokens(lengths)
    return [sorted(places) for places in taken]
