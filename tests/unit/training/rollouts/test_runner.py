import asyncio
import functools
import logging
from typing import Any, cast

import pytest
from tests.unit.training.trial_rollouts import (
    rollout_number,
    rollouts_of,
    row_of,
    run_row,
    sample_of,
)
from tests.unit.virtual_time import now, run_virtual

from hearth.errors import ConfigError, TransportError
from training.data.rows import IndexedRow
from training.rollouts.failures import CircuitBreaker, RecoverableRolloutError, RolloutsFailingError
from training.rollouts.runner import Submission, find_declared_arguments
from training.samples.groups import PromptGroup, RowOutcome
from training.samples.rollout import (
    OPTIONAL_ARGUMENTS,
    Rollout,
    RolloutFn,
    RolloutResult,
    RolloutRun,
    RolloutSample,
)

ROW = row_of(13, epoch=1, source=4)


def run(fn: RolloutFn, *, row: IndexedRow = ROW, **options: Any) -> RowOutcome:
    return run_row(fn, row, **options)


def samples(done: RowOutcome) -> list[RolloutSample]:
    return [sample.rollout for sample in done.group.flat()]


def rewarding(*rewards: float | None) -> RolloutFn:
    """A rollout function whose call ``i`` earns ``rewards[i]``, or is dropped."""

    async def rollout_fn(_row: dict[str, Any]) -> RolloutSample | None:
        reward = rewards[rollout_number()]
        return None if reward is None else sample_of(reward)

    return rollout_fn


# Calls.


def test_t141_the_function_is_called_once_per_sample():
    calls: list[dict[str, Any]] = []

    async def rollout_fn(row: dict[str, Any]) -> RolloutSample:
        calls.append(row)
        return sample_of(float(len(calls)))

    rollouts = rollouts_of(rollout_fn, completions_per_prompt=3)

    async def all_rows() -> None:
        submissions = [Submission(row_of(index), 0, 0) for index in range(5)]
        await asyncio.gather(*map(rollouts.run_row, submissions))

    run_virtual(all_rows)

    assert sorted(row["number"] for row in calls) == [i for i in range(5) for _ in range(3)]


def test_the_rollouts_of_a_row_run_side_by_side_and_keep_their_order():
    async def rollout_fn(_row: dict[str, Any]) -> RolloutSample:
        await asyncio.sleep(10 - rollout_number())
        return sample_of(float(rollout_number()))

    async def timed() -> tuple[RowOutcome, float]:
        rollouts = rollouts_of(rollout_fn, completions_per_prompt=4)
        return await rollouts.run_row(Submission(ROW, 0, 0)), now()

    done, seconds = run_virtual(timed)

    assert done.rewards == [0.0, 1.0, 2.0, 3.0]
    assert seconds == 10.0


def test_a_group_knows_the_versions_at_its_submission():
    done = run(rewarding(1.0, 0.0))

    assert (done.group.row, done.group.submit_version) == (ROW, 2)
    assert [sample.versions for sample in samples(done)] == [[[5, 2]]] * 2
    assert (done.completions, done.rewards, done.dropped, done.error) == (2, [1.0, 0.0], None, None)


def test_every_rollout_has_a_row_of_its_own():
    seen: list[list[str]] = []

    async def rollout_fn(row: dict[str, Any]) -> RolloutSample:
        seen.append(list(row["messages"]))
        row["messages"].append("mine")
        row.clear()
        return sample_of(float(rollout_number()))

    row = row_of(0, row={"messages": ["given"]})
    run(rollout_fn, row=row, completions_per_prompt=4)

    assert seen == [["given"]] * 4
    assert row.row == {"messages": ["given"]}


# Optional arguments.

KNOWN = {"cursor_index": 13, "row_index": 4, "epoch": 1, "end_of_epoch": False}


async def none(_row: Any) -> None:
    """Takes a row alone."""


async def some(_row: Any, epoch: int, *, rollout_idx: int) -> None:
    """Takes two more, one by keyword only."""


async def with_own(_row: Any, temperature: float = 1.0, epoch: int = -1) -> None:
    """Has a parameter of its own."""


async def anything(_row: Any, **known: Any) -> None:
    """Takes whatever there is."""


async def row_called_epoch(epoch: Any, row_index: int) -> None:
    """Calls its row what an argument is called."""


async def row_called_epoch_and_anything(epoch: Any, **known: Any) -> None:
    """The same, and takes the others."""


async def positional_only(_row: Any, epoch: int = 0, /, *, row_index: int) -> None:
    """Cannot be given the epoch by name."""


async def only_positions(*rows: Any) -> None:
    """Takes any number of positions."""


async def scored(scorer: Any, _row: Any, *, epoch: int) -> None:
    """To be bound to a scorer."""


