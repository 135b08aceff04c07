"""One sample, token by token: exact texts, values by token, and its conversation in parts."""

from __future__ import annotations

import base64
import bisect
import itertools
import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hearth.errors import NotFoundError
from hearth.records.layout import SAMPLES, VOCABULARY, SampleId
from hearth.records.reading import Vocabulary, read_sample, read_vocabulary
from hearth.records.table import ENTROPIES, SCALAR_COLUMNS
from hearth.viewer.lines import keep_exact
from hearth.viewer.run import RecordedRun, is_inside, stamp

_KEPT_VOCABULARIES = 2
VALUES = {
    "behavior": "behavior_logprobs",
    "policy": "policy_logprobs",
    "old": "old_logprobs",
    "ref": "ref_logprobs",
    "ratio": "ratios",
    "advantage": "token_advantages",
    "clipped": "clipped",
    "version": "versions",
    "entropy": ENTROPIES,
}
"""Values by token, each with its column."""
_SETTINGS = (
    "temperature",
    "top_p",
    "top_k",
    "max_completion_tokens",
    "max_seq_len",
    "eval_temperature",
    "seed",
)

_ROLE = re.compile(
    r"<\|im_start\|>(?P<chatml>[\w-]{1,40})\n"
    r"|<\|start_header_id\|>(?P<llama>[\w-]{1,40})<\|end_header_id\|>\n\n"
    r"|<start_of_turn>(?P<gemma>[\w-]{1,40})\n"
    r"|<\|start\|>(?P<harmony>[\w.-]{1,40})"
    r"|<\|(?P<phi>system|user|assistant|tool|observation)\|>\n?"
    r"|<[|\uff5c](?P<deepseek>User|Assistant)[|\uff5c]>"
    r"|(?P<instruct>\[/?INST\])"
)
"""Marks of widely used templates at which a message begins."""
_TOOL_CALL = re.compile(
    r"<tool_call>|<function=|<\|python_tag\|>|\[TOOL_CALLS\]|<\|tool_calls?_|<function_call>"
    r"|to=functions\."
)


class TokenReader:
    """Reads single samples; keeps the vocabularies of the runs looked at last. Any thread may call
    it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._vocabularies: dict[tuple[Path, Any], Vocabulary] = {}

    def read(self, run: RecordedRun, sample: SampleId) -> dict[str, Any]:
        """A sample as the API gives it, but for its neighbors and whether it can be sampled again.

        Raises:
            NotFoundError: it is not on record.
        """
        record = self.read_record(run, sample)
        vocabulary = self.vocabulary(run)
        ids = record["tokens"]
        mask = record["loss_mask"]
        mask = np.zeros(len(ids), bool) if mask is None else mask
        texts, encoded, pieces = _spell(vocabulary, ids)
        special = [
            place for place, number in enumerate(ids.tolist()) if number in vocabulary.special
        ]
        facts = {name: keep_exact(record.get(name)) for name in SCALAR_COLUMNS if name != "tokens"}
        return {
            "id": str(sample),
            **facts,
            "version": newest_version(record),
            "tokens": {"ids": ids, "texts": texts, "bytes": encoded, "special": special},
            "mask": mask,
            "values": _values(record),
            "parts": find_parts(pieces, mask.tolist(), special),
            "settings": {name: run.config()[name] for name in _SETTINGS if name in run.config()},
        }

    def read_record(self, run: RecordedRun, sample: SampleId) -> dict[str, Any]:
        """A sample with all columns, those by token as numpy arrays.

        Raises:
            NotFoundError: it is not on record.
        """
        for file in run.files():
            if file.kind == sample.kind and file.first <= sample.step <= file.last:
                break
        else:
            raise NotFoundError(f"sample {sample} must be on record, got no file of its step")
        try:
            record = read_sample(run.folder, sample)
        except (OSError, ValueError, KeyError) as error:  # pyarrow's errors are of these
            raise NotFoundError(
                f"sample {sample} must be in a whole file, got {str(error)[:200]}"
            ) from None
        if record.get("tokens") is None:
            raise NotFoundError(f"sample {sample} must have tokens, got none")
        return record

    def vocabulary(self, run: RecordedRun) -> Vocabulary:
        """What the run's tokens stand for; tokens of a run without a vocabulary have no text."""
        path = run.folder / SAMPLES / VOCABULARY
        if not is_inside(run.folder, path):
            return Vocabulary({}, frozenset())
        key = (path, stamp(path))
        with self._lock:
            known = self._vocabularies.pop(key, None)
            if known is None:
                try:
                    known = read_vocabulary(run.folder)
                except (NotFoundError, OSError, ValueError, KeyError):
                    known = Vocabulary({}, frozenset())
            self._vocabularies[key] = known
            while len(self._vocabularies) > _KEPT_VOCABULARIES:
                del self._vocabularies[next(iter(self._vocabularies))]
        return known


