"""Where the weights of a recorded sample still are in its run's folder; loads none of them.

The base model has those before the first weight sync. Later ones are kept as

    buckets/BUCKET/SNAPSHOT       every snapshot, with placement="process"; a snapshot that is a
                                  delta stands on others there
    checkpoints/JOB/NAME          those that run.json names
    models/NAME                   the last ones; NAME is output_model_id or final
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hearth.errors import NotFoundError
from hearth.records.timeline import STARTS, read_events

_SYNC = "weight_sync"


@dataclass(frozen=True)
class SampledTurn:
    """What a turn was sampled from, and what came of it."""

    prompt: list[int]
    """All tokens before it."""
    tokens: list[int]
    version: int
    """The weight version that sampled it."""
    seed: int | None
    """None where it is not on record."""


@dataclass(frozen=True)
class WeightsPlace:
    """Where weights are."""

    kind: Literal["base", "snapshot", "checkpoint", "model"]
    folder: Path | None
    """None of the base model."""
    step: int
    """The optimizer step after which they were published."""
    version: int


def read_config(log_path: Path) -> dict[str, Any]:
    """The settings of a run.

    Raises:
        NotFoundError: there is no config.json, or it is damaged.
    """
    try:
        return json.loads((log_path / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise NotFoundError(f"config.json of the run must be there, got {error}") from None


def take_turn(record: Mapping[str, Any], turn: int = 0) -> SampledTurn:
    """A sampled turn of a sample with all columns; turns are counted from 0.

    Raises:
        NotFoundError: it has no such turn, or tokens of several weight versions.
    """
    turns = list(_find_turns(record["loss_mask"]))
    if not 0 <= turn < len(turns):
        raise NotFoundError(
            f"turn must be below {len(turns)}, the sampled turns of the sample, got {turn}"
        )
    start, end = turns[turn]
    versions = np.unique(record["versions"][start:end]).tolist()
    if len(versions) > 1:
        raise NotFoundError(
            f"the turn must be of one weight version, got {versions}: a weight sync came while it "
            "was sampled, and no snapshot samples it alone"
        )
    tokens, seeds = record["tokens"], record["seeds"] or []
    # A seed for each turn; where agents ask for more than the sample shows, none can be told.
    seed = int(seeds[turn]) if len(seeds) == len(turns) else None
    before, sampled = (np.asarray(part).tolist() for part in (tokens[:start], tokens[start:end]))
    return SampledTurn(before, sampled, versions[0], seed)


def find_weights(log_path: Path, record: Mapping[str, Any], turn: int = 0) -> WeightsPlace:
    """Where the weights are that sampled a turn of a sample with all columns.

    Raises:
        NotFoundError: they are gone, or it cannot be told which they were; the message says why.
    """
    config = read_config(log_path)
    if config.get("deployment", {}).get("engine") == "vllm":
        raise NotFoundError("the run sampled with vLLM, whose numbers this engine does not repeat")
    version = take_turn(record, turn).version
    step = _find_step(log_path, version, _last_moment(record))
    place = next(_list_places(log_path, config, step, version), None)
    if place is None:
        raise NotFoundError(
            f"the weights of version {version} (step {step}) are not kept any more: "
            "dcp_save_interval=1 without keep_checkpoints keeps those of every step, and so does "
            'placement="process"'
        )
    return place


def explain_refusal(log_path: Path, record: Mapping[str, Any], turn: int = 0) -> str | None:
    """Why a sample cannot be asked again, in one sentence; None where it can."""
    try:
        find_weights(log_path, record, turn)
    except NotFoundError as error:
        return str(error)
    return None


def _find_turns(mask: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """First token and end of each run of sampled tokens."""
    edges = np.flatnonzero(np.diff(np.asarray(mask, np.int8), prepend=0, append=0)).tolist()
    return zip(edges[::2], edges[1::2], strict=True)


def _last_moment(record: Mapping[str, Any]) -> float:
    """Until when the sample was sampled, in unix time; infinity where it is not on record."""
    if record["started"] is None:
        return float("inf")
    return record["started"] + (record["sample_s"] or 0.0)


def _find_step(log_path: Path, version: int, until: float) -> int:
    """The step whose weights had a version at a time. A start of an embedded run counts anew."""
    step: int | None = None
    starts = 0
    for event in read_events(log_path):
        if event["time"] > until:
            continue
        if event["name"] in STARTS:
            starts += 1
            step = None
        elif event["name"] == _SYNC and event.get("version") == version:
            step = event.get("step")
    if step is not None:
        return step
    if version == 0 and starts:
        return 0
    raise NotFoundError(f"timeline.jsonl must say when version {version} was published, got none")


def _list_places(
    log_path: Path, config: Mapping[str, Any], step: int, version: int
) -> Iterator[WeightsPlace]:
    starts_elsewhere = config.get("init_from_checkpoint") or config.get("warm_start_from_adapter")
    if step == 0 and not starts_elsewhere:
        yield WeightsPlace("base", None, step, version)
    for manifest in sorted(log_path.glob("buckets/*/*/manifest.json")):
        if _read_json(manifest).get("metadata", {}).get("step") == step > 0:
            yield WeightsPlace("snapshot", manifest.parent, step, version)
    for checkpoint in _read_json(log_path / "run.json").get("checkpoints", []):
        folder = log_path / "checkpoints" / str(checkpoint.get("job")) / checkpoint["name"]
        if checkpoint["step"] == step and (folder / "manifest.json").exists():
            yield WeightsPlace("checkpoint", folder, step, version)
    folder = log_path / "models" / (config.get("output_model_id") or "final")
    if step == _last_synced_step(log_path, folder / "config.json"):
        yield WeightsPlace("model", folder, step, version)


def _last_synced_step(log_path: Path, exported: Path) -> int | None:
    """The step that the exported model is of; None without a whole model that came last."""
    syncs = [event for event in read_events(log_path) if event["name"] == _SYNC]
    if not exported.exists() or not syncs:
        return None
    is_newer = exported.stat().st_mtime >= syncs[-1]["time"]
    return syncs[-1].get("step") if is_newer else None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
