"""Groups of samples: what the completions of one row become before they are trained."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import tinker
import torch
from torch import Tensor

from hearth.sdk import RoutedModelInput, SampledCompletion
from training.config.parts import Replay
from training.data.rows import IndexedRow
from training.samples.datums import align_routing, make_datum, token_logprobs
from training.samples.reward_metrics import (
    disagreement_metrics,
    group_reward_metrics,
    parse_metrics,
)
from training.samples.rollout import RolloutSample
from training.samples.trajectories import SampledTrajectory
from training.samples.turn_advantages import TurnCredit


@dataclass
class TrainSample:
    """One token sequence on its way through the losses.

    Logprobs are target-aligned: N - 1 values for N tokens. ``old_logprobs`` None stands for the
    policy's own.
    """

    datum: tinker.Datum
    advantage: float | Sequence[float]
    """What every sampled token earned, or target-aligned values of what each did."""
    behavior_logprobs: Tensor
    """The sampler's, 0 where it sampled nothing; float64."""
    rollout: RolloutSample
    old_logprobs: Sequence[float] | None = None
    ref_logprobs: Sequence[float] | None = None
    policy_logprobs: Sequence[float] | Tensor | None = None
    """Those of the pass that trained it, where they came to this process."""
    ratios: Tensor | None = None
    """Policy to old, as the loss used it; None where it is 1 everywhere or not known here."""
    clipped: Tensor | None = None
    """Where the loss's clip was active; None as for ``ratios``."""

    @classmethod
    def from_rollout(
        cls, rollout: RolloutSample, advantage: float, replay: Replay = "none"
    ) -> TrainSample:
        """The one place that shifts a rollout's tokens, mask and logprobs to their targets.

        Raises:
            ConfigError: the experts that are to be replayed are not one per token.
        """
        arrays = rollout.arrays
        behavior = np.where(arrays.is_sampled, arrays.logprobs, 0.0)
        routing = None
        if replay != "none" and rollout.routing_matrices is not None:
            routing = align_routing(
                rollout.routing_matrices,
                num_tokens=len(rollout.tokens),
                prompt_len=rollout.prompt_len,
                with_prompt=replay == "all",
            )
        return cls(
            datum=make_datum(
                rollout.tokens[:-1],
                targets=arrays.tokens[1:],
                weights=arrays.is_sampled[1:].astype(np.float32),
                routing=routing,
            ),
            advantage=advantage,
            behavior_logprobs=torch.from_numpy(behavior[1:]),
            rollout=rollout,
        )

    @cached_property
    def mask(self) -> Tensor:
        """1 on targets that the policy sampled; float32 [N - 1]."""
        return torch.from_numpy(self.rollout.arrays.is_sampled[1:].astype(np.float32))

    @property
    def is_effective(self) -> bool:
        """Whether it teaches anything: its advantage is not 0 everywhere."""
        return any(self.advantage) if isinstance(self.advantage, Sequence) else self.advantage != 0

    @property
    def reference_datum(self) -> tinker.Datum:
        """The datum for a reference, whose router chooses its own experts."""
        routed = self.datum.model_input
        if not isinstance(routed, RoutedModelInput):
            return self.datum
        return tinker.Datum(
            model_input=routed.without_routing(), loss_fn_inputs=self.datum.loss_fn_inputs
        )


