"""Tokens of one packed batch, and which of them may attend to which."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Tree:
    """Clusters of sequences that share a prefix.

    ``clusters`` [n, 4] (int64): first token and number of tokens of the prefix, first and end index
    of its sequences. ``sequences`` [m, 2]: first token and number of tokens. A token attends to the
    prefix of its cluster and to its own sequence, both up to itself.
    """

    clusters: Tensor
    sequences: Tensor
    most_keys: int
    """The most tokens that any token attends to."""
