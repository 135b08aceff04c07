"""Groups of samples: what one row's draws become before they are trained."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import tinker

from hearth.sdk import SampledCompletion
from training.utils.rl.advantages import group_advantages
from training.utils.rl.datums import align_behavior_logprobs, datum_from_tokens_weights
from training.utils.rl.rollout import RolloutSample
from training.utils.rows import IndexedRow


@dataclass
class TrainSample:
    """One token sequence on its way through the losses.

    Logprobs are target-aligned rows of N - 1 values for N tokens. ``old_logprobs`` None stands for
    the policy's own.
    """

    datum: tinker.Datum
    advantage: float
    behavior_logprobs: Sequence[float]
    drawn: RolloutSample
    old_logprobs: Sequence[float] | None = None
    ref_logprobs: Sequence[float] | None = None

    @classmethod
    def of(cls, drawn: RolloutSample, advantage: float) -> TrainSample:
        """A sample's datum, and the sampler's logprobs where it drew."""
        rows = zip(drawn.logprobs[1:], drawn.loss_mask[1:], strict=True)
        return cls(
            datum=datum_from_tokens_weights(drawn.tokens, drawn.loss_mask),
            advantage=advantage,
            behavior_logprobs=[value if live else 0.0 for value, live in rows],
            drawn=drawn,
        )


@dataclass(frozen=True)
class PromptGroup:
    """The scored trajectories of one row. Lists are parallel.

    ``samples`` are those of one trajectory each: mostly one, several where its turns do not extend
    each other token by token.
    """

    row: IndexedRow
    rewards: list[float]
    advantages: list[float]
    samples: list[list[TrainSample]]
    row_meta: dict[str, Any] | None = None
    submit_version: int = 0
    """Weight syncs that had been published when the row was submitted."""

    @classmethod
    def of(
        cls, row: IndexedRow, trajectories: Sequence[Sequence[RolloutSample]],
        row_meta: dict[str, Any] | None = None, submit_version: int = 0,
    ) -> PromptGroup:  # fmt: skip
        """A group with its advantages; the samples of one trajectory have one reward.

        Raises:
            ConfigError: fewer than two trajectories, or a reward that is not finite.
        """
        rewards = [float(samples[0].reward) for samples in trajectories]
        advantages = group_advantages(rewards)
        trained = [
            [TrainSample.of(one, advantage) for one in samples]
            for samples, advantage in zip(trajectories, advantages, strict=True)
        ]
        return cls(row, rewards, advantages, trained, row_meta, submit_version)

    def flat(self) -> list[TrainSample]:
        """All samples, in order."""
        return [one for samples in self.samples for one in samples]

    @property
    def prompt_lens(self) -> list[int]:
        """Tokens before the first drawn one, of each sample."""
        return [one.drawn.prompt_len for one in self.flat()]

    @property
    def completion_lens(self) -> list[int]:
        """Drawn tokens of each trajectory."""
        return [sum(one.drawn.completion_len for one in samples) for samples in self.samples]

    @property
    def truncated(self) -> list[bool]:
        """Whether each trajectory ended at a length limit."""
        return [samples[-1].drawn.finish_reason == "length" for samples in self.samples]

    @property
    def completions(self) -> list[str]:
        """The text of each trajectory."""
        return [samples[-1].drawn.text for samples in self.samples]

    @property
    def data(self) -> list[tinker.Datum]:
        """The datum of each sample."""
        return [one.datum for one in self.flat()]

    @property
    def inf_logprobs(self) -> list[Sequence[float]]:
        """The sampler's logprobs of each sample, target-aligned."""
        return [one.behavior_logprobs for one in self.flat()]


@dataclass(frozen=True)
class Draw:
    """The outcome of one row: a group to train on, or the reason why there is none.

    ``completions`` counts what was drawn, ``truncated`` those that were cut; ``rewards`` are those
    that were given, trained or not.
    """

    row: IndexedRow
    group: PromptGroup | None = None
    dropped: str | None = None
    completions: int = 0
    truncated: int = 0
    rewards: Sequence[float] = ()
    error: Exception | None = None
    failed_draws: int = 0
    """Draws that were given up after their last attempt."""
    empty_draws: int = 0
    """Draws whose rollout returned None, or drew nothing."""


