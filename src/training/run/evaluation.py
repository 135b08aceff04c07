"""Held-out evaluation: how often the served weights answer right."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from hearth.sdk import DeploymentSampler, SampledCompletion
from training.config.rl import RLConfig
from training.data.rows import Row, prompt_messages
from training.data.seeds import row_seed
from training.rewards.score import Score
from training.rewards.scoring import AnyReward, gather_or_cancel, scored
from training.rollouts.failures import RetryLimits, with_retries
from training.rollouts.sampler import get_versions
from training.run.pass_at_k import pass_rates
from training.samples.reward_metrics import CORRECT, parse_metrics
from training.samples.scoring import trajectory_of_completion
from training.samples.trajectories import SampledTrajectory

logger = logging.getLogger(__name__)

T = TypeVar("T")

EVAL_SEED_OFFSET = 0x5EED
"""Evaluation samples with seeds of its own, so that it never repeats a training rollout."""
ATTEMPTS = 3
"""How often the completions of a held-out row are asked for, where the failure may pass."""


@dataclass(frozen=True)
class EvalSample:
    """One held-out answer and what it earned."""

    row: Row
    place: int
    """The row's place among the held-out rows."""
    reward: float
    text: str
    length: int
    """Sampled tokens."""
    is_truncated: bool
    versions: Sequence[Sequence[int]] = ()
    """Run lengths ``[weight version, tokens]`` over the sampled tokens."""
    parsed: bool | None = None
    """Whether the reward found the answer that it looks for; None where it does not say."""

    @property
    def is_right(self) -> bool:
        """Whether the reward is above 0.5."""
        return self.reward > CORRECT


@dataclass(frozen=True)
class EvalResult:
    """All answers of one evaluation that have a reward; every one weighs the same."""

    samples: list[EvalSample]
    failed_rewards: int = 0
    """Answers left out, since their reward function failed."""
    failed_samples: int = 0
    """Samples left out, since they failed or gave nothing."""
    sampled_trajectories: Sequence[Sequence[SampledTrajectory]] = ()
    """All that was sampled for each row, those without a reward too."""

    @property
    def accuracy(self) -> float:
        """Share of answers whose reward is above 0.5; NaN where none has a reward."""
        if not self.samples:
            return math.nan
        return sum(sample.is_right for sample in self.samples) / len(self.samples)

    @property
    def reward(self) -> float:
        """The mean reward; NaN where no answer has one."""
        if not self.samples:
            return math.nan
        return sum(sample.reward for sample in self.samples) / len(self.samples)

    def describe(self) -> str:
        """In words: the share of right answers where each reward is 0 or 1, else the mean reward.

        Where all are 0 nobody knows which of them it is; the reward is right in both cases.
        """
        is_share = all(sample.reward in (0.0, 1.0) for sample in self.samples)
        if is_share and self.accuracy > 0:
            return f"accuracy {self.accuracy:.3f}"
        return f"reward {self.reward:.3f}"

    @property
    def pass_rates(self) -> dict[int, float]:
        """pass@k for k = 1, 2, 4, ... up to the number of answers per row."""
        counts: dict[int, list[int]] = {}
        for sample in self.samples:
            count = counts.setdefault(sample.place, [0, 0])
            count[0] += 1
            count[1] += sample.is_right
        return pass_rates([(n, c) for n, c in counts.values()])

    def metrics(self) -> dict[str, float]:
        """``eval/*``."""
        samples = self.samples
        counts = {
            "eval/samples": float(len(samples)),
            "eval/reward_fail_count": float(self.failed_rewards),
            "eval/sample_fail_count": float(self.failed_samples),
        }
        if not samples:
            return counts
        rates = {f"eval/pass@{k}": rate for k, rate in self.pass_rates.items()}
        parsed = parse_metrics(
            [sample.parsed for sample in samples if sample.parsed is not None], "eval"
        )
        return (
            counts
            | rates
            | parsed
            | self._version_metrics()
            | {
                "eval/accuracy": self.accuracy,
                "eval/reward": self.reward,
                "eval/response_len/mean": sum(sample.length for sample in samples) / len(samples),
                "eval/truncated_ratio": sum(sample.is_truncated for sample in samples)
                / len(samples),
            }
        )

    def _version_metrics(self) -> dict[str, float]:
        """Which weights sampled: the mean is over tokens."""
        counts = [(by, count) for sample in self.samples for by, count in sample.versions if count]
        if not counts:
            return {}
        return {
            "eval/weight_version_mean": sum(by * n for by, n in counts) / sum(n for _, n in counts),
            "eval/weight_version_min": float(min(by for by, _ in counts)),
            "eval/weight_version_max": float(max(by for by, _ in counts)),
        }


async def evaluate(
    sampler: DeploymentSampler, rows: Sequence[Row], reward_fn: AnyReward, config: RLConfig
) -> EvalResult:
    """Sample ``eval_samples_per_prompt`` completions of each row and score them.

    The seeds depend on the run's and the row's place only, so that evaluations compare.

    Raises:
        Exception: what sampling or scoring raised, a recoverable one after the last attempt.
    """

    async def sample(place: int, row: Row) -> list[SampledCompletion]:
        return await with_retries(
            lambda: sampler.sample_with_tokens(
                prompt_messages(row),
                n=config.eval_samples_per_prompt,
                max_tokens=config.max_completion_tokens,
                temperature=config.temperature,
                seed=row_seed(config.seed + EVAL_SEED_OFFSET, place),
            ),
            RetryLimits(ATTEMPTS, timeout_s=None),
            on_failure=lambda error, attempt: logger.warning(
                "held-out row %d, attempt %d failed: %s", place, attempt, error
            ),
        )

    async def judge(place: int, row: Row) -> tuple[list[EvalSample], list[SampledTrajectory]]:
        try:
            completions = await sample(place, row)
            texts = [completion.text for completion in completions]
            scores = await scored(reward_fn, texts, row, f"eval_rows[{place}]")
        except Exception as error:
            error.add_note(f"in the evaluation of held-out row {place}")
            raise
        pairs = list(zip(completions, scores, strict=True))
        judged = [
            completion_judged(row, place, completion, score)
            for completion, score in pairs
            if isinstance(score, Score)
        ]
        return judged, [trajectory_of_completion(completion, score) for completion, score in pairs]

    parts = await gather_or_cancel([judge(place, row) for place, row in enumerate(rows)])
    samples = [sample for judged, _ in parts for sample in judged]
    trajectories = [of_row for _, of_row in parts]
    return EvalResult(
        samples, sum(map(len, trajectories)) - len(samples), sampled_trajectories=trajectories
    )


def completion_judged(
    row: Row, place: int, completion: SampledCompletion, score: Score
) -> EvalSample:
    """A completion of one turn as a held-out answer."""
    return EvalSample(
        row,
        place,
        score.reward,
        completion.text,
        completion.completion_len,
        completion.finish_reason == "length",
        get_versions(completion),
        score.parsed,
    )