class Player:
    async def __call__(self, _row: Any, *, sample_index: int) -> None:
        """A rollout function that keeps something."""

    async def play(self, _row: Any, end_of_epoch: bool) -> None:
        """A method."""


ALL = list(OPTIONAL_ARGUMENTS)
DECLARED = [
    (none, []),
    (some, ["epoch", "rollout_idx"]),
    (with_own, ["epoch"]),
    (anything, ALL),
    (row_called_epoch, ["row_index"]),
    (row_called_epoch_and_anything, [name for name in ALL if name != "epoch"]),
    (positional_only, ["row_index"]),
    (only_positions, []),
    (functools.partial(scored, "scorer"), ["epoch"]),
    (functools.partial(scored, "scorer", epoch=3), ["epoch"]),
    (Player(), ["sample_index"]),
    (Player().play, ["end_of_epoch"]),
]


@pytest.mark.parametrize(("fn", "declared"), DECLARED)
def test_a_function_gets_the_arguments_that_it_declares_and_can_be_called(fn, declared):
    assert find_declared_arguments(fn) == declared

    assert run(fn).dropped == "too_few"


def test_the_arguments_say_where_the_rollout_stands():
    seen: list[dict[str, Any]] = []

    async def rollout_fn(_row: Any, **known: Any) -> None:
        seen.append(known)

    run(rollout_fn, completions_per_prompt=3)

    assert seen == [KNOWN | {"rollout_idx": i, "sample_index": i} for i in range(3)]


@pytest.mark.parametrize(("index", "is_last"), [(8, False), (9, True), (10, False), (19, True)])
def test_the_last_row_of_an_epoch_is_told(index, is_last):
    seen: list[bool] = []

    async def rollout_fn(_row: Any, end_of_epoch: bool) -> None:
        seen.append(end_of_epoch)

    run(rollout_fn, row=row_of(index), num_rows=10)

    assert seen == [is_last] * 2


async def needs_two(_row: Any, scorer: Any) -> None:
    """Wants something that nobody gives."""


async def needs_position(_row: Any, epoch: int, /) -> None:
    """Wants the epoch by position."""


async def takes_nothing() -> None:
    """No place for a row."""


@pytest.mark.parametrize("fn", [needs_two, needs_position, takes_nothing])
def test_a_function_that_a_row_alone_cannot_call_is_refused_before_any_rollout(fn):
    with pytest.raises(ConfigError, match=r"rollout_fn must be callable with a row alone, got ro"):
        rollouts_of(fn)


@pytest.mark.parametrize("wrong", [None, 3, "rollout_fn"])
def test_a_factory_that_returns_no_function_is_told_so(wrong):
    with pytest.raises(ConfigError, match=r"rollout_fn_factory must return an async function, got"):
        rollouts_of(wrong)


def plain(_row: Any) -> RolloutSample:
    return sample_of()


def forgets_everything(_row: Any) -> None:
    """Neither async nor returning."""


@pytest.mark.parametrize(("fn", "got"), [(plain, "RolloutSample"), (forgets_everything, "None")])
def test_a_function_that_is_not_async_is_a_type_error_of_its_row(fn, got):
    with pytest.raises(TypeError, match=rf"rollout_fn must be an async function, got {got}") as e:
        run(fn)

    assert e.value.__notes__ == ["in the rollout of row 13, sample 0"]


# What rollouts give.


def test_t139_none_drops_the_sample_and_the_group_survives_with_the_rest():
    done = run(rewarding(1.0, None, 0.0, None), completions_per_prompt=4)

    assert done.group.rewards == [1.0, 0.0]
    assert (done.completions, done.empty_samples, done.failed_samples) == (2, 2, 0)


def test_a_rollout_that_sampled_nothing_counts_as_empty():
    async def rollout_fn(_row: Any) -> RolloutSample:
        mask = [0, 0, int(rollout_number() > 0), 0]
        return sample_of(float(rollout_number()), loss_mask=mask, logprobs=[0.0] * 4)

    done = run(rollout_fn, completions_per_prompt=3)

    assert (done.rewards, done.empty_samples, done.completions) == ([1.0, 2.0], 1, 2)


@pytest.mark.parametrize(
    ("rewards", "least", "reason"),
    [
        ((1.0, 0.0, None, None), 2, None),
        ((1.0, 0.0, None, None), 3, "too_few"),
        ((1.0, 0.0, 0.5, None), 3, None),
        ((1.0, None, None, None), 1, "too_few"),  # one has no spread, whatever the config says
        ((None, None, None, None), 1, "too_few"),
    ],
)
def test_a_group_needs_min_group_size_rollouts(rewards, least, reason):
    done = run(rewarding(*rewards), completions_per_prompt=4, min_group_size=least)

    assert (done.dropped, done.group is None) == (reason, reason is not None)


