"""How often a second answer is right: what the recipe's metrics do not tell of a conversation."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from training.examples.rl.trend import trend
from training.samples.rollout import RolloutFn, RolloutResult, RolloutSample


class Retries:
    """Watches a rollout function; what it returns is left as it is."""

    def __init__(self) -> None:
        self.right: list[bool] = []
        """Whether the second answer was right, for each conversation that has one, in order."""

    def watch(self, rollout_fn: RolloutFn) -> RolloutFn:
        """The same rollout function, watched."""

        async def watched(sample_prompt: dict[str, Any]) -> RolloutResult:
            sample = await rollout_fn(sample_prompt)
            if isinstance(sample, RolloutSample) and num_turns(sample) > 1:
                self.right.append(sample.reward > 0)
            return sample

        return watched

    def trend(self) -> str:
        """Share of right second answers, in the first and in the last quarter of them."""
        return trend("right second answers", self.right, "second answers")


def num_turns(sample: RolloutSample) -> int:
    """The policy's turns in a sample: each begins where the mask goes from 0 to 1."""
    return sum((before, after) == (0, 1) for before, after in pairwise(sample.loss_mask))
