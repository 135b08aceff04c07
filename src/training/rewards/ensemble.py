"""Several reward functions as one, with how far they disagree."""

from __future__ import annotations

import inspect
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

from hearth.errors import ConfigError
from training.rewards.score import Score, ScoringReward, as_score
from training.rewards.spread import population_std

Combine = Literal["mean", "median", "minimum"]
PlainReward = Callable[[str, Mapping[str, Any]], float | Score]

_COMBINED: dict[Combine, Callable[[Sequence[float]], float]] = {
    "mean": statistics.fmean,
    "median": statistics.median,
    "minimum": min,
}


class RewardEnsemble(ScoringReward):
    """A reward function made of others: their mean, median or minimum.

    A mean takes noise out, a median outliers, and a minimum trusts no member that alone is pleased
    (arXiv:2310.02743 compares them against reward hacking). Members should be on one scale. Where
    one fails, the whole reward does. Recipes log the members' disagreement, which tells whether a
    reward means anything: ``rollout/reward_disagreement/*``.

    Raises:
        ConfigError: fewer than two members, an async one, or an unknown way to combine.
    """

    def __init__(self, members: Sequence[PlainReward], combine: Combine = "mean") -> None:
        if len(members) < 2:
            raise ConfigError(f"members must be at least 2 reward functions, got {len(members)}")
        if combine not in get_args(Combine):
            raise ConfigError(f"combine must be one of {list(get_args(Combine))}, got {combine!r}")
        for place, member in enumerate(members):
            if inspect.iscoroutinefunction(member):
                raise ConfigError(
                    f"members[{place}] must be a plain function, got an async one: make it "
                    "blocking, and wait for the whole with guarded(ensemble, timeout_s=...)"
                )
        self.members = tuple(members)
        self._names = _name_members(members)
        self.combine: Combine = combine

    def score(self, completion: str, row: Mapping[str, Any]) -> Score:
        """The combined reward and the disagreement: the members' population deviation.

        A deviation and not a range, so that it does not grow with the number of members. It is
        parsed where all members that say so found what they look for.
        """
        scores = [_call_member(member, completion, row) for member in self.members]
        rewards = [score.reward for score in scores]
        found_answers = [score.parsed for score in scores if score.parsed is not None]
        return Score(
            _COMBINED[self.combine](rewards),
            population_std(rewards),
            all(found_answers) if found_answers else None,
            parts=dict(zip(self._names, rewards, strict=True)),
        )


def _name_members(members: Sequence[PlainReward]) -> list[str]:
    """What each member is called; those of one name are numbered."""
    names = [getattr(member, "__name__", type(member).__name__) for member in members]
    return [
        name if names.count(name) == 1 else f"{name}_{place}" for place, name in enumerate(names)
    ]


def _call_member(member: PlainReward, completion: str, row: Mapping[str, Any]) -> Score:
    if isinstance(member, ScoringReward):
        return member.score(completion, row)
    return as_score(member(completion, row))