def test_several_runs_of_one_rollout_stand_for_themselves_in_the_group():
    async def rollout_fn(_row: Any) -> Rollout:
        mine = float(rollout_number())
        runs = [
            RolloutRun([sample_of(mine), sample_of(mine)]),
            RolloutRun([sample_of(-mine, finish_reason="length")]),
        ]
        return Rollout(runs, {"game": rollout_number()})

    done = run(rollout_fn)

    assert done.rewards == done.group.rewards == [0.0, 0.0, 1.0, -1.0]
    assert [len(sample) for sample in done.group.samples] == [2, 1, 2, 1]
    assert (done.completions, done.truncated) == (4, 2)
    assert done.group.row_meta == {"game": 0}


@pytest.mark.parametrize(
    "returned", [{"reward": 1.0}, sample_of(float("nan"))], ids=["type", "nan"]
)
def test_a_broken_contract_ends_the_run_and_names_row_and_rollout(returned):
    async def rollout_fn(_row: Any) -> RolloutResult:
        return returned if rollout_number() == 1 else sample_of()

    with pytest.raises((TypeError, ConfigError), match=r"^row 13, sample 1: ") as failure:
        run(rollout_fn)

    assert failure.value.__notes__ == ["in the rollout of row 13, sample 1"]


# The group's filter.


def has_spread(group: PromptGroup) -> bool:
    return len(set(group.rewards)) > 1


@pytest.mark.parametrize(("rewards", "reason"), [((1.0, 0.0), None), ((1.0, 1.0), "filtered")])
def test_the_documents_filter_drops_groups_without_spread(rewards, reason):
    done = run(rewarding(*rewards), accepts=has_spread)

    assert (done.dropped, done.group is None) == (reason, reason is not None)
    assert done.rewards == list(rewards)


def test_a_group_that_is_too_small_does_not_reach_the_filter():
    def fails(_group: PromptGroup) -> bool:
        raise AssertionError("asked")

    assert run(rewarding(1.0, None), accepts=fails).dropped == "too_few"


def test_a_filter_that_raises_ends_the_run_with_the_row():
    with pytest.raises(ZeroDivisionError) as failure:
        run(rewarding(1.0, 0.0), accepts=lambda group: len(group.rewards) < 1 / 0)

    assert failure.value.__notes__ == ["in dynamic_filter_fn, with the group of row 13"]


async def waits_for_a_judge(_group: PromptGroup) -> bool:
    return True


@pytest.mark.parametrize("wrong", [waits_for_a_judge, "spread", True])
def test_a_filter_is_a_plain_function(wrong):
    with pytest.raises(ConfigError, match="dynamic_filter_fn must be a plain function of a group"):
        rollouts_of(none, accepts=wrong)


# T161: failures.


class Failing:
    """A rollout function whose rollout ``failing`` fails with ``error`` at its first attempts."""

    def __init__(self, error: Exception, *, times: int, failing: int = 1) -> None:
        self.error = error
        self.times = times
        self.failing = failing
        self.attempts: list[int] = []

    async def __call__(self, _row: Any) -> RolloutSample:
        number = rollout_number()
        self.attempts.append(number)
        if number == self.failing and self.attempts.count(number) <= self.times:
            raise self.error
        return sample_of(float(number))


@pytest.mark.parametrize(
    "error",
    [
        TimeoutError("slow"),
        ConnectionError("gone"),
        RecoverableRolloutError("sandbox"),
        TransportError("no answer"),
    ],
)
def test_t161_a_recoverable_error_is_tried_again(error):
    fn = Failing(error, times=2)

    done = run(fn, completions_per_prompt=3)

    assert sorted(fn.attempts) == [0, 1, 1, 1, 2]
    assert (done.rewards, done.failed_samples, done.error) == ([0.0, 1.0, 2.0], 0, None)


def test_t161_a_rollout_that_fails_to_the_last_is_dropped_and_never_a_sample_with_reward_0(caplog):
    error = TimeoutError("slow")
    fn = Failing(error, times=99)

    with caplog.at_level(logging.WARNING):
        done = run(fn, completions_per_prompt=3, rollout_retries=1)

    assert (done.rewards, done.completions) == ([0.0, 2.0], 2)
    assert (done.failed_samples, done.error, done.dropped) == (1, error, None)
    assert len(samples(done)) == 2
    assert "row 13, sample 1, attempt 2 failed: TimeoutError: slow" in caplog.messages


def test_a_group_of_failures_is_dropped_as_failed():
    fn = Failing(ConnectionError("gone"), times=99)

    done = run(fn, rollout_retries=0)

    assert (done.group, done.dropped, done.rewards, done.failed_samples) == (
        None,
        "failed",
        [0.0],
        1,
    )


