"""Evaluation beside the training: held-out rows go through the user's rollout function meanwhile.

Its rollouts pass no gate, and are in no budget and no count of the training. Whatever fails in them
leaves a record out and never ends a run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from training.config.async_recipe import AsyncConfig
from training.data.rows import IndexedRow, Row
from training.rewards.scoring import gather_or_cancel
from training.rollouts.runner import Rollouts, RowTrajectories, Submission
from training.run.evaluation import EVAL_SEED_OFFSET, EvalResult, EvalSample
from training.run.state import Run
from training.samples.rollout import RolloutFn, RolloutRun

RunRow = Callable[[], Coroutine[Any, Any, RowTrajectories]]


class BackgroundEvaluation:
    """Evaluations of a run, one at a time; lives on the trainer's event loop.

    ``submit`` has a row sampled, on the thread of all rollouts. As many rows are sampled at once as
    have a batch's number of samples, at least one. A weight sync in the middle waits for the
    completions that run, as for any other, and the next ones are the new version's: the record says
    which sampled it.
    """

    def __init__(
        self,
        config: AsyncConfig,
        run: Run,
        rollout_fn: RolloutFn,
        submit: Callable[[RunRow], Awaitable[RowTrajectories]],
    ) -> None:
        self._config = config
        self._run = run
        self._submit = submit
        self._rollout_fn = rollout_fn
        self._rollouts = self._fresh_rollouts()
        batch = config.prompt_groups_per_step * config.completions_per_prompt
        self._rows_at_once = max(1, batch // config.eval_samples_per_prompt)
        self._running: asyncio.Task[None] | None = None
        self._is_last = False

    def begin_if_due(self, step: int, *, always: bool = False) -> None:
        """Begin an evaluation of the weights of ``step``, which the deployment serves now.

        While another one runs nothing begins; what was due then is due at the next weight sync.
        """
        if self._running is not None and not self._running.done():
            return
        if self._run.is_eval_due(self._config, step, always=always):
            self._run.eval_begun = step
            self._running = asyncio.create_task(self._evaluate(step))

    async def finish(self, step: int) -> None:
        """Wait for the evaluation under way, then for the last one, of the weights of ``step``.

        Nothing else goes on any more, so each row is progress.
        """
        self._is_last = True
        if self._running is not None:
            await self._running
        self.begin_if_due(step, always=True)
        if self._running is not None:
            await self._running

    def places(self, limit: int) -> list[str]:
        """One line for each of the ``limit`` oldest calls under way; from any thread."""
        return self._rollouts.places(limit)

    async def close(self) -> None:
        """End what runs; it leaves no record."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def _evaluate(self, step: int) -> None:
        began = self._run.now()
        try:
            result = await self._result()
        except Exception as error:  # noqa: BLE001 - whatever a rollout function raises
            self._run.note_failed_evaluation(step, error)
            return
        self._run.note_evaluation(step, result, {"perf/eval_time": self._run.now() - began})

    def _fresh_rollouts(self) -> Rollouts:
        """Rollouts that know nothing of earlier failures."""
        config = replace(
            self._config,
            seed=self._config.seed + EVAL_SEED_OFFSET,
            completions_per_prompt=self._config.eval_samples_per_prompt,
            min_group_size=1,
            router_replay=False,
        )
        return Rollouts(self._rollout_fn, config, num_rows=len(self._run.eval_rows))

    async def _result(self) -> EvalResult:
        self._rollouts = rollouts = self._fresh_rollouts()
        room = asyncio.Semaphore(self._rows_at_once)

        async def sample_row(place: int, row: Row) -> RowTrajectories:
            async with room:
                version = self._run.version
                where = IndexedRow(place, epoch=0, row=row, source=place)
                submission = Submission(where, version, version, is_trained=False)
                trajectories = await self._submit(lambda: rollouts.trajectories(submission))
            if self._is_last:
                self._run.on_progress()
            return trajectories

        rows = self._run.eval_rows
        sampled = await gather_or_cancel([sample_row(place, row) for place, row in enumerate(rows)])
        return judge_trajectories(rows, sampled)


def judge_trajectories(rows: Sequence[Row], sampled: Sequence[RowTrajectories]) -> EvalResult:
    """The result of held-out rows that were rolled out, in their order."""
    samples = [
        trajectory_judged(row, place, run)
        for place, (row, trajectories) in enumerate(zip(rows, sampled, strict=True))
        for run in trajectories.runs
    ]
    return EvalResult(
        samples,
        failed_samples=sum(row.failed for row in sampled),
        sampled_trajectories=[row.sampled_trajectories for row in sampled],
    )


def trajectory_judged(row: Row, place: int, run: RolloutRun) -> EvalSample:
    """A trajectory as a held-out answer: its last turn's text, and the tokens of all of them."""
    last = run.segments[-1]
    return EvalSample(
        row,
        place,
        run.reward,
        last.text,
        sum(segment.completion_len for segment in run.segments),
        last.finish_reason == "length",
        [pair for segment in run.segments for pair in segment.versions or []],
        run.parsed,
    )
