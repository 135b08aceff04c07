"""The initial policy's logprobs of a run's answers: computed once, and kept in the run's folder."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain

import orjson

from hearth.errors import ConfigError
from hearth.files import CHECKSUM, is_intact, seal, write_file
from training.data.conversations import Conversation
from training.run.continuation import hash_rows
from training.run.supervised import EncodedRows, SupervisedLoop

REFERENCE = "reference.json"
PAIRS_AT_ONCE = 256

Score = Callable[[SupervisedLoop, Sequence[Sequence[Conversation]]], Awaitable[list[list[float]]]]
"""The policy's logprobs of each row's answers."""


@dataclass(frozen=True)
class Reference:
    """Logprobs of whole answers, for each row those of chosen and rejected."""

    rows: list[list[float]]
    eval_rows: list[list[float]]
    eval_sha256: str
    """Of the held-out rows; the others are compared when the run goes on."""


async def read_or_score(loop: SupervisedLoop, encoded: EncodedRows, score: Score) -> Reference:
    """What a run that goes on has kept; else scored now, before the first step, and kept.

    Raises:
        ConfigError: the run goes on, and nothing was kept, or it is damaged or of other rows.
    """
    run = loop.run
    path = run.log_path / REFERENCE
    eval_sha256 = hash_rows(encoded.eval_rows)
    if run.step or run.cursor.count:
        reference = _read(path.read_bytes() if path.exists() else b"", str(path))
        counts = (len(reference.rows), reference.eval_sha256)
        if counts != (len(encoded.rows), eval_sha256):
            raise ConfigError(
                f"rows and eval_rows must be those that {path} was made of, got others: the "
                "policy that they would be compared with is no longer there; give another log_path"
            )
        return reference

    async def score_all(examples: Sequence[Sequence[Conversation]]) -> list[list[float]]:
        starts = range(0, len(examples), PAIRS_AT_ONCE)
        parts = [await score(loop, examples[start : start + PAIRS_AT_ONCE]) for start in starts]
        return list(chain.from_iterable(parts))

    with run.clock.span("perf/ref_forward_time"):
        train, held_out = await score_all(encoded.examples), await score_all(encoded.eval_examples)
    reference = Reference(train, held_out, eval_sha256)
    write_file(path, orjson.dumps(seal(asdict(reference))))
    return reference


def _read(content: bytes, name: str) -> Reference:
    try:
        kept = orjson.loads(content)
        if not is_intact(kept):
            raise ValueError(f"its {CHECKSUM} is that of other content")
        return Reference(**{key: kept[key] for key in kept if key != CHECKSUM})
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{name} must hold the logprobs of the run's reference, got a damaged or missing file "
            f"({error}): put back a copy, or give another log_path"
        ) from None
