"""From what became of a row to the lines that are written of it, in the columns of hearth.records.

Arrays there have one value per token. The training's are target-aligned and become so here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
from numpy.typing import NDArray

from hearth.records.layout import OUTCOMES, Kind
from hearth.records.table import SCHEMA, make_table
from training.data.rows import IndexedRow
from training.run.token_bytes import TokenBytes
from training.samples.groups import PromptGroup, RowOutcome, TrainSample
from training.samples.rollout import RolloutSample
from training.samples.trajectories import WHY_DROPPED, SampledTrajectory, describe_error

Line = dict[str, Any]
Floats = NDArray[np.float32]

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


@dataclass(frozen=True)
class RowRecord:
    """What is to be written of one row."""

    kind: Kind
    step: int
    row: IndexedRow
    sampled_trajectories: Sequence[SampledTrajectory]
    fate: str
    """What became of the row's trajectories, but for those with a fate of their own."""
    reason: str | None = None
    trained: Mapping[int, TrainSample] = field(default_factory=dict[int, TrainSample])
    """The trained samples, by the identity of what was sampled."""
    row_meta: Mapping[str, Any] | None = None


def trained_record(step: int, group: PromptGroup, outcome: RowOutcome | None) -> RowRecord:
    """The record of a group that was trained; without an outcome it has what the group knows."""
    trajectories = (outcome and outcome.sampled_trajectories) or [
        SampledTrajectory([sample.rollout for sample in samples], reward=reward)
        for samples, reward in zip(group.samples, group.rewards, strict=True)
    ]
    return RowRecord(
        "train",
        step,
        group.row,
        trajectories,
        "dropped",
        "left out of its group",
        trained={id(sample.rollout): sample for sample in group.flat()},
        row_meta=group.row_meta,
    )


def dropped_record(step: int, outcome: RowOutcome) -> RowRecord:
    """The record of a row that is not trained; where nothing was sampled, one line says why."""
    dropped = outcome.dropped or "dropped"
    if dropped == "failed" and outcome.error is not None:
        reason = describe_error(outcome.error)
    else:
        reason = f"of a row {WHY_DROPPED[dropped]}" if dropped in WHY_DROPPED else dropped
    return RowRecord(
        "train",
        step,
        outcome.row,
        outcome.sampled_trajectories or [SampledTrajectory()],
        dropped if dropped in OUTCOMES else "dropped",
        reason,
        row_meta=outcome.row_meta,
    )


def make_lines(records: Sequence[RowRecord], run: str, texts: TokenBytes) -> pa.Table:
    """The lines of some rows as a table, in the rows' order."""
    prompts: dict[bytes, str] = {}
    columns: dict[str, list[Any]] = {name: [] for name in SCHEMA.names}
    for record in records:
        of_row = _describe_row(record, run)
        for number, trajectory in enumerate(record.sampled_trajectories):
            of_trajectory = _describe_trajectory(record, trajectory, number)
            for segment in range(max(1, len(trajectory.segments))):
                line = of_row | of_trajectory | {"segment": segment}
                if trajectory.segments:
                    sample = trajectory.segments[segment]
                    line |= _describe_sample(sample, texts, prompts)
                    line |= _describe_training(record, sample)
                else:
                    line |= _NOTHING
                for name, values in columns.items():
                    values.append(line.get(name))
    return make_table(columns)


_NOTHING: Line = {
    "tokens": (),
    "prompt_len": 0,
    "loss_mask": (),
    "behavior_logprobs": (),
    "versions": (),
    "finish_reason": "",
    "text": "",
    "prompt": "",
    "seeds": (),
    "turns": 0,
    "tool_calls": 0,
    "length": 0,
}


def _describe_row(record: RowRecord, run: str) -> Line:
    row = record.row
    return {
        "run": run,
        "kind": record.kind,
        "step": record.step,
        "index": row.index,
        "row": row.source,
        "epoch": row.epoch,
        "ground_truth": _to_text(row.row.get("ground_truth")),
    }


def _describe_trajectory(record: RowRecord, trajectory: SampledTrajectory, number: int) -> Line:
    metadata = dict(trajectory.metadata)
    if record.row_meta:
        metadata["row_meta"] = record.row_meta
    return {
        "completion": number,
        "outcome": trajectory.fate or record.fate,
        "reason": _clean(trajectory.reason or record.reason),
        "reward": trajectory.reward,
        "started": trajectory.started,
        "sample_s": trajectory.sample_s,
        "score_s": trajectory.score_s,
        "metadata": _to_json(metadata) if metadata else None,
    }


