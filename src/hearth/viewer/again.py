"""Samples a recorded sample again: bit for bit from its seed and weights, or with other seeds.

    python -m hearth.viewer.again RUN_FOLDER train.12.40.3.0 --count 4

prints one JSON object, ``{"text", "answers": [{"text", "tokens", "equal", "seed"}]}``. Where it
cannot be had, stderr says why in one sentence, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hearth.errors import HearthError, NotFoundError
from hearth.records.layout import SampleId
from hearth.records.reading import read_sample
from hearth.sdk.sampling import completion_seed
from hearth.viewer.weights import SampledTurn, WeightsPlace, find_weights, read_config, take_turn

if TYPE_CHECKING:  # torch, which `--help` and a refusal are spared
    from hearth.inference.engine.engine import InferenceEngine
    from hearth.sync.snapshot import Snapshot

MOST_ANSWERS = 256


@dataclass(frozen=True)
class Answer:
    """One answer; ``equal`` says whether its tokens are those on record, of another seed None."""

    text: str
    tokens: list[int]
    equal: bool | None
    seed: int


@dataclass(frozen=True)
class Answers:
    """What was sampled again, and from what, in words."""

    text: str
    answers: list[Answer]


def ask_again(
    log_path: Path,
    sample: SampleId,
    *,
    count: int = 1,
    seed: int | None = None,
    others: bool = False,
    turn: int = 0,
) -> Answers:
    """Sample a turn of a sample again, on the CPU, in the number format of the run.

    Without ``seed`` the first answer has the recorded one, and must be equal on the machine of the
    run; all further answers have seeds that follow from it. With ``seed`` they follow from that,
    and with ``others`` from the recorded one, which is left out.

    Raises:
        NotFoundError: the sample, its seed or its weights are not there; the message says why.
        ConfigError: the model cannot be loaded, or ``count`` breaks its rule.
    """
    if not 1 <= count <= MOST_ANSWERS:
        raise NotFoundError(f"count must be 1 to {MOST_ANSWERS}, got {count}")
    record = read_sample(log_path, sample)
    asked = take_turn(record, turn)
    place = find_weights(log_path, record, turn)
    if seed is None and asked.seed is None:
        raise NotFoundError("the seed of the sample is not on record: give another one (--seed)")
    start = asked.seed if seed is None else seed
    assert start is not None, "one of the two is given"
    seeds = [completion_seed(start, number) for number in range(count)]
    if seed is None and not others:
        seeds = [start, *seeds[: count - 1]]
    answers = _sample(log_path, place, asked, seeds)
    return Answers(_describe(place, answers), answers)


def _sample(
    log_path: Path, place: WeightsPlace, asked: SampledTurn, seeds: Sequence[int]
) -> list[Answer]:
    from hearth.inference.backend import SampleRequest

    config = read_config(log_path)
    longest = min(config["max_completion_tokens"], config["max_seq_len"] - len(asked.prompt))
    engine = _start_engine(config, place)
    try:
        futures = [
            engine.submit(
                SampleRequest(
                    prompt=asked.prompt,
                    # The recorded one may have ended by what only its rollout knew, as a stop text.
                    max_tokens=len(asked.tokens) if seed == asked.seed else max(1, longest),
                    temperature=config["temperature"],
                    seed=seed,
                )
            )
            for seed in seeds
        ]
        sequences = [future.result() for future in futures]
    finally:
        engine.close()
    return [
        Answer(
            sequence.text,
            sequence.token_ids,
            sequence.token_ids == asked.tokens if seed == asked.seed else None,
            seed,
        )
        for seed, sequence in zip(seeds, sequences, strict=True)
    ]


def _start_engine(config: dict[str, Any], place: WeightsPlace) -> InferenceEngine:
    """An engine that serves the weights of ``place``."""
    from hearth.inference.engine.engine import InferenceEngine
    from hearth.inference.engine.options import EngineOptions
    from hearth.local import resolve_model
    from hearth.models.loading import load_model, load_tokenizer

    deployment = config["deployment"]
    trust = bool(deployment.get("trust_remote_code"))
    base = resolve_model(config["base_model"])
    loaded = load_model(
        place.folder if place.kind == "model" and place.folder else base,
        name=config["base_model"],
        dtype=config["trainer"]["dtype"] or "float32",
        trust_remote_code=trust,
    )
    tokenizer = load_tokenizer(deployment["tokenizer_model"] or base, trust_remote_code=trust)
    options = EngineOptions(
        max_seq_len=config["max_seq_len"], max_slots=deployment["max_batch_size"]
    )
    engine = InferenceEngine(loaded, tokenizer=tokenizer, options=options)
    try:
        if place.kind in ("snapshot", "checkpoint"):
            engine.load_snapshot(_read_snapshot(place)).result()
    except BaseException:
        engine.close()
        raise
    return engine


def _read_snapshot(place: WeightsPlace) -> Snapshot:
    from hearth.sync.chain import resolve
    from hearth.sync.snapshot import Snapshot
    from hearth.sync.store import FolderSnapshotStore
    from hearth.trainer.checkpoint import CheckpointFolder

    assert place.folder is not None, "only the base model has none"
    if place.kind == "snapshot":
        return resolve(FolderSnapshotStore(place.folder.parent), place.folder.name)
    checkpoints = CheckpointFolder(place.folder.parent)
    facts = checkpoints.facts(place.folder.name)
    state = checkpoints.read(place.folder.name, base_model=facts.base_model, lora=facts.lora)
    return Snapshot(
        place.folder.name,
        "lora" if facts.lora else "base",
        facts.base_model,
        state.weights,
        facts.lora.as_metadata() if facts.lora else {},
    )


def _describe(place: WeightsPlace, answers: Sequence[Answer]) -> str:
    where = "the base model" if place.folder is None else f"{place.kind} {place.folder.name}"
    text = f"weight version {place.version} (step {place.step}), from {where}"
    if any(answer.equal is False for answer in answers):
        text += (
            "; the tokens differ from those on record, as they may where the run had another "
            "device, library or number of threads"
        )
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the answers as JSON; returns the exit code."""
    parser = argparse.ArgumentParser(
        "python -m hearth.viewer.again", description="Sample a recorded sample again."
    )
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("sample", help="KIND.STEP.INDEX.COMPLETION.SEGMENT")
    parser.add_argument("--count", type=int, default=1, help="answers")
    parser.add_argument("--seed", type=int, help="another seed; without it the first is the same")
    parser.add_argument("--others", action="store_true", help="leave out the recorded seed's")
    parser.add_argument("--turn", type=int, default=0, help="which sampled turn, from 0")
    given = parser.parse_args(arguments)
    try:
        answers = ask_again(
            given.run,
            SampleId.parse(given.sample),
            count=given.count,
            seed=given.seed,
            others=given.others,
            turn=given.turn,
        )
    except HearthError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(json.dumps(asdict(answers)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
