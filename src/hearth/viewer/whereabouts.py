"""Whether a sample can be asked for again: where the weights that sampled it still are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hearth.viewer.run import Run


def can_sample_again(run: Run, sample: Mapping[str, Any]) -> dict[str, Any]:
    """Whether the weights and the seed of a sample are still there, and what is missing."""
    if not sample.get("seeds"):
        return {"possible": False, "reason": "its seed is not on record"}
    if sample.get("version") is None:
        return {"possible": False, "reason": "its weight version is not on record"}
    return {"possible": True, "reason": ""}
