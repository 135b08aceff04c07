"""From a row to its group: calls the user's rollout function, checks and groups what it returns.

Runs on the event loop of the rollouts, one task per rollout. A rollout that fails for a reason that
may pass is tried again and then dropped; any other error ends the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from hearth.errors import ConfigError
from training.config.async_recipe import AsyncConfig
from training.data.rows import IndexedRow
from training.data.seeds import row_seed
from training.rewards.scoring import gather_or_cancel
from training.rollouts.failures import (
    CircuitBreaker,
    DroppedRolloutError,
    RetryLimits,
    is_recoverable,
    with_retries,
)
from training.rollouts.sampler import RolloutContext, current_rollout
from training.rollouts.thread import describe_place
from training.samples.groups import ExampleAnswer, PromptGroup, RowOutcome
from training.samples.rollout import (
    OPTIONAL_ARGUMENTS,
    Rollout,
    RolloutFn,
    RolloutRun,
    collect_runs,
)
from training.samples.trajectories import SampledTrajectory, failed_trajectory, trajectory_of_run

logger = logging.getLogger(__name__)

T = TypeVar("T")

GroupFilter = Callable[[PromptGroup], bool]
"""Whether a group is worth training on (``dynamic_filter_fn``)."""
GroupCredit = Callable[[PromptGroup], Awaitable[PromptGroup]]
"""A group with other advantages than those of its rewards alone, such as one per turn."""


@dataclass(frozen=True)
class Submission:
    """A row on its way: the versions at which it was submitted, by the gate's count (weight syncs
    since the start) and by the deployment's."""

    row: IndexedRow
    version: int
    weight_version: int
    is_trained: bool = True
    """False for held-out rows."""

    @property
    def place(self) -> str:
        """Which row it is, in logs and errors."""
        return f"row {self.row.index}" if self.is_trained else f"held-out row {self.row.index}"


@dataclass(frozen=True)
class RowTrajectories:
    """The trajectories of a row, without a group made of them."""

    runs: list[RolloutRun]
    failed: int
    """Rollouts that failed or returned nothing."""
    sampled_trajectories: Sequence[SampledTrajectory] = ()
    """All that was sampled, and why there is not more."""


@dataclass(frozen=True)
class _RolloutReturn:
    """The trajectories of one rollout, or none and perhaps the error."""

    runs: list[RolloutRun]
    row_meta: dict[str, Any] | None = None
    error: Exception | None = None
    sampled_trajectories: Sequence[SampledTrajectory] = ()


GroupMaker = Callable[[Submission, list[RolloutRun], dict[str, Any] | None], PromptGroup]
"""Makes a row's trajectories a group, given what belongs to the row (``Rollout.row_meta``)."""


