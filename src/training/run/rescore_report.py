"""How the rewards of two functions differ on the same samples."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np

from hearth.records.layout import SampleId
from training.samples.advantages import is_uniform

MOST_LISTED = 10
_SHORT = 72
"""Characters of a text that are shown."""


@dataclass(frozen=True)
class Pair:
    """A sample with its reward of the run, and the new one or its error."""

    sample: Mapping[str, Any]
    reward: float | None
    error: str | None = None

    @property
    def identity(self) -> SampleId:
        """The sample's id."""
        names = ("kind", "step", "index", "completion", "segment")
        return SampleId(*(self.sample[name] for name in names))

    @property
    def before(self) -> float | None:
        """The reward of the run."""
        return self.sample["reward"]


@dataclass(frozen=True)
class Part:
    """Mean rewards of a part of the run."""

    name: str
    count: int
    before: float
    after: float


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What ``hearth rescore`` prints. Samples that lack a reward are in no mean."""

    samples: int
    compared: int
    errors: int
    first_error: str | None
    parts: list[Part] = field(default_factory=list)
    """Four quarters of the training steps, and the held-out answers."""
    groups: int
    best_changed: int
    """Groups in which no answer that was best still is."""
    became_uniform: int
    stopped_uniform: int
    correlation: float | None
    """Pearson's; None where one of the two is the same everywhere."""
    differ_most: list[Pair] = field(default_factory=list)


def compare(pairs: Sequence[Pair]) -> Comparison:
    """The comparison of all samples of a run."""
    both = [
        pair
        for pair in pairs
        if pair.before is not None
        and pair.reward is not None
        and math.isfinite(pair.before)
        and math.isfinite(pair.reward)
    ]
    errors = [pair.error for pair in pairs if pair.error is not None]
    groups = list(_list_groups(both))
    uniform = [
        (is_uniform(list(before.values())), is_uniform(list(after.values())))
        for before, after in groups
    ]
    changed = sorted(both, key=_difference, reverse=True)[:MOST_LISTED]
    return Comparison(
        samples=len(pairs),
        compared=len(both),
        errors=len(errors),
        first_error=errors[0] if errors else None,
        parts=list(_list_parts(both)),
        groups=len(groups),
        best_changed=sum(not (_best(before) & _best(after)) for before, after in groups),
        became_uniform=sum(not was and now for was, now in uniform),
        stopped_uniform=sum(was and not now for was, now in uniform),
        correlation=_correlate(both),
        differ_most=[pair for pair in changed if _difference(pair) > 0],
    )


def describe(comparison: Comparison) -> Iterator[str]:
    """The comparison in lines for a terminal."""
    yield f"{comparison.compared} of {comparison.samples} samples have both rewards"
    if comparison.errors:
        yield f"{comparison.errors} calls failed, the first with {_clean(comparison.first_error)}"
    yield f"{'mean reward':<22}{'samples':>9}{'before':>10}{'after':>10}"
    for part in comparison.parts:
        yield f"{part.name:<22}{part.count:>9}{part.before:>10.4f}{part.after:>10.4f}"
    if comparison.groups:
        share = comparison.best_changed / comparison.groups
        yield (
            f"the best answer changes in {comparison.best_changed} of {comparison.groups} groups "
            f"({share:.1%}); {comparison.became_uniform} become uniform, "
            f"{comparison.stopped_uniform} stop being so"
        )
    known = comparison.correlation
    yield "correlation " + ("unknown: one is constant" if known is None else f"{known:.4f}")
    if comparison.differ_most:
        yield "samples that differ most:"
    for pair in comparison.differ_most:
        yield (
            f"  {pair.identity!s:<22}{pair.before:>9.3f} ->{pair.reward:>9.3f}  "
            f"{_clean(pair.sample['text'])}"
        )


def _difference(pair: Pair) -> float:
    assert pair.before is not None
    assert pair.reward is not None
    return abs(pair.reward - pair.before)


def _list_parts(pairs: Sequence[Pair]) -> Iterator[Part]:
    train = [pair for pair in pairs if pair.sample["kind"] == "train"]
    steps = [pair.sample["step"] for pair in train]
    if steps:
        first, count = min(steps), max(steps) - min(steps) + 1
        for quarter in range(min(4, count)):
            low = first + quarter * count // min(4, count)
            high = first + (quarter + 1) * count // min(4, count)
            chosen = [pair for pair in train if low <= pair.sample["step"] < high]
            name = f"step {low}" if high - low == 1 else f"steps {low} to {high - 1}"
            yield from _make_part(name, chosen)
    yield from _make_part("held-out", [pair for pair in pairs if pair.sample["kind"] == "eval"])


def _make_part(name: str, pairs: Sequence[Pair]) -> Iterator[Part]:
    if pairs:
        before, after = _values(pairs)
        yield Part(name, len(pairs), float(before.mean()), float(after.mean()))


def _values(pairs: Sequence[Pair]) -> tuple[np.ndarray, np.ndarray]:
    before = np.array([pair.before for pair in pairs], np.float64)
    return before, np.array([pair.reward for pair in pairs], np.float64)


def _list_groups(pairs: Sequence[Pair]) -> Iterator[tuple[dict[int, float], dict[int, float]]]:
    """Both rewards of each group of two answers or more, by completion."""

    def place(pair: Pair) -> tuple[str, int, int]:
        return pair.identity.kind, pair.identity.step, pair.identity.index

    for _, found in groupby(sorted(pairs, key=place), key=place):
        group = list(found)
        before = {pair.identity.completion: pair.before or 0.0 for pair in group}
        after = {pair.identity.completion: pair.reward or 0.0 for pair in group}
        if len(before) > 1:
            yield before, after


def _best(rewards: Mapping[int, float]) -> set[int]:
    most = max(rewards.values())
    return {completion for completion, reward in rewards.items() if reward == most}


def _correlate(pairs: Sequence[Pair]) -> float | None:
    if len(pairs) < 2:
        return None
    before, after = _values(pairs)
    if np.ptp(before) == 0 or np.ptp(after) == 0:
        return None
    return float(np.corrcoef(before, after)[0, 1])


def _clean(text: object) -> str:
    """A text in one short line, without what a terminal would act on."""
    line = " ".join(str(text).split())
    shown = "".join(
        character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in line
    )
    return shown if len(shown) <= _SHORT else shown[: _SHORT - 1] + "…"