@dataclass
class RolloutStats:
    """Counts over the draws since the last step."""

    rows: int = 0
    samples: int = 0
    truncated: int = 0
    failed_draws: int = 0
    empty_draws: int = 0
    rewards: list[float] = field(default_factory=list[float])
    dropped: Counter[str] = field(default_factory=Counter[str])
    stale_lengths: list[int] = field(default_factory=list[int])
    """Tokens of the draws that had ended in rows that were given up as too late."""

    def add(self, draw: Draw) -> None:
        """Count one row's outcome."""
        self.rows += 1
        self.samples += draw.completions
        self.truncated += draw.truncated
        self.failed_draws += draw.failed_draws
        self.empty_draws += draw.empty_draws
        self.rewards.extend(draw.rewards)
        if draw.dropped is not None:
            self.dropped[draw.dropped] += 1


def completion_sample(completion: SampledCompletion, reward: float) -> RolloutSample:
    """A completion of one turn with what it earned.

    Raises:
        ConfigError: the deployment sent no logprobs, or not one per drawn token.
    """
    prompt = completion.prompt_len
    rows = align_behavior_logprobs(
        completion.inference_logprobs, num_tokens=len(completion.full_tokens),
        prompt_len=prompt, is_echoed=completion.logprobs_echoed,
    )  # fmt: skip
    return RolloutSample(
        tokens=completion.full_tokens,
        logprobs=[0.0] * prompt + rows[prompt - 1 :],
        loss_mask=[0] * prompt + [1] * completion.completion_len,
        reward=reward,
        finish_reason=completion.finish_reason,
        text=completion.text,
        versions=completion.versions or [[completion.weight_version, completion.completion_len]],
    )


def rollout_metrics(stats: RolloutStats, groups: Sequence[PromptGroup]) -> dict[str, float]:
    """``rollout/*`` of one step: raw numbers over all draws, the rest over what is trained."""
    rewards = [reward for group in groups for reward in group.rewards]
    lengths = [length for group in groups for length in group.completion_lens]
    metrics = {
        "rollout/raw_reward": _mean(stats.rewards),
        "rollout/accuracy": _mean([float(reward > 0.5) for reward in stats.rewards]),
        "rollout/reward": _mean(rewards),
        "rollout/samples_completed": float(stats.samples),
        "rollout/valid_prompt_groups": float(len(groups)),
        "rollout/total_sampled": float(stats.rows),
        "rollout/filter_reject_ratio": stats.dropped["uniform"] / max(1, stats.rows),
        "rollout/sample_fail_count": float(stats.dropped["failed"]),
        "rollout/truncated_ratio": stats.truncated / max(1, stats.samples),
        "rollout/entropy": entropy_estimate(groups),
    }
    if stats.rewards:
        metrics["rollout/reward_min"] = min(stats.rewards)
        metrics["rollout/reward_max"] = max(stats.rewards)
    for reason, count in sorted(stats.dropped.items()):
        metrics[f"rollout/dropped/{reason}"] = float(count)
    if lengths:
        metrics |= {
            "rollout/response_len/mean": _mean(lengths),
            "rollout/response_len/median": float(statistics.median(lengths)),
            "rollout/response_len/max": float(max(lengths)),
            "rollout/response_len/min": float(min(lengths)),
        }
    return metrics


def entropy_estimate(groups: Iterable[PromptGroup]) -> float:
    """Estimated entropy in nats per token: mean of minus the behavior logprob over drawn tokens."""
    total, count = 0.0, 0
    for sample in (one for group in groups for one in group.flat()):
        total -= math.fsum(sample.behavior_logprobs)
        count += sample.drawn.completion_len
    return total / count if count else 0.0


def version_metrics(groups: Sequence[PromptGroup], version: int) -> dict[str, float]:
    """How many weight syncs old the trained samples are, by their oldest token."""
    drawn = [one.drawn for group in groups for one in group.flat()]
    ages = [version - min(by for by, _ in one.versions) for one in drawn if one.versions]
    if not ages:
        return {}
    return {
        "version/sample_staleness_mean": _mean(ages),
        "version/sample_staleness_max": float(max(ages)),
    }


def _mean(values: Sequence[float]) -> float:
    # The order in which rows end is not the run's to know: the exact sum has none.
    return math.fsum(values) / len(values) if values else 0.0
