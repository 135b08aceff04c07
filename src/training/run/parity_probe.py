"""Whether sampler and trainer agree where no trained sample can tell: a probe per weight sync.

Off-policy the weights that drew a sample are gone when it is trained, so a step's own forward
compares nothing (``parity``). Here a few short completions are drawn afresh once a snapshot is
served, and the trainer scores them if it still has that snapshot's weights. Prompts are those that
the step before has trained. The draws are in no budget and no count of the training.

The trainer executes what it is asked for in order. A forward that is asked for before the next
optimizer step is so computes with the served weights, however busy the trainer is, and nothing
waits for it. Completions that come later are thrown away. Where they always would, since weight
syncs take longer than steps, an optimizer step waits for them now and then.
"""

from __future__ import annotations

import asyncio
import contextlib
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
WAIT_RATIO = 50.0
"""Optimizer steps wait for probes for at most one part in so many of the time."""


class Patience:
    """How long optimizer steps wait for probes: a fraction of the time, and only where that helps.

    What was not waited is saved up, and is spent once it would have sufficed for the probe that
    came too late last. Times are the running loop's.
    """

    def __init__(self) -> None:
        self._since = _now()
        self._due_at = self._since
        self._late_s = math.inf

    def allowed_s(self) -> float:
        """Seconds that the optimizer step which is due now may wait."""
        self._due_at = _now()
        saved_up = (self._due_at - self._since) / WAIT_RATIO
        return saved_up if self._late_s <= saved_up else 0.0

    def spend(self) -> None:
        """A wait has ended now."""
        self._since = _now()

    def note_late(self, still_s: float = 0.0) -> None:
        """What the last step that was due did not wait for comes now, or in ``still_s`` seconds."""
        self._late_s = _now() + still_s - self._due_at


class ParityProbe:
    """Probes of a run, one at a time; made and used on the trainer's event loop.

    Off where every step waits for its weight sync: its own samples tell. What fails in a probe is
    said once in the log and never ends the run. ``steps`` counts the optimizer steps of before.
    """

    def __init__(self, config: AsyncConfig, infra: RunInfra, steps: int = 0) -> None:
        self._config = config
        self._infra = infra
        self._is_on = config.overlaps and config.parity_probe_tokens > 0
        self._steps_asked = steps
        self._saved_step = steps  # of the snapshot that was saved last
        self._publishing: asyncio.Task[None] | None = None
        self._running: asyncio.Task[None] | None = None
        self._is_settled = asyncio.Event()  # the probe is scored whatever follows, or never will be
        self._is_settled.set()
        self._patience = Patience()
        self._draw_s = 0.0  # of the last probe
        self._gaps: list[Tensor] = []
        self._skipped = 0
        self._has_failed = False

    def expect(self, step: int, publishing: asyncio.Task[None]) -> None:
        """``publishing`` has the trainer's weights served, those of ``step``; then it is time."""
        if self._is_on:
            self._saved_step = step
            self._publishing = publishing

    def begin(self, version: int, groups: Sequence[PromptGroup]) -> None:
        """Probe what was expected, which is served now, as weight version ``version``.

        ``groups`` are those of its step, whose prompts are drawn from. A probe that still runs is
        given up.
        """
        if not self._is_on:
            return
        if self._running is not None and not self._running.done():
            self._running.cancel()
            self._skipped += 1
            if not self._is_settled.is_set():
                self._patience.note_late()
        self._is_settled = is_settled = asyncio.Event()
        self._running = asyncio.create_task(
            self._probe(self._saved_step, version, groups, is_settled)
        )

    async def before_step(self) -> None:
        """To be awaited right before an optimizer step is asked for: the weights of now end there.

        Where their probe is still to come, it is waited for as long as ``Patience`` allows.
        """
        if self._is_to_come() and (allowed_s := self._patience.allowed_s()):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(allowed_s):
                    await self._until_settled()
            self._patience.spend()
        self._steps_asked += 1

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
        """End what runs; it is not counted."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    def _is_to_come(self) -> bool:
        """Whether the trainer's weights are still to be probed."""
        if self._publishing is None or self._steps_asked != self._saved_step:
            return False
        return not (self._publishing.done() and self._is_settled.is_set())

    async def _until_settled(self) -> None:
        assert self._publishing is not None, "a probe is to come"
        await asyncio.wait([self._publishing])  # its error is raised where it is awaited
        await self._is_settled.wait()

    async def _probe(
        self, step: int, version: int, groups: Sequence[PromptGroup], is_settled: asyncio.Event
    ) -> None:
        """Compare, if the trainer still has the weights of ``step`` once all is drawn."""
        gaps: list[Tensor] = []
        try:
            if samples := await self._drawn_in_time(step, groups):
                gaps = await self._compared(samples, version, is_settled)
        except Exception as error:  # noqa: BLE001 - the run is whole without its probes
            self._note_failure(version, error)
        finally:
            is_settled.set()
        self._gaps.extend(gaps)
        self._skipped += not any(gap.numel() for gap in gaps)

    async def _drawn_in_time(self, step: int, groups: Sequence[PromptGroup]) -> list[TrainSample]:
        """Fresh samples; none where the optimizer step came first, which is noted in seconds."""
        if self._steps_asked != step:
            self._patience.note_late(self._draw_s)
            return []
        began = _now()
        samples = await self._drawn(step, groups)
        self._draw_s = _now() - began
        if self._steps_asked != step:
            self._patience.note_late()
            return []
        return samples

    async def _drawn(self, step: int, groups: Sequence[PromptGroup]) -> list[TrainSample]:
        """Completions of the groups' prompts in turn; their seeds are of the step and the place."""
        config = self._config
        length = min(COMPLETION_TOKENS, config.max_completion_tokens, config.parity_probe_tokens)
        prompts = [group.flat()[0].drawn for group in groups]
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
            TrainSample.from_rollout(completion_sample(completion, reward=0.0), 0.0, config.replay)
            for completions in await gather_or_cancel(calls)
            for completion in completions
        ]

    async def _compared(
        self, samples: Sequence[TrainSample], version: int, is_settled: asyncio.Event
    ) -> list[Tensor]:
        """The gaps of the samples that ``version`` has drawn."""
        scoring = self._infra.policy_client.forward(
            [sample.datum for sample in samples],
            "cross_entropy",
            {"temperature": self._config.temperature},
        )
        is_settled.set()
        scored = await scoring
        rows = [output["logprobs"].data for output in scored.loss_fn_outputs]
        return [logprob_gaps(samples, rows, version)]

    def _note_failure(self, version: int, error: Exception) -> None:
        if not self._has_failed:
            logger.warning(
                "the parity probe of weight version %d failed; others that do are only counted "
                "(parity/probes_skipped): %s: %s",
                version,
                type(error).__name__,
                error,
            )
        self._has_failed = True


def _now() -> float:
    """Seconds on the running loop's clock."""
    return asyncio.get_running_loop().time()