@pytest.mark.parametrize("error", [ValueError("bad"), AssertionError("no"), KeyError("messages")])
def test_t161_a_fatal_error_cancels_the_other_rollouts_and_names_row_and_rollout(error):
    ended: list[str] = []

    async def rollout_fn(_row: Any) -> RolloutSample:
        if rollout_number() == 2:
            await asyncio.sleep(1)
            raise error
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            ended.append(f"{rollout_number()} at {now()} s")
            raise
        return sample_of()

    with pytest.raises(type(error)) as failure:
        run(rollout_fn, completions_per_prompt=4)

    assert failure.value is error
    assert error.__notes__ == ["in the rollout of row 13, sample 2"]
    assert sorted(ended) == ["0 at 1.0 s", "1 at 1.0 s", "3 at 1.0 s"]


def test_cancelling_a_row_cancels_its_rollouts():
    ended: list[float] = []

    async def rollout_fn(_row: Any) -> None:
        try:
            await asyncio.sleep(100)
        finally:
            ended.append(now())

    rollouts = rollouts_of(rollout_fn)

    async def main() -> None:
        task = asyncio.create_task(rollouts.run_row(Submission(ROW, 0, 0)))
        await asyncio.sleep(3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(asyncio.all_tasks()) == 1

    run_virtual(main)

    assert ended == [3.0, 3.0]
    assert rollouts.sampled_trajectories == {}


def test_a_rollout_that_takes_too_long_is_tried_again():
    started: list[float] = []

    async def rollout_fn(_row: Any) -> RolloutSample:
        started.append(now())
        await asyncio.sleep(1000 if len(started) == 1 else 1)
        return sample_of(float(rollout_number()))

    done = run(rollout_fn, rollout_timeout_s=60.0)

    assert (done.rewards, done.failed_samples) == ([0.0, 1.0], 0)
    assert started[:2] == [0.0, 0.0]
    assert 60.0 < started[2] <= 60.5


def test_without_a_limit_a_rollout_may_take_any_time():
    async def rollout_fn(_row: Any) -> RolloutSample:
        await asyncio.sleep(500_000)
        return sample_of(float(rollout_number()))

    assert run(rollout_fn, rollout_timeout_s=None).rewards == [0.0, 1.0]


def test_the_breaker_ends_a_run_in_which_nothing_works():
    async def rollout_fn(_row: Any) -> RolloutSample:
        raise ConnectionError("refused")

    with pytest.raises(RolloutsFailingError, match=r"got 5 failures in a row, last with Connect"):
        run(rollout_fn, completions_per_prompt=8)


def test_an_outage_that_the_retries_outlast_ends_no_run():
    failed: set[int] = set()

    async def rollout_fn(_row: Any) -> RolloutSample:
        number = rollout_number()
        if number not in failed:
            failed.add(number)
            raise ConnectionError("the judge is being restarted")
        return sample_of(float(number))

    done = run(rollout_fn, completions_per_prompt=64)

    assert (len(failed), done.failed_samples, len(done.rewards)) == (64, 0, 64)


def test_the_breaker_is_told_of_successes_and_not_of_none():
    breaker = CircuitBreaker(max_in_a_row=3)
    script: list[object] = [
        TimeoutError("1"),
        None,
        TimeoutError("2"),
        sample_of(1.0),
        TimeoutError("3"),
        TimeoutError("4"),
        None,
        sample_of(0.0),
    ]

    async def rollout_fn(_row: Any) -> RolloutSample | None:
        step = script[rollout_number()]
        await asyncio.sleep(rollout_number())
        if isinstance(step, TimeoutError):
            raise step
        return cast("RolloutSample | None", step)

    done = run(rollout_fn, completions_per_prompt=8, rollout_retries=0, breaker=breaker)

    assert (done.rewards, done.failed_samples, done.empty_samples) == ([1.0, 0.0], 4, 2)
    assert not breaker.is_open


def test_finished_rollouts_are_known_while_the_row_runs():
    async def rollout_fn(_row: Any) -> RolloutResult:
        await asyncio.sleep(rollout_number())
        if rollout_number() == 2:
            return None
        return RolloutRun([sample_of(length=3), sample_of(length=4 + rollout_number())])

    rollouts = rollouts_of(rollout_fn, completions_per_prompt=4)

    async def main() -> list[list[int]]:
        task = asyncio.create_task(rollouts.run_row(Submission(ROW, 0, 0)))
        seen: list[list[int]] = []
        for _ in range(3):
            await asyncio.sleep(0.9)
            finished = rollouts.sampled_trajectories[13]
            seen.append(
                [
                    sum(part.completion_len for part in trajectory.segments)
                    for trajectory in finished
                ]
            )
        await task
        return seen

    assert run_virtual(main) == [[7], [7, 8], [7, 8]]