def to_datums(
    trajectories: Sequence[Sequence[RolloutSample]],
    advantages: Sequence[float],
    replay: Replay = "none",
) -> list[list[TrainSample]]:
    """The datums of each trajectory, with what a loss needs beside them: advantage and logprobs.

    Raises:
        ConfigError: the experts that are to be replayed are not one per token.
    """
    return [
        [TrainSample.from_rollout(sample, advantage, replay) for sample in samples]
        for samples, advantage in zip(trajectories, advantages, strict=True)
    ]


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
    credit: TurnCredit | None = None
    """What each turn is worth, where samples have an advantage per token."""

    def flat(self) -> list[TrainSample]:
        """All samples, in order."""
        return [sample for samples in self.samples for sample in samples]

    @property
    def effective_samples(self) -> int:
        """Samples that teach anything."""
        return sum(sample.is_effective for sample in self.flat())

    @property
    def prompt_lens(self) -> list[int]:
        """Tokens before the first sampled one, of each sample."""
        return [sample.rollout.prompt_len for sample in self.flat()]

    @property
    def completion_lens(self) -> list[int]:
        """Sampled tokens of each trajectory."""
        return [
            sum(sample.rollout.completion_len for sample in samples) for samples in self.samples
        ]

    @property
    def truncated(self) -> list[bool]:
        """Whether each trajectory ended at a length limit."""
        return [samples[-1].rollout.finish_reason == "length" for samples in self.samples]

    @property
    def completions(self) -> list[str]:
        """The text of each trajectory."""
        return [samples[-1].rollout.text for samples in self.samples]

    @property
    def data(self) -> list[tinker.Datum]:
        """The datum of each sample."""
        return [sample.datum for sample in self.flat()]


@dataclass(frozen=True)
class ExampleAnswer:
    """One of a row's answers, to be shown."""

    text: str
    tokens: Sequence[int]
    """The sampled tokens."""
    reward: float | None
    finish_reason: str
    parsed: bool | None = None
    """Whether the reward found an answer; None where it does not say."""


@dataclass(frozen=True)
class RowOutcome:
    """The outcome of one row: a group to train on, or the reason why there is none.

    ``completions`` counts what was sampled, ``truncated`` what ended at a length limit; ``rewards``
    are those that were given, trained or not.
    """

    row: IndexedRow
    group: PromptGroup | None = None
    dropped: str | None = None
    completions: int = 0
    truncated: int = 0
    rewards: Sequence[float] = ()
    error: Exception | None = None
    failed_samples: int = 0
    """Samples that were given up after their last attempt."""
    empty_samples: int = 0
    """Samples whose rollout returned None, or no sampled token."""
    failed_rewards: int = 0
    """Completions that have no reward, since their reward function failed."""
    disagreements: Sequence[float] = ()
    """A reward ensemble's, of each reward."""
    parsed: Sequence[bool] = ()
    """For each completion whose reward says so: whether the reward found an answer."""
    example: ExampleAnswer | None = None
    """One of the answers, trained or not."""
    sampled_trajectories: Sequence[SampledTrajectory] = field(default=(), compare=False)
    """All that was sampled, trained or not."""
    row_meta: Mapping[str, Any] | None = field(default=None, compare=False)
    """What the rollouts gave for the row (``Rollout.row_meta``)."""


@dataclass
class RolloutStats:
    """Counts over the rows that ended since the last step."""

    rows: int = 0
    useful_rows: int = 0
    """Rows whose group has an advantage that is not 0."""
    samples: int = 0
    truncated: int = 0
    failed_samples: int = 0
    empty_samples: int = 0
    failed_rewards: int = 0
    rewards: list[float] = field(default_factory=list[float])
    group_rewards: list[Sequence[float]] = field(default_factory=list[Sequence[float]])
    """The rewards of each row that has any."""
    disagreements: list[float] = field(default_factory=list[float])
    parsed: list[bool] = field(default_factory=list[bool])
    dropped: Counter[str] = field(default_factory=Counter[str])
    stale_lengths: list[int] = field(default_factory=list[int])
    """Tokens of the finished samples of rows that were given up as too late."""

    def add(self, outcome: RowOutcome) -> None:
        """Count one row's outcome."""
        self.rows += 1
        self.useful_rows += outcome.group is not None and outcome.group.effective_samples > 0
        self.samples += outcome.completions
        self.truncated += outcome.truncated
        self.failed_samples += outcome.failed_samples
        self.empty_samples += outcome.empty_samples
        self.failed_rewards += outcome.failed_rewards
        self.rewards.extend(outcome.rewards)
        self.disagreements.extend(outcome.disagreements)
        self.parsed.extend(outcome.parsed)
        if outcome.rewards:
            self.group_rewards.append(outcome.rewards)
        if outcome.dropped is not None:
            self.dropped[outcome.dropped] += 1


