"""Held-out evaluation: how often the served weights answer right."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass

from hearth.sdk import DeploymentSampler, SampledCompletion
from training.rewards.score import Score
from training.rewards.scoring import AnyReward, scored
from training.utils.rl.seeds import row_seed
from training.utils.rows import Row, prompt_messages

# Evaluation draws with seeds of their own, so that it never repeats a training draw.
_SEED_OFFSET = 0x5EED


@dataclass(frozen=True)
class EvalSample:
    """One held-out completion and what it earned."""

    row: Row
    completion: SampledCompletion
    reward: float


@dataclass(frozen=True)
class EvalResult:
    """All completions of one evaluation that have a reward; every one weighs the same."""

    samples: list[EvalSample]
    failed_rewards: int = 0
    """Completions left out, since their reward function failed."""

    @property
    def accuracy(self) -> float:
        """Share of completions whose reward is above 0.5; NaN where none has a reward."""
        if not self.samples:
            return math.nan
        return sum(one.reward > 0.5 for one in self.samples) / len(self.samples)

    def metrics(self) -> dict[str, float]:
        """``eval/*``."""
        drawn = [one.completion for one in self.samples]
        counts = {
            "eval/samples": float(len(drawn)),
            "eval/reward_fail_count": float(self.failed_rewards),
        }
        if not drawn:
            return counts
        return counts | {
            "eval/accuracy": self.accuracy,
            "eval/reward": sum(one.reward for one in self.samples) / len(drawn),
            "eval/response_len/mean": sum(one.completion_len for one in drawn) / len(drawn),
            "eval/truncated_ratio": sum(one.finish_reason == "length" for one in drawn)
            / len(drawn),
        }


async def evaluate(
    sampler: DeploymentSampler, rows: Sequence[Row], reward_fn: AnyReward, *,
    samples_per_prompt: int, max_tokens: int, temperature: float, seed: int,
) -> EvalResult:  # fmt: skip
    """Draw ``samples_per_prompt`` completions of each row at ``temperature`` and score them.

    The seeds depend on ``seed`` and the row's place only, so that evaluations compare.
    """

    async def one(index: int, row: Row) -> list[EvalSample | None]:
        drawn = await sampler.sample_with_tokens(
            prompt_messages(row), n=samples_per_prompt, max_tokens=max_tokens,
            temperature=temperature, seed=row_seed(seed + _SEED_OFFSET, index),
        )  # fmt: skip
        outcomes = await scored(reward_fn, [each.text for each in drawn], row)
        return [
            EvalSample(row, each, score.reward) if isinstance(score, Score) else None
            for each, score in zip(drawn, outcomes, strict=True)
        ]

    parts = await asyncio.gather(*(one(index, row) for index, row in enumerate(rows)))
    judged = [sample for part in parts for sample in part]
    samples = [sample for sample in judged if sample is not None]
    return EvalResult(samples, failed_rewards=len(judged) - len(samples))
