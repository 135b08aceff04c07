"""A recipe of ``async_rl_loop`` whose tokens do not depend on the engine that samples them.

Every engine has random numbers of its own, so each sample is the most probable text, and the
samples of a row differ because each asks a little differently. What is trained has the model's own
logprobs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.integration.conftest import async_config
from tests.integration.rollouts import spread
from tests.integration.runs import Trial
from tests.vllm.stack import OPTIONS

from hearth.sdk import DeploymentSampler, SamplingRetryPolicy
from hearth.settings import VLLM_PYTHON_VARIABLE
from training.quickstart import MODEL
from training.recipes import async_rl_loop
from training.samples.rollout import RolloutFn, RolloutSample, RolloutSetup
from training.utils import DeployConfig

OPENINGS = ("", "Please: ", "Now then. ", "Once more: ")
"""What each sample of a row puts before the question."""
STEPS = 4
SAMPLES_OF_STEP = 2 * len(OPENINGS)

LOGPROB_TOLERANCE = 1e-3
"""Nats between two engines on one token. Kernels differ by some 1e-6 on the same weights, and each
step leaves weights that differ by rounding, which Adam makes a whole update of where a gradient is
next to nothing. Measured: 4e-6 after three steps."""
LOSS_TOLERANCE = 1e-3
"""Relative, of losses and gradient norms, for the same reasons. Measured: 4e-6."""
LOSSES = ("train/loss_sum", "train/mean_loss", "train/surrogate_loss_sum", "train/grad_norm")

needs_vllm = pytest.mark.skipif(
    not os.environ.get(VLLM_PYTHON_VARIABLE),
    reason=f"{VLLM_PYTHON_VARIABLE} names no interpreter with vLLM: run make test-scale",
)


def on_vllm(replicas: int) -> DeployConfig:
    """A deployment of so many vLLM servers."""
    return DeployConfig(
        tokenizer_model=str(MODEL),
        engine="vllm",
        replicas=replicas,
        max_batch_size=32,
        engine_options=OPTIONS,
    )


@dataclass(frozen=True)
class Greedy:
    """The rollouts and samples of a run.

    ``before`` is called ahead of each with how many there were until then.
    """

    before: Callable[[int], None] = lambda count: None
    rollouts: list[tuple[int, int, str]] = field(default_factory=list[tuple[int, int, str]])
    """Place of the row in the run, number of the sample, and the row's question; in order."""
    samples: dict[tuple[int, int], RolloutSample] = field(
        default_factory=dict[tuple[int, int], RolloutSample]
    )
    """By place and number."""

    def __call__(self, setup: RolloutSetup) -> RolloutFn:
        """The rollout function of a run."""
        sampler = DeploymentSampler(
            setup.inference_base_url,
            setup.model,
            setup.api_key,
            setup.tokenizer,
            retry_policy=SamplingRetryPolicy(boot_s=setup.boot_timeout_s),
        )
        setup.closing.callback(sampler.close)

        async def rollout_fn(
            row: Mapping[str, Any], *, cursor_index: int, sample_index: int
        ) -> RolloutSample:
            question = row["messages"][0]["content"]
            self.before(len(self.rollouts))
            self.rollouts.append((cursor_index, sample_index, question))
            (completion,) = await sampler.sample_with_tokens(
                [{"role": "user", "content": OPENINGS[sample_index] + question}],
                max_tokens=setup.sample_kwargs["max_tokens"],
                temperature=0.0,
            )
            assert completion.raw_logprobs is not None
            sample = RolloutSample(
                tokens=completion.full_tokens,
                logprobs=[0.0] * completion.prompt_len + completion.raw_logprobs,
                loss_mask=[0] * completion.prompt_len + [1] * completion.completion_len,
                # The number too, or samples that say the same would leave nothing to learn.
                reward=spread(f"{sample_index} {completion.text}", row),
                text=completion.text,
                finish_reason=completion.finish_reason,
                versions=completion.versions,
            )
            self.samples[cursor_index, sample_index] = sample
            return sample

        return rollout_fn

    def tokens(self) -> dict[tuple[int, int], list[int]]:
        """All tokens of each sample."""
        return {place: sample.tokens for place, sample in self.samples.items()}

    def logprobs(self) -> dict[tuple[int, int], list[float]]:
        """Of the tokens, 0 where nothing was sampled."""
        return {place: sample.logprobs for place, sample in self.samples.items()}


def train(folder: Path, greedy: Greedy, **shape: Any) -> Trial:
    """A finished run of four steps, in which each of four rows comes twice."""
    fields = async_config(
        folder,
        max_rows=4,
        prompt_groups_per_step=2,
        epochs=2,
        shuffle=True,
        completions_per_prompt=len(OPENINGS),
        max_completion_tokens=12,
        output_model_id=None,
        **shape,
    )
    return Trial(folder, async_rl_loop.main(fields, rollout_fn_factory=greedy))


def check_same(mine: tuple[Trial, Greedy], theirs: tuple[Trial, Greedy]) -> None:
    """The same rows in the same order, the same tokens, and the same losses to tolerance."""
    (trial, greedy), (whole, expected) = mine, theirs
    assert len(trial.records()) == len(whole.records()) == STEPS
    assert greedy.rollouts == expected.rollouts
    assert greedy.tokens() == expected.tokens()
    for place, logprobs in expected.logprobs().items():
        assert greedy.logprobs()[place] == pytest.approx(logprobs, abs=LOGPROB_TOLERANCE), place
    for record, other in zip(trial.records(), whole.records(), strict=True):
        assert [record[name] for name in LOSSES] == pytest.approx(
            [other[name] for name in LOSSES], rel=LOSS_TOLERANCE
        )