class Rollouts:
    """Runs the rollouts of whole rows.

    Raises:
        ConfigError: the rollout function or the filter cannot be called.
    """

    def __init__(
        self,
        rollout_fn: RolloutFn,
        config: AsyncConfig,
        *,
        num_rows: int,
        make_group: GroupMaker | None = None,
        accepts: GroupFilter | None = None,
        credit: GroupCredit | None = None,
    ) -> None:
        _check_filter(accepts)
        self._fn = rollout_fn
        self._declared = find_declared_arguments(rollout_fn)
        self._config = config
        self._num_rows = num_rows
        self._make_group = make_group
        self._accepts = accepts
        self._credit = credit
        self.breaker = CircuitBreaker()
        self.sampled_trajectories: dict[int, list[SampledTrajectory]] = {}
        """The trajectories of each finished rollout, for each row that is running."""
        self._calls: dict[asyncio.Task[Any], str] = {}

    async def run_row(self, submitted: Submission) -> RowOutcome:
        """Run all rollouts of a row and group them.

        Raises:
            Exception: what a rollout function raised that no second try mends.
            RolloutsFailingError: too many rollouts fail.
        """
        return await self._make_outcome(submitted, await self._run_rollouts(submitted))

    async def trajectories(self, submitted: Submission) -> RowTrajectories:
        """Run all rollouts of a row and return them ungrouped; raises as ``run_row``."""
        returns = await self._run_rollouts(submitted)
        return RowTrajectories(
            [run for sample in returns for run in sample.runs],
            failed=sum(not sample.runs for sample in returns),
            sampled_trajectories=[
                trajectory for sample in returns for trajectory in sample.sampled_trajectories
            ],
        )

    def places(self, limit: int) -> list[str]:
        """One line for each of the ``limit`` oldest calls under way; from any thread.

        Example: ``row 7, sample 3: rollout.py:41 in rollout_fn, tasks.py:639 in sleep``
        """
        calls = list(self._calls.items())[: max(0, limit)]
        return [f"{where}: {describe_place(task)}" for task, where in calls]

    async def _run_rollouts(self, submitted: Submission) -> list[_RolloutReturn]:
        index = submitted.row.index
        self.sampled_trajectories[index] = []
        samples = range(self._config.completions_per_prompt)
        try:
            return await gather_or_cancel(
                [self._run_rollout(submitted, sample) for sample in samples]
            )
        finally:
            self.sampled_trajectories.pop(index, None)

    async def _run_rollout(self, submitted: Submission, sample: int) -> _RolloutReturn:
        where, began = f"{submitted.place}, sample {sample}", time.time()
        try:
            returns = await self._retry(lambda: self._call(submitted, sample, where), where)
        except Exception as error:
            if isinstance(error, DroppedRolloutError):
                logger.warning("%s is dropped: %s", where, error)
            elif not is_recoverable(error):
                raise
            return _RolloutReturn(
                [], error=error, sampled_trajectories=[failed_trajectory(error, began)]
            )
        if returns.runs:
            self.breaker.record_success()
            self.sampled_trajectories[submitted.row.index].extend(returns.sampled_trajectories)
        return returns

    @contextlib.contextmanager
    def _track_call(self, where: str) -> Iterator[None]:
        task = asyncio.current_task()
        assert task is not None
        self._calls[task] = where
        try:
            yield
        finally:
            del self._calls[task]

    async def _call(self, submitted: Submission, sample: int, where: str) -> _RolloutReturn:
        row = submitted.row
        context = RolloutContext(
            row_seed(self._config.seed, row.index),
            sample,
            submitted.weight_version,
            submitted.is_trained,
        )
        current_rollout.set(context)
        began = time.time()
        # The user may write into its row; the next rollout must not see that.
        pending = self._fn(copy.deepcopy(row.row), **self._select_arguments(row, sample))
        if not inspect.isawaitable(pending):
            raise TypeError(
                f"rollout_fn must be an async function, got {type(pending).__name__} from its call"
            )
        with self._track_call(where):
            returned = await pending
        runs = collect_runs(returned, where)
        context.fill_versions(runs)
        context.fill_routing(runs)
        context.fill_seeds(runs)
        return _RolloutReturn(
            runs,
            returned.row_meta if isinstance(returned, Rollout) else None,
            sampled_trajectories=[trajectory_of_run(run, began, context.seen) for run in runs]
            or [
                SampledTrajectory(
                    fate="failed", reason="its rollout returned nothing", started=began
                )
            ],
        )

    def _select_arguments(self, row: IndexedRow, sample: int) -> dict[str, Any]:
        if not self._declared:
            return {}
        known = {
            "cursor_index": row.index,
            "row_index": row.source,
            "epoch": row.epoch,
            "rollout_idx": sample,
            "sample_index": sample,
            "end_of_epoch": (row.index + 1) % self._num_rows == 0,
        }
        return {name: known[name] for name in self._declared}

    async def _retry(self, call: Callable[[], Awaitable[T]], where: str) -> T:
        """Call ``call()``, and again as often as the config allows.

        The breaker counts only rollouts that are dropped in the end: a short outage ends no run,
        however many rollouts are running.

        Raises:
            Exception: a fatal error, with a note of where; or the last attempt's.
            RolloutsFailingError: too many rollouts were dropped.
        """
        try:
            return await with_retries(
                call,
                RetryLimits(1 + self._config.rollout_retries, self._config.rollout_timeout_s),
                on_failure=lambda error, attempt: logger.warning(
                    "%s, attempt %d failed: %s: %s", where, attempt, type(error).__name__, error
                ),
            )
        except Exception as error:
            if not is_recoverable(error):
                error.add_note(f"in the rollout of {where}")
                raise
            self.breaker.record_failure(error)
            self.breaker.check()
            raise

    async def _make_outcome(
        self, submitted: Submission, returns: list[_RolloutReturn]
    ) -> RowOutcome:
        runs = [run for sample in returns for run in sample.runs]
        errors = [sample.error for sample in returns if sample.error is not None]
        trained = [run for run in runs if self._is_trained(run)]
        kept = sum(any(map(self._is_trained, sample.runs)) for sample in returns)
        metas = [sample.row_meta for sample in returns if sample.row_meta is not None]
        row_meta = metas[0] if metas else None
        group, reason = None, None
        if kept < self._config.min_group_size or len(trained) < 2:
            reason = "failed" if errors else "too_few"
        else:
            assert self._make_group is not None, "rollouts that are trained make groups"
            group = self._make_group(submitted, trained, row_meta)
            group, reason = await self._credit_and_filter(group, errors)
        return RowOutcome(
            submitted.row,
            group=group,
            dropped=reason,
            completions=len(runs),
            truncated=sum(map(_is_truncated, runs)),
            rewards=[run.reward for run in runs],
            error=errors[-1] if errors else None,
            failed_samples=sum(sample.error is not None for sample in returns),
            empty_samples=sum(not sample.runs and sample.error is None for sample in returns),
            example=_example(runs) if runs else None,
            parsed=[run.parsed for run in runs if run.parsed is not None],
            sampled_trajectories=[
                self._judge(trajectory)
                for sample in returns
                for trajectory in sample.sampled_trajectories
            ],
            row_meta=row_meta,
        )

    def _judge(self, trajectory: SampledTrajectory) -> SampledTrajectory:
        is_cut = bool(trajectory.segments) and trajectory.segments[-1].finish_reason == "length"
        if is_cut and self._config.truncated_completions == "drop":
            return replace(trajectory, fate="truncated", reason="cut at max_completion_tokens")
        return trajectory

    def _is_trained(self, run: RolloutRun) -> bool:
        return self._config.truncated_completions == "score" or not _is_truncated(run)

    async def _credit_and_filter(
        self, group: PromptGroup, errors: list[Exception]
    ) -> tuple[PromptGroup | None, str | None]:
        """The group with its credit, or why it is dropped; what failed is added to ``errors``."""
        where = f"row {group.row.index}, credit"
        try:
            group = await self._assign_credit(group, where)
        except Exception as error:
            if not is_recoverable(error):
                raise
            errors.append(error)
            return None, "failed"
        return (group, None) if self._is_accepted(group) else (None, "filtered")

    async def _assign_credit(self, group: PromptGroup, where: str) -> PromptGroup:
        credit = self._credit
        if credit is None:
            return group
        with self._track_call(where):
            return await self._retry(lambda: credit(group), where)

    def _is_accepted(self, group: PromptGroup) -> bool:
        if self._accepts is None:
            return True
        try:
            return bool(self._accepts(group))
        except Exception as error:
            error.add_note(f"in dynamic_filter_fn, with the group of row {group.row.index}")
            raise


