"""From a row to its group: calls of the user's rollout function, judged and put together.

Runs on the event loop of the rollouts, one task per draw. A draw that fails for a reason that may
pass is tried again and then done without; any other error ends the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from hearth.errors import ConfigError
from training.config.async_recipe import AsyncConfig
from training.data.rows import IndexedRow
from training.data.seeds import row_seed
from training.rewards.scoring import gather_or_cancel
from training.rollouts.failures import CircuitBreaker, is_recoverable, with_retries
from training.rollouts.sampler import RolloutContext, current_rollout
from training.rollouts.thread import describe_place
from training.samples.groups import ExampleAnswer, PromptGroup, RowOutcome
from training.samples.rollout import OPTIONAL_ARGUMENTS, Rollout, RolloutFn, RolloutRun, runs_of

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
    """What a row's draws gave, without a group being made of it."""

    runs: list[RolloutRun]
    failed: int
    """Draws that failed or gave nothing."""


@dataclass(frozen=True)
class _Drawn:
    """What one draw gave: trajectories, or none and perhaps why."""

    runs: list[RolloutRun]
    row_meta: dict[str, Any] | None = None
    error: Exception | None = None


GroupMaker = Callable[[Submission, list[RolloutRun], dict[str, Any] | None], PromptGroup]
"""Makes a row's trajectories a group, given what belongs to the row (``Rollout.row_meta``)."""


