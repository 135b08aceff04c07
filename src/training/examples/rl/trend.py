"""How a number goes over a run: the lines that the examples end with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from training.run.metrics import read_records


def reward_trend(log_path: str | Path) -> str:
    """Mean reward of what was trained, in the first and in the last quarter of a run's steps.

    Read from ``metrics.jsonl``, so that a run that was killed and started again is one.
    """
    records = read_records(Path(log_path) / "metrics.jsonl", "train")
    return trend("mean reward", [float(record["rollout/reward"]) for record in records], "steps")


def trend(name: str, values: Sequence[float], unit: str) -> str:
    """One line with the means of the first and of the last quarter of ``values``.

    Example: ``mean reward: 0.479 in the first quarter of 32 steps, 0.813 in the last``
    """
    if not values:
        return f"{name}: no {unit}"
    quarter = max(1, len(values) // 4)
    first, last = (math.fsum(part) / quarter for part in (values[:quarter], values[-quarter:]))
    return (
        f"{name}: {first:.3f} in the first quarter of {len(values)} {unit}, {last:.3f} in the last"
    )