def _is_truncated(run: RolloutRun) -> bool:
    """Whether the last turn was cut at a length limit."""
    return run.segments[-1].finish_reason == "length"


def _check_filter(accepts: GroupFilter | None) -> None:
    if accepts is not None and (not callable(accepts) or inspect.iscoroutinefunction(accepts)):
        raise ConfigError(
            f"dynamic_filter_fn must be a plain function of a group, got {accepts!r}: what it must "
            "wait for belongs into the rollout function"
        )


def find_declared_arguments(rollout_fn: RolloutFn) -> list[str]:
    """Those of ``OPTIONAL_ARGUMENTS`` that a rollout function takes.

    Raises:
        ConfigError: it cannot be called with a row.
    """
    if not callable(rollout_fn):
        raise ConfigError(
            f"rollout_fn_factory must return an async function, got {rollout_fn!r}: "
            "make_rollout_fn(setup) ends with `return rollout_fn`"
        )
    signature = inspect.signature(rollout_fn)
    # The first parameter is the row, whatever it is called.
    first, rest = list(signature.parameters)[:1], list(signature.parameters.values())[1:]
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = [parameter.name for parameter in rest if parameter.kind in by_name]
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in rest)
    declared = [
        name for name in OPTIONAL_ARGUMENTS if name in named or (takes_any and name not in first)
    ]
    try:
        signature.bind({}, **dict.fromkeys(declared))
    except TypeError as error:
        raise ConfigError(
            f"rollout_fn must be callable with a row alone, got rollout_fn{signature} ({error}): "
            f"beside the row it may declare {', '.join(OPTIONAL_ARGUMENTS)}"
        ) from None
    return declared


def _example(runs: Sequence[RolloutRun]) -> ExampleAnswer:
    run = min(runs, key=lambda run: run.parsed is not False)  # one without an answer, if any
    last = run.segments[-1]
    tokens = last.arrays.tokens[last.arrays.is_sampled].tolist()
    return ExampleAnswer(last.text, tokens, run.reward, last.finish_reason, run.parsed)