def _describe_sample(sample: RolloutSample, texts: TokenBytes, prompts: dict[bytes, str]) -> Line:
    tokens = np.asarray(sample.tokens, np.int32)
    mask = np.asarray(sample.loss_mask, bool)
    behavior = np.asarray(sample.logprobs, np.float32)
    begins = np.flatnonzero(mask[1:] & ~mask[:-1]) + 1
    prompt = tokens[: sample.prompt_len]
    key = prompt.tobytes()
    if key not in prompts:
        prompts[key] = texts.decode(prompt.tolist())
    written = _write_out(sample, tokens, mask, begins, texts)
    length = int(mask.sum())
    return {
        "tokens": tokens,
        "prompt_len": len(prompt),
        "loss_mask": mask,
        "behavior_logprobs": np.where(mask, behavior, np.float32(np.nan)),
        "versions": _spread_versions(sample, mask),
        "reward_parts": sample.reward_parts,
        "parsed": sample.parsed,
        "finish_reason": sample.finish_reason,
        "text": _clean(written),
        "prompt": prompts[key],
        "seeds": sample.seeds or (),
        "turns": len(begins),
        "tool_calls": _count_calls(written),
        "length": length,
        "mean_logprob": float(behavior[mask].mean()) if length else None,
        "version": max((pair[0] for pair in sample.versions or []), default=None),
    }


def _write_out(
    sample: RolloutSample,
    tokens: NDArray[np.int32],
    mask: NDArray[np.bool_],
    begins: NDArray[np.intp],
    texts: TokenBytes,
) -> str:
    """What the policy wrote: the given text of a single turn, else all turns, a line between."""
    if len(begins) == 1 and sample.text:
        return sample.text
    ends = [*begins[1:], len(tokens)]
    turns = [
        tokens[begin:end][mask[begin:end]].tolist() for begin, end in zip(begins, ends, strict=True)
    ]
    return "\n".join(texts.decode(turn, with_special=False) for turn in turns) or sample.text


def _spread_versions(sample: RolloutSample, mask: NDArray[np.bool_]) -> NDArray[np.int32]:
    versions = np.full(len(mask), -1, np.int32)
    pairs = sample.versions or []
    by_token = np.repeat([pair[0] for pair in pairs], [pair[1] for pair in pairs])
    if len(by_token) == mask.sum():
        versions[mask] = by_token
    return versions


def _describe_training(record: RowRecord, sample: RolloutSample) -> Line:
    trained = record.trained.get(id(sample))
    if trained is None:
        return {}
    mask = np.asarray(sample.loss_mask, bool)
    line: Line = {"outcome": "trained", "reason": None}
    if isinstance(trained.advantage, Sequence):
        line["token_advantages"] = _align(trained.advantage, mask)
    else:
        line["advantage"] = trained.advantage
    for name in ("policy_logprobs", "old_logprobs", "ref_logprobs", "ratios"):
        line[name] = _align(getattr(trained, name), mask)
    clipped = trained.clipped
    if clipped is not None and bool((clipped.numpy() & mask[1:]).any()):
        line["clipped"] = np.concatenate([[False], clipped.numpy() & mask[1:]])
    return line


def _align(values: Any, mask: NDArray[np.bool_]) -> Floats | None:
    """Target-aligned values as one for each token, NaN where nothing was sampled."""
    if values is None:
        return None
    by_token = np.full(len(mask), np.nan, np.float32)
    by_token[1:] = np.asarray(values, np.float32)
    by_token[~mask] = np.nan
    return by_token


def _count_calls(text: str) -> int:
    """Tool calls in the form that deployments read (Hermes' and Qwen's)."""
    return sum(_is_call(body) for body in _CALL.findall(text)) if "<tool_call>" in text else 0


def _is_call(body: str) -> bool:
    try:
        call = json.loads(body)
    except ValueError:
        return False
    return isinstance(call, dict) and isinstance(call.get("name"), str)


def _to_text(value: Any) -> str | None:
    return value if value is None else _clean(value if isinstance(value, str) else _to_json(value))


def _to_json(value: Any) -> str:
    options = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY
    try:
        return orjson.dumps(value, default=str, option=options).decode()
    except TypeError:  # what JSON has no form for, such as an integer of 80 digits
        return json.dumps(str(value))


def _clean(text: str | None) -> str | None:
    """The text without halves of characters, which no file of texts can hold."""
    return text if text is None else text.encode("utf-8", "replace").decode()


def evaluation_records(
    step: int,
    rows: Sequence[Mapping[str, Any]],
    trajectories: Sequence[Sequence[SampledTrajectory]],
) -> Iterator[RowRecord]:
    """The records of an evaluation: all that was sampled for each held-out row."""
    for place, (row, of_row) in enumerate(zip(rows, trajectories, strict=True)):
        where = IndexedRow(place, epoch=0, row=row, source=place)
        yield RowRecord(
            "eval", step, where, of_row or [SampledTrajectory(fate="failed")], "evaluated"
        )
