"""Whether a sample can be asked for again: where the weights that sampled it still are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hearth.viewer.run import RecordedRun
from hearth.viewer.weights import explain_refusal


def can_sample_again(run: RecordedRun, sample: Mapping[str, Any]) -> dict[str, Any]:
    """Whether the seed and the weights of a sample, as the API gives it, are there, or why not."""
    versions = sample["values"].get("version")
    if versions is None or not sample.get("seeds"):
        return {"possible": False, "reason": "its weight version or its seed is not on record"}
    record = {
        "tokens": sample["tokens"]["ids"],
        "loss_mask": sample["mask"],
        "versions": versions,
        **{name: sample.get(name) for name in ("seeds", "started", "sample_s")},
    }
    reason = explain_refusal(run.folder, record)
    return {"possible": reason is None, "reason": reason or ""}
