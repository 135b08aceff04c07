"""Turn-level credit from information gain: the arithmetic of IGPO (arXiv:2510.14967).

A turn is worth what it adds to the policy's belief in the right answer; the last turn, which
answers, is worth what it earned. Plain lists, float64; who scores the answer, and which tokens a
turn has, is ``information_gain``'s.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from hearth.errors import ConfigError
from training.config.turn_credit import Form, Normalization
from training.samples.advantages import group_advantages

GAIN_FLOOR = 1e-4
"""Spread of gains, in nats or as a probability, below which they count as equal: trainer and
sampler agree on a logprob to no more than that, and a division by noise would reward it."""
OUTCOME_FLOOR = 1e-8
"""Spread of outcomes below which they count as equal."""


@dataclass(frozen=True)
class TurnCredit:
    """What the turns of a group's trajectories are worth. The outer lists are parallel to them."""

    gains: list[list[float]]
    """Information gain of each turn; where gains are ``separate``, of each but the last."""
    advantages: list[list[float]]
    """Advantage of each turn, which its tokens share."""
    baseline: float | None
    """Mean logprob of the right answer's tokens after the prompt alone; None where too long."""
    unscored: int = 0
    """Gains that count as 0 because what stood before was too long to be scored."""
    scored_from_s: float = 0.0
    """When scoring began, by ``time.perf_counter``."""
    scored_until_s: float = 0.0
    """When it ended."""


def belief(mean_logprob: float, form: Form) -> float:
    """How much the policy believes in an answer whose tokens have this mean logprob.

    ``logprob`` takes it as it is, ``probability`` its exponential: the geometric mean of the
    tokens' probabilities, which is the paper's and official default.
    """
    return mean_logprob if form == "logprob" else math.exp(mean_logprob)


def information_gains(beliefs: Sequence[float | None]) -> list[float]:
    """What each turn adds: ``beliefs`` are those before the first turn and after each one.

    None is a belief that could not be had. The turn that leads to it gains 0, and the next one
    starts from the last that is known.
    """
    gains: list[float] = []
    known = beliefs[0] if beliefs else None
    for belief in beliefs[1:]:
        gains.append(0.0 if belief is None or known is None else belief - known)
        known = known if belief is None else belief
    return gains


def turn_advantages(
    gains: Sequence[Sequence[float]],
    outcomes: Sequence[float],
    *,
    ig_weight: float = 1.0,
    gamma: float = 0.99,
    normalization: Normalization = "separate",
) -> list[list[float]]:
    """The advantage of each turn of a group's trajectories.

    ``gains`` has a number per turn, ``outcomes`` one per trajectory. Both are normalized with the
    population std over the group, ``ig_weight`` times the gain and the outcome are added where a
    turn has both, and each turn gets the sum from itself on, discounted by ``gamma`` per turn.

    ``separate`` compares outcomes among the trajectories and gains among all turns but the last of
    each, whose gain counts for nothing: it has the outcome alone. ``pooled`` is the cookbook's:
    the last turn's gain counts too, and outcomes are compared among all turns, with a 0 for each
    turn that is not the last, so that even equal outcomes are spread.

    Weights act after the normalization, which would undo them. ``ig_weight=0`` switches turn-level
    credit off: every turn has its trajectory's ``group_advantages``, undiscounted.

    Raises:
        ConfigError: fewer than two trajectories, one without a turn, lists that are not parallel, a
            number that is not finite, or an unknown ``normalization``.
    """
    _check(gains, outcomes, normalization)
    if ig_weight == 0:
        plain = group_advantages(outcomes)
        return [[advantage] * len(turns) for advantage, turns in zip(plain, gains, strict=True)]
    if normalization == "separate":
        gained, earned = _separate(gains, outcomes)
    else:
        gained, earned = _pool(gains, outcomes)
    return [
        discount([ig_weight * gain + outcome for gain, outcome in zip(*turns, strict=True)], gamma)
        for turns in zip(gained, earned, strict=True)
    ]


