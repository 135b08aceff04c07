"""pass@k: how likely at least one of ``k`` answers is right, estimated without bias from ``n``."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hearth.errors import ConfigError


def pass_at_k(n: int, c: int, k: int) -> float:
    """``1 - C(n - c, k) / C(n, k)`` for ``c`` right ones of ``n`` answers (arXiv:2107.03374).

    Raises:
        ConfigError: not 0 <= c <= n, or not 1 <= k <= n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ConfigError(
            f"n, c and k must satisfy 0 <= c <= n and 1 <= k <= n, got n={n}, c={c}, k={k}"
        )
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def pass_rates(rows: Sequence[tuple[int, int]]) -> dict[int, float]:
    """pass@k for k = 1, 2, 4, ..., the mean over rows of (answers, right ones).

    A row with fewer than ``k`` answers says nothing of pass@k and is left out of it.
    """
    most = max((n for n, _ in rows), default=0)
    rates: dict[int, float] = {}
    k = 1
    while k <= most:
        able = [pass_at_k(n, c, k) for n, c in rows if n >= k]
        rates[k] = math.fsum(able) / len(able)
        k *= 2
    return rates
