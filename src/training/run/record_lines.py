"""From what became of a row to the lines that are written of it, in the columns of hearth.records.

``record_tokens`` has the columns with one value per token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
import pyarrow as pa

from hearth.records.layout import OUTCOMES, Kind
from hearth.records.table import SCHEMA, make_table
from training.data.rows import IndexedRow
from training.run.record_tokens import SampleTokens
from training.run.token_bytes import TokenBytes
from training.samples.groups import PromptGroup, RowOutcome, TrainSample
from training.samples.rollout import RolloutSample
from training.samples.trajectories import WHY_DROPPED, SampledTrajectory, describe_error

Line = dict[str, Any]

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_XML_CALL = re.compile(r"\s*<function=[^>\n]+>")


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
    lines: list[Line] = []
    samples: list[RolloutSample | None] = []
    trained: list[TrainSample | None] = []
    for record in records:
        of_row = _describe_row(record, run)
        for number, trajectory in enumerate(record.sampled_trajectories):
            of_trajectory = _describe_trajectory(record, trajectory, number)
            for segment, sample in enumerate(trajectory.segments or (None,)):
                lines.append(of_row | of_trajectory | {"segment": segment})
                samples.append(sample)
                trained.append(record.trained.get(id(sample)))
    tokens = SampleTokens(samples)
    prompts: dict[bytes, str] = {}
    for number, (line, sample) in enumerate(zip(lines, samples, strict=True)):
        line |= _NOTHING if sample is None else _describe_sample(sample, texts, prompts)
        if sample is not None:
            written = _write_out(sample, tokens, number, texts)
            line |= {"text": _clean(written), "tool_calls": _count_calls(written)}
        line |= _describe_training(trained[number])
    columns = {name: [line.get(name) for line in lines] for name in SCHEMA.names}
    return make_table(columns | tokens.columns(trained))


_NOTHING: Line = {
    "prompt_len": 0,
    "finish_reason": "",
    "text": "",
    "prompt": "",
    "seeds": (),
    "tool_calls": 0,
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
    prompt = sample.arrays.tokens[: sample.prompt_len]
    key = prompt.tobytes()
    if key not in prompts:
        prompts[key] = texts.decode(prompt.tolist())
    return {
        "prompt_len": len(prompt),
        "reward_parts": sample.reward_parts,
        "parsed": sample.parsed,
        "finish_reason": sample.finish_reason,
        "prompt": prompts[key],
        "seeds": sample.seeds or (),
        "version": max((pair[0] for pair in sample.versions or []), default=None),
    }


def _write_out(sample: RolloutSample, tokens: SampleTokens, number: int, texts: TokenBytes) -> str:
    """What the policy wrote: the given text of a single turn, else all turns, a line between."""
    if tokens.turns[number] == 1 and sample.text:
        return sample.text
    turns = (texts.decode(turn, with_special=False) for turn in tokens.turns_of(number))
    return "\n".join(turns) or sample.text


def _describe_training(trained: TrainSample | None) -> Line:
    if trained is None:
        return {}
    line: Line = {"outcome": "trained", "reason": None}
    if not isinstance(trained.advantage, Sequence):
        line["advantage"] = trained.advantage
    return line


def _count_calls(text: str) -> int:
    """Tool calls in the forms of Hermes and Qwen, which stand between tags."""
    return sum(_is_call(body) for body in _CALL.findall(text)) if "<tool_call>" in text else 0


def _is_call(body: str) -> bool:
    if _XML_CALL.match(body):
        return True
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
