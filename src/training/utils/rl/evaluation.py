"""Held-out evaluation: how often the served weights answer right."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hearth.sdk import DeploymentSampler, SampledCompletion
from training.utils.rl.seeds import row_seed
from training.utils.rows import Row, prompt_messages

RewardFunction = Callable[[str, Row], float]
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
    """All completions of one evaluation; every row weighs the same."""

    samples: list[EvalSample]

    @property
    def accuracy(self) -> float:
        """Share of completions whose reward is above 0.5."""
        return sum(one.reward > 0.5 for one in self.samples) / len(self.samples)

    def metrics(self) -> dict[str, float]:
        """``eval/*``."""
        count = len(self.samples)
        return {
            "eval/accuracy": self.accuracy,
            "eval/reward": sum(one.reward for one in self.samples) / count,
            "eval/response_len/mean": sum(o.completion.completion_len for o in self.samples)
            / count,
            "eval/truncated_ratio": sum(
                o.completion.finish_reason == "length" for o in self.samples
            )
            / count,
            "eval/samples": float(count),
        }


async def evaluate(
    sampler: DeploymentSampler, rows: Sequence[Row], reward_fn: RewardFunction, *,
    samples_per_prompt: int, max_tokens: int, temperature: float, seed: int,
) -> EvalResult:  # fmt: skip
    """Draw ``samples_per_prompt`` completions of each row at ``temperature`` and score them.

    The seeds depend on ``seed`` and the row's place only, so that evaluations compare.
    """

    async def one(index: int, row: Row) -> list[EvalSample]:
        drawn = await sampler.sample_with_tokens(
            prompt_messages(row), n=samples_per_prompt, max_tokens=max_tokens,
            temperature=temperature, seed=row_seed(seed + _SEED_OFFSET, index),
        )  # fmt: skip
        return [EvalSample(row, each, reward_fn(each.text, row)) for each in drawn]

    parts = await asyncio.gather(*(one(index, row) for index, row in enumerate(rows)))
    return EvalResult([sample for part in parts for sample in part])