def completion_sample(
    completion: SampledCompletion,
    reward: float,
    *,
    parsed: bool | None = None,
    parts: Mapping[str, float] | None = None,
) -> RolloutSample:
    """A completion of one turn with what it earned, and whether an answer was found in it.

    Raises:
        ConfigError: the deployment sent no logprobs, or not one per sampled token.
    """
    prompt = completion.prompt_len
    logprobs = token_logprobs(
        completion.inference_logprobs,
        num_tokens=len(completion.full_tokens),
        prompt_len=prompt,
        is_echoed=completion.logprobs_echoed,
    )
    return RolloutSample(
        tokens=completion.full_tokens,
        logprobs=[0.0] * prompt + logprobs[prompt:],
        loss_mask=[0] * prompt + [1] * completion.completion_len,
        reward=reward,
        finish_reason=completion.finish_reason,
        text=completion.text,
        versions=completion.versions or [[completion.weight_version, completion.completion_len]],
        routing_matrices=completion.routing_matrices,
        parsed=parsed,
        seeds=None if completion.seed is None else [completion.seed],
        reward_parts=parts,
    )


def rollout_metrics(stats: RolloutStats, groups: Sequence[PromptGroup]) -> dict[str, float]:
    """``rollout/*`` of one step: raw numbers over all samples, the rest over the trained ones."""
    rewards = [reward for group in groups for reward in group.rewards]
    lengths = [length for group in groups for length in group.completion_lens]
    metrics = {
        "rollout/reward": _mean(rewards),
        "rollout/samples_completed": float(stats.samples),
        "rollout/valid_prompt_groups": float(len(groups)),
        "rollout/total_sampled": float(stats.rows),
        "rollout/filter_reject_ratio": _count_rejected(stats) / max(1, stats.rows),
        "rollout/sample_fail_count": float(stats.dropped["failed"]),
        "rollout/reward_fail_count": float(stats.failed_rewards),
        "rollout/truncated_ratio": stats.truncated / max(1, stats.samples),
        "rollout/entropy": entropy_estimate(groups),
    }
    if stats.rewards:  # off-policy a step may train without that a row ended meanwhile
        metrics["rollout/raw_reward"] = _mean(stats.rewards)
        metrics["rollout/accuracy"] = _mean([float(reward > 0.5) for reward in stats.rewards])
        metrics["rollout/reward_min"] = min(stats.rewards)
        metrics["rollout/reward_max"] = max(stats.rewards)
    if stats.rows:
        metrics["signal/useful_row_ratio"] = stats.useful_rows / stats.rows
    metrics |= group_reward_metrics(stats.group_rewards)
    metrics |= disagreement_metrics(stats.disagreements)
    metrics |= parse_metrics(stats.parsed, "rollout")
    samples = [sample for group in groups for sample in group.flat()]
    routed = [sample.rollout.routing_matrices is not None for sample in samples]
    if any(routed):
        metrics["rollout/router_replay_ratio"] = _mean(routed)
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


def _count_rejected(stats: RolloutStats) -> int:
    """Rows whose group was whole and taught nothing: ``rl_loop``'s own filter, or the user's."""
    return stats.dropped["uniform"] + stats.dropped["filtered"]


def entropy_estimate(groups: Iterable[PromptGroup]) -> float:
    """Entropy in nats per token, estimated by the mean of minus the behavior logprob."""
    total, count = 0.0, 0
    for sample in (sample for group in groups for sample in group.flat()):
        arrays = sample.rollout.arrays
        # The exact sum, to which zeros add nothing.
        total -= math.fsum(arrays.logprobs[arrays.is_sampled].tolist())
        count += arrays.completion_len
    return total / count if count else 0.0


def version_metrics(groups: Sequence[PromptGroup], version: int) -> dict[str, float]:
    """How many weight syncs old the trained samples are, by their oldest token."""
    versions = [sample.rollout.versions for group in groups for sample in group.flat()]
    ages = [version - min(number for number, _ in pairs) for pairs in versions if pairs]
    if not ages:
        return {}
    return {
        "version/sample_staleness_mean": _mean(ages),
        "version/sample_staleness_max": float(max(ages)),
    }


def _mean(values: Sequence[float]) -> float:
    # Rows end in any order: the exact sum does not depend on it.
    return math.fsum(values) / len(values) if values else 0.0