def discount(rewards: Sequence[float], gamma: float) -> list[float]:
    """The sum of rewards from each turn on, a later one ``gamma`` times as much per turn."""
    total = 0.0
    returns: list[float] = []
    for reward in reversed(rewards):
        total = reward + gamma * total
        returns.append(total)
    return returns[::-1]


def standardize(values: Sequence[float], floor: float) -> list[float]:
    """``(value - mean) / population std``; all 0 below two values or below a std of ``floor``."""
    if len(values) < 2:
        return [0.0] * len(values)
    mean = math.fsum(values) / len(values)
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
    if spread < floor:
        return [0.0] * len(values)
    return [(value - mean) / spread for value in values]


def turn_spans(loss_mask: Sequence[int]) -> list[tuple[int, int]]:
    """The turns of a sample, ``[start, end)`` in its tokens: stretches where the mask is 1."""
    edges = [0, *loss_mask, 0]
    starts = [place for place in range(len(loss_mask)) if edges[place : place + 2] == [0, 1]]
    ends = [place + 1 for place in range(len(loss_mask)) if edges[place + 1 : place + 3] == [1, 0]]
    return list(zip(starts, ends, strict=True))


def target_rows(loss_mask: Sequence[int], per_turn: Sequence[float]) -> list[float]:
    """One value per turn of a sample as N - 1 target-aligned rows for its N tokens; 0 elsewhere."""
    rows = [0.0] * (len(loss_mask) - 1)
    for (start, end), value in zip(turn_spans(loss_mask), per_turn, strict=True):
        rows[start - 1 : end - 1] = [value] * (end - start)
    return rows


def _separate(
    gains: Sequence[Sequence[float]], outcomes: Sequence[float]
) -> tuple[list[list[float]], list[list[float]]]:
    inner = _in_shape(
        standardize([turn for turns in gains for turn in turns[:-1]], GAIN_FLOOR),
        [turns[:-1] for turns in gains],
    )
    earned = standardize(outcomes, OUTCOME_FLOOR)
    return (
        [[*turns, 0.0] for turns in inner],
        [[0.0] * (len(turns) - 1) + [reward] for turns, reward in zip(gains, earned, strict=True)],
    )


def _pool(
    gains: Sequence[Sequence[float]], outcomes: Sequence[float]
) -> tuple[list[list[float]], list[list[float]]]:
    earned = [
        [0.0] * (len(turns) - 1) + [outcome] for turns, outcome in zip(gains, outcomes, strict=True)
    ]
    return (
        _in_shape(standardize([turn for turns in gains for turn in turns], GAIN_FLOOR), gains),
        _in_shape(standardize([turn for turns in earned for turn in turns], OUTCOME_FLOOR), gains),
    )


def _in_shape(flat: Sequence[float], shape: Sequence[Sequence[float]]) -> list[list[float]]:
    values = iter(flat)
    return [[next(values) for _ in turns] for turns in shape]


def _check(gains: Sequence[Sequence[float]], outcomes: Sequence[float], normalization: str) -> None:
    if normalization not in get_args(Normalization):
        raise ConfigError(
            f"normalization must be one of {list(get_args(Normalization))}, got {normalization!r}"
        )
    if len(outcomes) < 2 or len(gains) != len(outcomes):
        raise ConfigError(
            f"outcomes must hold at least 2 values and gains a list for each, got {len(outcomes)} "
            f"and {len(gains)}: advantages compare the trajectories of one row"
        )
    for number, (turns, outcome) in enumerate(zip(gains, outcomes, strict=True)):
        if not turns:
            raise ConfigError(f"gains[{number}] must have a number per turn, got []")
        if not all(map(math.isfinite, (*turns, outcome))):
            raise ConfigError(
                f"gains[{number}] and its outcome must be finite, got {[*turns]} and {outcome}"
            )
