"""Seeds of samples: they depend on the run's seed and the rollout's place, on nothing else."""

from __future__ import annotations

import hashlib


def row_seed(seed: int, index: int) -> int:
    """The sampling seed of a row: the same for every run with ``seed``, below 2**63."""
    return _hash_text(f"{seed}/{index}")


def call_seed(seed: int, sample: int, call: int) -> int:
    """The seed of a further request of rollout ``sample`` of a row with ``seed``; below 2**63."""
    return _hash_text(f"{seed}/{sample}/{call}")


def _hash_text(text: str) -> int:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
