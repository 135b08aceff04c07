"""How far rewards lie apart."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def population_std(values: Sequence[float]) -> float:
    """The population deviation; exactly 0 for equal values, NaN where one is not finite."""
    if all(value == values[0] for value in values):
        return 0.0
    mean = statistics.fmean(values)
    return statistics.fmean([(value - mean) * (value - mean) for value in values]) ** 0.5
