"""How sure a measure of an evaluation is: 95 % intervals over rows, which are what was drawn.

Answers to one row are alike, so they do not count as so many draws (arXiv:2411.00640).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Z = statistics.NormalDist().inv_cdf(0.975)


@dataclass(frozen=True)
class Interval:
    """A mean, and where it lies in 95 of 100 evaluations on other rows; NaN where it is unknown."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class Difference:
    """What one model has more than another on the rows that both answered."""

    interval: Interval
    better: int
    """Rows in which it has more."""
    worse: int
    rows: int
    """Rows that both answered."""


def mean_interval(values: Sequence[float]) -> Interval:
    """The mean of one value per row."""
    if not values:
        return Interval(math.nan, math.nan, math.nan)
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return Interval(mean, math.nan, math.nan)
    half = Z * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def share_interval(shares: Sequence[float]) -> Interval:
    """The mean of one share per row, within 0 and 1: Wilson's interval.

    It counts as many draws as would vary as much as the rows do, and no fewer than it can be sure
    of where all rows are alike: as many as there are rows.
    """
    if not shares:
        return Interval(math.nan, math.nan, math.nan)
    mean = math.fsum(shares) / len(shares)
    draws = float(len(shares))
    spread = statistics.variance(shares) / len(shares) if len(shares) > 1 else 0.0
    if spread > 0.0:
        draws = max(draws - 1.0, mean * (1.0 - mean) / spread)
    center = (mean + Z * Z / (2 * draws)) / (1 + Z * Z / draws)
    half = Z / (1 + Z * Z / draws) * math.sqrt(mean * (1 - mean) / draws + (Z / (2 * draws)) ** 2)
    # Rounding must not leave the mean outside of its interval.
    return Interval(mean, min(mean, max(0.0, center - half)), max(mean, min(1.0, center + half)))


def paired_difference(ours: Mapping[int, float], others: Mapping[int, float]) -> Difference:
    """What ``ours`` has more than ``others``; both have one value per row."""
    both = sorted(ours.keys() & others.keys())
    differences = [ours[place] - others[place] for place in both]
    return Difference(
        mean_interval(differences),
        better=sum(difference > 0 for difference in differences),
        worse=sum(difference < 0 for difference in differences),
        rows=len(both),
    )
