"""One row on its way to a group: its completions, and what each of them earned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress

from hearth.sdk import SampledCompletion
from training.config.single_turn import SingleTurnConfig
from training.data.rows import IndexedRow
from training.rewards import AnyReward, Score, Unscored, disagreements, scored
from training.samples.advantages import usable_group
from training.samples.groups import (
    ExampleAnswer,
    PromptGroup,
    RowOutcome,
    TrainSample,
    completion_sample,
)
from training.samples.rollout import RolloutSample
from training.samples.trajectories import SampledTrajectory, describe_error


@dataclass(frozen=True)
class SampledRow:
    """The completions of a row, or the reason why there are none."""

    row: IndexedRow
    completions: Sequence[SampledCompletion] = ()
    dropped: str | None = None
    error: Exception | None = None


@dataclass(frozen=True)
class ScoredRow:
    """A sampled row with its rewards. ``samples`` are the completions that have a reward."""

    sampled: SampledRow
    samples: Sequence[RolloutSample] = ()
    scores: Sequence[Score | Unscored] = ()
    sampled_trajectories: Sequence[SampledTrajectory] = ()
    """All completions, those without a reward too."""
    least: int = 2
    """Fewest samples of a group."""

    @property
    def rewards(self) -> list[float]:
        """The reward of each sample."""
        return [sample.reward for sample in self.samples]

    @property
    def trajectories(self) -> list[list[RolloutSample]]:
        """Each sample as a trajectory of its own."""
        return [[sample] for sample in self.samples]

    @property
    def dropped(self) -> str | None:
        """Why no group can be made of it; None where one can."""
        if self.sampled.dropped is not None:
            return self.sampled.dropped
        reason = usable_group(self.rewards, self.least)
        return "failed" if reason == "too_few" and self._errors else reason

    def drop(self, reason: str) -> RowOutcome:
        """The outcome of a row that is not trained."""
        return self._outcome(None, reason)

    def keep(self, advantages: list[float], samples: list[list[TrainSample]]) -> RowOutcome:
        """The outcome of a row whose completions are trained."""
        return self._outcome(PromptGroup(self.sampled.row, self.rewards, advantages, samples), None)

    @property
    def _errors(self) -> list[Exception]:
        return [score.error for score in self.scores if isinstance(score, Unscored)]

    def _outcome(self, group: PromptGroup | None, reason: str | None) -> RowOutcome:
        completions = self.sampled.completions
        error = self.sampled.error
        if reason == "failed" and self._errors:
            error = self._errors[-1]
        return RowOutcome(
            self.sampled.row,
            group=group,
            dropped=reason,
            completions=len(completions),
            truncated=sum(completion.finish_reason == "length" for completion in completions),
            rewards=self.rewards,
            error=error,
            failed_rewards=len(self._errors),
            disagreements=disagreements(self.scores),
            example=self._example() if completions else None,
            parsed=[sample.parsed for sample in self.samples if sample.parsed is not None],
            sampled_trajectories=self.sampled_trajectories
            or [SampledTrajectory(reason=describe_error(error) if error else reason)],
        )

    def _example(self) -> ExampleAnswer:
        """A completion with a reward, and without an answer if there is one; else the first."""
        if not self.samples:
            first = self.sampled.completions[0]
            tokens = first.full_tokens[first.prompt_len :]
            return ExampleAnswer(first.text, tokens, None, first.finish_reason)
        sample = min(self.samples, key=lambda sample: sample.parsed is not False)
        tokens = sample.tokens[sample.prompt_len :]
        return ExampleAnswer(
            sample.text, tokens, sample.reward, sample.finish_reason, sample.parsed
        )


async def score_row(
    config: SingleTurnConfig, sampled: SampledRow, reward_fn: AnyReward
) -> ScoredRow:
    """The rewards of a row's completions; one whose reward failed is left out, as is a truncated
    one with ``truncated_completions="drop"``.

    Raises:
        Exception: what a reward function without a guard raised.
    """
    if sampled.dropped is not None:
        return ScoredRow(sampled)
    completions = sampled.completions
    is_scored = [
        completion.finish_reason != "length" or config.truncated_completions == "score"
        for completion in completions
    ]
    texts = [completion.text for completion in compress(completions, is_scored)]
    where = f"rows[{sampled.row.source}]"
    scores = await scored(reward_fn, texts, sampled.row.row, where)
    given = iter(scores)
    trajectories = [
        trajectory_of_completion(completion, next(given) if has_score else None)
        for completion, has_score in zip(completions, is_scored, strict=True)
    ]
    samples = [part.segments[0] for part in trajectories if part.reward is not None]
    return ScoredRow(sampled, samples, scores, trajectories, config.least_completions)


def trajectory_of_completion(
    completion: SampledCompletion, score: Score | Unscored | None
) -> SampledTrajectory:
    """A completion of one turn with what it earned; None left it out as truncated.

    Raises:
        ConfigError: the deployment sent no logprobs, or not one per sampled token.
    """
    timed = partial(
        SampledTrajectory,
        started=completion.started,
        sample_s=completion.sample_s,
        score_s=None if score is None else score.seconds,
    )
    if isinstance(score, Score):
        sample = completion_sample(completion, score.reward, parsed=score.parsed, parts=score.parts)
        return timed([sample], reward=score.reward)
    sample = completion_sample(completion, math.nan)
    if score is None:
        return timed([sample], fate="truncated", reason="cut at max_completion_tokens")
    return timed([sample], fate="failed", reason=describe_error(score.error))
