"""Which rank computes which examples: balanced by tokens, common prefixes together.

Legend: T tokens of an example.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hearth.models.prefixes import Cluster, find_clusters


def assign_sequences(
    sequences: Sequence[Tensor], ranks: int, *, shares_prefixes: bool
) -> list[list[int]]:
    """For each rank, the places of its token sequences (int64 [T] each), in rising order.

    The longest go first, each to the rank with the fewest tokens, so that no rank has more than a
    fair share plus the longest piece. Where a pass computes a common prefix once
    (``shares_prefixes``), sequences with one stay together, up to a fair share. The result is the
    same on all ranks.
    """
    lengths = [sequence.numel() for sequence in sequences]
    if shares_prefixes:
        whole = find_clusters(sequences)
        fair = -(-sum(cluster.tokens(lengths) for cluster in whole) // ranks)
        pieces = [part for cluster in whole for part in cluster.split(lengths, fair)]
    else:
        pieces = [Cluster((place,), length) for place, length in enumerate(lengths)]
    pieces.sort(key=lambda piece: (-piece.tokens(lengths), piece.members))
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for piece in pieces:
        rank = min(range(ranks), key=lambda rank: (loads[rank], rank))
        shares[rank] += piece.members
        loads[rank] += piece.tokens(lengths)
    return [sorted(places) for places in shares]