class Rollouts:
    """Draws whole rows with a rollout function.

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
        breaker: CircuitBreaker | None = None,
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
        self._breaker = breaker or CircuitBreaker()
        self.lengths: dict[int, list[int]] = {}
        """Drawn tokens of each finished draw, of each row that is on its way."""
        self._calls: dict[asyncio.Task[Any], str] = {}

    async def draw(self, submitted: Submission) -> RowOutcome:
        """All draws of a row, and the group that they make.

        Raises:
            Exception: what a rollout function raised that no second try mends.
            RolloutsFailingError: too many draws fail.
        """
        return await self._outcome(submitted, await self._draw_all(submitted))

    async def trajectories(self, submitted: Submission) -> RowTrajectories:
        """All draws of a row as they are, for who only looks at them; raises as ``draw``."""
        drawn = await self._draw_all(submitted)
        return RowTrajectories(
            [run for sample in drawn for run in sample.runs],
            failed=sum(not sample.runs for sample in drawn),
        )

    def places(self, limit: int) -> list[str]:
        """One line for each of the ``limit`` oldest calls under way; from any thread.

        Example: ``row 7, draw 3: rollout.py:41 in rollout_fn, tasks.py:639 in sleep``
        """
        calls = list(self._calls.items())[: max(0, limit)]
        return [f"{where}: {describe_place(task)}" for task, where in calls]

    async def _draw_all(self, submitted: Submission) -> list[_Drawn]:
        index = submitted.row.index
        self.lengths[index] = []
        samples = range(self._config.completions_per_prompt)
        try:
            return await gather_or_cancel([self._draw_one(submitted, sample) for sample in samples])
        finally:
            self.lengths.pop(index, None)

    async def _draw_one(self, submitted: Submission, sample: int) -> _Drawn:
        where = f"{submitted.place}, draw {sample}"
        try:
            drawn = await self._tried(lambda: self._call(submitted, sample, where), where)
        except Exception as error:
            if not is_recoverable(error):
                raise
            return _Drawn([], error=error)
        if drawn.runs:
            self._breaker.record_success()
            self.lengths[submitted.row.index].append(_length(drawn.runs))
        return drawn

    @contextlib.contextmanager
    def _noted(self, where: str) -> Iterator[None]:
        task = asyncio.current_task()
        assert task is not None
        self._calls[task] = where
        try:
            yield
        finally:
            del self._calls[task]

    async def _call(self, submitted: Submission, sample: int, where: str) -> _Drawn:
        row = submitted.row
        draw = RolloutContext(
            row_seed(self._config.seed, row.index),
            sample,
            submitted.weight_version,
            submitted.is_trained,
        )
        current_rollout.set(draw)
        # The user may write into its row; the next draw must not read it.
        pending = self._fn(copy.deepcopy(row.row), **self._arguments(row, sample))
        if not inspect.isawaitable(pending):
            raise TypeError(
                f"rollout_fn must be an async function, got {type(pending).__name__} from its call"
            )
        with self._noted(where):
            returned = await pending
        runs = runs_of(returned, where)
        draw.fill_versions(runs)
        draw.fill_routing(runs)
        return _Drawn(runs, returned.row_meta if isinstance(returned, Rollout) else None)

    def _arguments(self, row: IndexedRow, sample: int) -> dict[str, Any]:
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

    async def _tried(self, call: Callable[[], Awaitable[T]], where: str) -> T:
        """What ``call()`` gives, tried again as often as the config says.

        The breaker hears of what is given up for good: an outage that a pause outlasts ends no run,
        however many draws are on their way.

        Raises:
            Exception: a fatal error, with a note of where; or the last attempt's.
            RolloutsFailingError: too much was given up.
        """
        try:
            return await with_retries(
                call,
                attempts=1 + self._config.rollout_retries,
                timeout_s=self._config.rollout_timeout_s,
                on_failure=lambda error, attempt: logger.warning(
                    "%s, attempt %d failed: %s: %s", where, attempt, type(error).__name__, error
                ),
            )
        except Exception as error:
            if not is_recoverable(error):
                error.add_note(f"in the rollout of {where}")
                raise
            self._breaker.record_failure(error)
            self._breaker.check()
            raise

    async def _outcome(self, submitted: Submission, drawn: list[_Drawn]) -> RowOutcome:
        runs = [run for sample in drawn for run in sample.runs]
        errors = [sample.error for sample in drawn if sample.error is not None]
        kept = sum(bool(sample.runs) for sample in drawn)
        group, reason = None, None
        if kept < self._config.min_group_size or len(runs) < 2:
            reason = "failed" if errors else "too_few"
        else:
            metas = [sample.row_meta for sample in drawn if sample.row_meta is not None]
            assert self._make_group is not None, "rollouts that are trained make groups"
            group = self._make_group(submitted, runs, metas[0] if metas else None)
            group, reason = await self._judged(group, errors)
        return RowOutcome(
            submitted.row,
            group=group,
            dropped=reason,
            completions=len(runs),
            truncated=sum(run.segments[-1].finish_reason == "length" for run in runs),
            rewards=[run.reward for run in runs],
            error=errors[-1] if errors else None,
            failed_samples=sum(sample.error is not None for sample in drawn),
            empty_samples=sum(not sample.runs and sample.error is None for sample in drawn),
            example=_example(runs) if runs else None,
            parsed=[run.parsed for run in runs if run.parsed is not None],
        )

    async def _judged(
        self, group: PromptGroup, errors: list[Exception]
    ) -> tuple[PromptGroup | None, str | None]:
        """The group with its credit, or why it is dropped; what failed is added to ``errors``."""
        where = f"row {group.row.index}, credit"
        try:
            group = await self._credited(group, where)
        except Exception as error:
            if not is_recoverable(error):
                raise
            errors.append(error)
            return None, "failed"
        return (group, None) if self._is_accepted(group) else (None, "filtered")

    async def _credited(self, group: PromptGroup, where: str) -> PromptGroup:
        credit = self._credit
        if credit is None:
            return group
        with self._noted(where):
            return await self._tried(lambda: credit(group), where)

    def _is_accepted(self, group: PromptGroup) -> bool:
        if self._accepts is None:
            return True
        try:
            return bool(self._accepts(group))
        except Exception as error:
            error.add_note(f"in dynamic_filter_fn, with the group of row {group.row.index}")
            raise


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
    drawn = [token for token, live in zip(last.tokens, last.loss_mask, strict=True) if live]
    return ExampleAnswer(last.text, drawn, run.reward, last.finish_reason, run.parsed)


def _length(runs: list[RolloutRun]) -> int:
    return sum(segment.completion_len for run in runs for segment in run.segments)