def newest_version(record: Mapping[str, Any]) -> int | None:
    """The newest weight version among the sampled tokens."""
    versions = record.get("versions")
    if versions is None or len(versions) == 0 or versions.max() < 0:
        return None
    return int(versions.max())


def find_parts(
    pieces: Sequence[bytes], mask: Sequence[bool], special: Sequence[int]
) -> list[dict[str, Any]]:
    """The conversation as the template rendered it, cut where roles and the mask change.

    A mark of a role that the policy wrote as plain text begins no message.
    """
    offsets = _offsets(pieces)
    content = b"".join(pieces)
    # One character a byte, so that places in the text are places in the bytes.
    text = content.decode("latin-1")
    pattern = _ROLE
    marks = set(special)
    starts: dict[int, str] = {}
    for match in pattern.finditer(text.replace("\xef\xbd\x9c", "|||")):
        place = bisect.bisect_right(offsets, match.start()) - 1
        is_mark = place in marks if marks else not mask[place]
        if is_mark and offsets[place] == match.start():
            starts[place] = _name_role(match)
    cuts = sorted({0, *starts, *_mask_changes(mask)})
    parts: list[dict[str, Any]] = []
    role = "text"
    for start, end in zip(cuts, [*cuts[1:], len(pieces)], strict=True):
        role = starts.get(start, role)
        if start == end:
            continue
        words = content[offsets[start] : offsets[end]].decode(errors="replace")
        parts.append(
            {
                "role": role,
                "start": start,
                "end": end,
                "sampled": bool(mask[start]),
                "text": words,
                "tool_call": bool(mask[start]) and _TOOL_CALL.search(words) is not None,
            }
        )
    return parts


def _name_role(match: re.Match[str]) -> str:
    name = next(group for group in match.groups() if group)
    return {"[INST]": "user", "[/INST]": "assistant", "model": "assistant"}.get(name, name.lower())


def _mask_changes(mask: Sequence[bool]) -> list[int]:
    return (np.flatnonzero(np.diff(np.asarray(mask, bool))) + 1).tolist()


def _offsets(pieces: Sequence[bytes]) -> list[int]:
    return list(itertools.accumulate(map(len, pieces), initial=0))


def _spell(
    vocabulary: Vocabulary, ids: np.ndarray
) -> tuple[list[str | None], list[str | None], list[bytes]]:
    """Text of each token, its bytes where these alone are no text, and all bytes."""
    numbers = ids.tolist()
    distinct = list(dict.fromkeys(numbers))
    pieces = dict(zip(distinct, vocabulary.to_bytes(distinct), strict=True))
    texts = dict(zip(distinct, vocabulary.to_texts(distinct), strict=True))
    encoded = {
        number: base64.b64encode(pieces[number]).decode() if texts[number] is None else None
        for number in distinct
    }
    return (
        [texts[number] for number in numbers],
        [encoded[number] for number in numbers],
        [pieces[number] for number in numbers],
    )


def _values(record: Mapping[str, Any]) -> dict[str, Any]:
    values = {
        name: record[column] for name, column in VALUES.items() if record.get(column) is not None
    }
    if "policy" in values and "behavior" in values:
        values["gap"] = values["policy"] - values["behavior"]
    return {name: _finite(array) for name, array in values.items()}


def _finite(array: np.ndarray) -> np.ndarray:
    if array.dtype.kind != "f":
        return np.ascontiguousarray(array)
    return np.where(np.isfinite(array), array, np.nan).astype(array.dtype)
