"""Whether sampler and trainer agree where no trained sample can tell: a probe per weight sync.

Off-policy, the weights that sampled are gone when the samples are trained, so a step's own forward
compares nothing (``parity``). A probe samples a few short completions once a snapshot is served,
from prompts of the step before, and the trainer scores them if it still has that snapshot's
weights. Probes that come too late are dropped and counted. No budget or count of the training
includes them.

The trainer executes requests in order. A forward that is requested before the next optimizer step
therefore computes with the served weights, and nothing waits for it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from training.config.async_recipe import AsyncConfig
from training.data.seeds import call_seed
from training.platform.run_infra import RunInfra
from training.rewards.scoring import gather_or_cancel
from training.rollouts.router_replay import routing_options
from training.samples.groups import PromptGroup, TrainSample, completion_sample
from training.update.parity import logprob_gaps, parity_metrics

logger = logging.getLogger(__name__)

COMPLETION_TOKENS = 8
"""Longest completion of a probe: several short ones are there sooner than a long one."""


class ParityProbe:
    """Probes of a run, one at a time; made and used on the trainer's event loop.

    Off where every step waits for its weight sync: its own samples are compared. The first probe
    that fails is logged, the others are only counted, and none ends the run. ``steps`` counts the
    optimizer steps before the run began.
    """

    def __init__(self, config: AsyncConfig, infra: RunInfra, steps: int = 0) -> None:
        self._config = config
        self._infra = infra
        self._is_on = config.overlaps and config.parity_probe_tokens > 0
        self._steps = steps
        self._running: asyncio.Task[None] | None = None
        self._gaps: list[Tensor] = []
        self._skipped = 0
        self._has_failed = False

    def begin(self, step: int, version: int, groups: Sequence[PromptGroup]) -> None:
        """Probe the weights of ``step``, which are now served as weight version ``version``.

        ``groups`` are the step's, and give the prompts. A probe that still runs is cancelled.
        """
        if not self._is_on:
            return
        if self._running is not None and not self._running.done():
            self._running.cancel()
            self._skipped += 1
        self._running = asyncio.create_task(self._probe(step, version, groups))

    def before_step(self) -> None:
        """To be called right before an optimizer step is requested, which changes the weights."""
        self._steps += 1

    def take(self) -> dict[str, float]:
        """``parity/*`` of what was compared since the last call; none where nothing was.

        ``parity/probes_skipped`` counts the probes since then that compared nothing: the next
        optimizer step came first, or the probe failed.
        """
        if not self._is_on:
            return {}
        gaps, self._gaps = self._gaps, []
        skipped, self._skipped = self._skipped, 0
        return {**parity_metrics(gaps), "parity/probes_skipped": float(skipped)}

    async def close(self) -> None:
        """Cancel the probe that runs; it is not counted."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def _probe(self, step: int, version: int, groups: Sequence[PromptGroup]) -> None:
        """Compare, if the trainer still has the weights of ``step`` once all is sampled."""
        gaps: Tensor | None = None
        try:
            samples = await self._sample(step, groups) if self._steps == step else []
            if samples and self._steps == step:
                gaps = await self._compare(samples, version)
        except Exception as error:  # noqa: BLE001 - the run is whole without its probes
            self._log_failure(version, error)
        if gaps is None or not gaps.numel():
            self._skipped += 1
        else:
            self._gaps.append(gaps)

    async def _sample(self, step: int, groups: Sequence[PromptGroup]) -> list[TrainSample]:
        """Completions of the groups' prompts in turn; their seeds depend on step and place."""
        config = self._config
        length = min(COMPLETION_TOKENS, config.max_completion_tokens, config.parity_probe_tokens)
        prompts = [group.flat()[0].rollout for group in groups]
        places = range(math.ceil(config.parity_probe_tokens / length))
        options: dict[str, Any] = routing_options(
            config.replay, has_experts=self._infra.has_experts
        )
        calls = [
            self._infra.sampler.sample_with_prompt_tokens(
                prompt.tokens[: prompt.prompt_len],
                max_tokens=length,
                temperature=config.temperature,
                max_seq_len=config.max_seq_len,
                seed=call_seed(config.seed, step, place),
                **options,
            )
            for place, prompt in zip(places, itertools.cycle(prompts), strict=False)
        ]
        return [
            TrainSample.from_rollout(completion_sample(completion, 0.0), 0.0, config.replay)
            for completions in await gather_or_cancel(calls)
            for completion in completions
        ]

    async def _compare(self, samples: Sequence[TrainSample], version: int) -> Tensor:
        """The gaps of the samples that ``version`` has sampled."""
        scored = await self._infra.policy_client.forward(
            [sample.datum for sample in samples],
            "cross_entropy",
            {"temperature": self._config.temperature},
        )
        logprobs = [output["logprobs"].data for output in scored.loss_fn_outputs]
        return logprob_gaps(samples, logprobs, version)

    def _log_failure(self, version: int, error: Exception) -> None:
        if not self._has_failed:
            logger.warning(
                "the parity probe of weight version %d failed; further failures are only counted "
                "(parity/probes_skipped): %s: %s",
                version,
                type(error).__name__,
                error,
            )
        self._has_failed = True
