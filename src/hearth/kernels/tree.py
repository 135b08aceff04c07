"""Rows of one packed batch, and which of them attention lets see which."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Tree:
    """Which rows see which: clusters of sequences that share a prefix.

    ``clusters`` [n, 4] (int64): first row and number of rows of the prefix, first and end index of
    its sequences. ``sequences`` [m, 2]: first row and number of rows. A row sees the prefix of its
    cluster and its own sequence, both up to itself.
    """

    clusters: Tensor
    sequences: Tensor
    most_keys: int
    """The most rows that any row sees."""
