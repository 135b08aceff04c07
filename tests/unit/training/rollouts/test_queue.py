import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.training.trial_rollouts import config_of, group_of, row_of
from tests.unit.virtual_time import now, run_virtual

from hearth.errors import ConfigError
from hearth.telemetry import BusyClock
from training.data.rows import IndexedRow
from training.rollouts.queue import RolloutQueue, RunLinks, TakenGroup, gate_limits
from training.rollouts.runner import Submission
from training.samples.groups import RowOutcome

T = TypeVar("T")

NEVER = 1e9


@dataclass
class Rollouts:
    """Rollouts that take scripted seconds (1 by default), and what the queue says of them."""

    seconds: Mapping[int, float] = field(default_factory=dict[int, float])
    refused: frozenset[int] = frozenset()
    """Rows whose group the filter refuses."""
    fails: Mapping[int, Exception] = field(default_factory=dict[int, Exception])
    """Rows whose rollout ends the run."""
    farewell_s: float = 0.0
    """Seconds that a cancelled rollout still takes."""
    started: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    submissions: list[Submission] = field(default_factory=list[Submission])
    noted: list[tuple[int, str | None]] = field(default_factory=list[tuple[int, str | None]])
    running: int = 0
    most_running: int = 0

    async def run(self, submission: Submission) -> RowOutcome:
        index = submission.row.index
        self.started.append((index, now()))
        self.submissions.append(submission)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(self.seconds.get(index, 1.0))
        except asyncio.CancelledError:
            await asyncio.sleep(self.farewell_s)
            raise
        finally:
            self.running -= 1
        if index in self.fails:
            raise self.fails[index]
        if index in self.refused:
            return RowOutcome(submission.row, dropped="filtered")
        return RowOutcome(submission.row, group_of(index, submit_version=submission.version))

    def note(self, outcome: RowOutcome) -> None:
        self.noted.append((outcome.row.index, outcome.dropped))

    def at(self, index: int) -> float:
        """When a row was started."""
        return dict(self.started)[index]


def rows_of(count: int) -> Iterator[IndexedRow]:
    return iter([row_of(index) for index in range(count)])


def queue_of(rollouts: Rollouts, rows: int = 100, **options: Any) -> RolloutQueue:
    names = ("check", "check_every_s", "weight_version", "busy")
    own = {name: options.pop(name) for name in names if name in options}
    usual = {"weight_version": lambda: 0, "busy": BusyClock(now)}
    links = RunLinks(note=rollouts.note, now=now, **(usual | own))
    run_row = options.pop("run_row", rollouts.run)
    return RolloutQueue(config_of(**options), rows_of(rows), run_row, links)


def numbers(piece: list[TakenGroup]) -> list[int]:
    return [taken.group.row.index for taken in piece]


@dataclass
class Trainer:
    """Trains and publishes as the recipe does, in scripted seconds."""

    queue: RolloutQueue
    train_s: float = 0.0
    publish_s: float = 0.0
    is_pipelined: bool = False
    """Whether the next batch begins while the last one is published."""
    batches: list[list[TakenGroup]] = field(default_factory=list[list[TakenGroup]])
    pieces: list[tuple[float, list[int]]] = field(default_factory=list)
    """When something went through forward and backward, and its rows."""
    _publishing: asyncio.Task[None] | None = None

    async def run(self, steps: int = 10**9) -> None:
        try:
            while len(self.batches) < steps and await self.step():
                pass
            await self._finish_publishing()
        finally:
            await self.queue.close()

    async def step(self) -> bool:
        batch: list[TakenGroup] = []
        while piece := await self.queue.piece():
            self.pieces.append((now(), numbers(piece)))
            batch += piece
            await asyncio.sleep(self.train_s)
        if not batch:
            return False
        self.batches.append(batch)
        await self._finish_publishing()
        self.queue.gate.end_batch()
        self._publishing = asyncio.create_task(self._publish())
        if not self.is_pipelined:
            await self._finish_publishing()
        return True

    async def _publish(self) -> None:
        await asyncio.sleep(self.publish_s)
        self.queue.gate.publish()
        self.queue.submit()

    async def _finish_publishing(self) -> None:
        publishing, self._publishing = self._publishing, None
        if publishing is not None:
            await publishing

    def rows(self) -> list[list[int]]:
        return [numbers(batch) for batch in self.batches]

    def all_rows(self) -> list[int]:
        return [row for batch in self.rows() for row in batch]

    def offsets(self) -> list[list[int]]:
        return [[sample.taken.offset for sample in batch] for batch in self.batches]


def trained(rollouts: Rollouts, rows: int = 100, **options: Any) -> Trainer:
    """All rows, trained to the end."""
    own = {name: options.pop(name, 0.0) for name in ("train_s", "publish_s")}
    is_pipelined = options.pop("is_pipelined", False)

    async def main() -> Trainer:
        trainer = Trainer(queue_of(rollouts, rows, **options), is_pipelined=is_pipelined, **own)
        await trainer.run()
        return trainer

    return run_virtual(main)


def during(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """What a scene gives that leaves no task behind."""

    async def checked() -> T:
        result = await main()
        assert len(asyncio.all_tasks()) == 1
        return result

    return run_virtual(checked)


# Admission.


def test_at_o_0_batches_have_the_rows_in_their_order_whatever_ends_first():
    rollouts = Rollouts({index: 100 / (1 + index) for index in range(12)})

    trainer = trained(rollouts, 12, prompt_groups_per_step=4)

    assert trainer.rows() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert [index for index, _ in rollouts.started] == list(range(12))


def test_t148_at_o_0_no_row_is_submitted_before_the_sync_and_every_offset_is_0():
    rollouts = Rollouts({1: 5.0})

    trainer = trained(rollouts, 6, train_s=10.0, publish_s=3.0)

    # Rolled out in 5 s and then 1 s, trained in 10 s, published in 3 s.
    assert rollouts.started == [(0, 0), (1, 0), (2, 18), (3, 18), (4, 32), (5, 32)]
    assert trainer.offsets() == [[0, 0]] * 3
    assert [submission.version for submission in rollouts.submissions] == [0, 0, 1, 1, 2, 2]


def test_t151_at_o_4_forty_rows_of_eight_are_submitted_before_the_first_sync():
    rollouts = Rollouts()

    async def main() -> list[int]:
        queue = queue_of(
            rollouts,
            prompt_groups_per_step=8,
            completions_per_prompt=8,
            max_head_offpolicy_versions=4,
        )
        counts: list[int] = []
        assert len(await queue.piece()) == 8
        counts.append(len(rollouts.started))
        queue.gate.end_batch()
        await asyncio.sleep(10)
        queue.submit()
        counts.append(len(rollouts.started))
        queue.gate.publish()
        queue.submit()
        await asyncio.sleep(0)
        counts.append(len(rollouts.started))
        await queue.close()
        return counts

    assert during(main) == [40, 40, 48]


@pytest.mark.parametrize(("limit", "most"), [(None, 4), (7, 3), (2, 1)])
def test_samples_in_flight_stay_within_their_limit(limit, most):
    rollouts = Rollouts()

    trained(rollouts, 10, max_head_offpolicy_versions=1, max_concurrency_rollout_sample=limit)

    assert rollouts.most_running == most


def test_t149_a_very_slow_row_is_one_version_late_and_not_seven():
    trainer = trained(
        Rollouts({0: 1000.0}), 20, max_head_offpolicy_versions=1, train_s=1.0, is_pipelined=True
    )

    assert trainer.rows()[:3] == [[1, 2], [0, 3], [4, 5]]
    assert trainer.offsets()[:2] == [[0, 0], [1, 1]]
    assert max(max(offsets) for offsets in trainer.offsets()) == 1
    # The batch waited for it: nobody trained a later row in its place.
    assert [at for at, _ in trainer.pieces][:2] == [1.0, 1000.0]
    assert sorted(trainer.all_rows()) == list(range(20))


@pytest.mark.slow
@pytest.mark.parametrize("late", range(5))
def test_t149_the_bound_holds_for_every_o(late):
    rng = random.Random(late)
    trainer = trained(
        Rollouts({index: rng.expovariate(1.0) ** 4 for index in range(200)}),
        200,
        max_head_offpolicy_versions=late,
        prompt_groups_per_step=4,
        train_s=2.0,
        publish_s=1.0,
        is_pipelined=late > 0,
    )

    assert max(max(offsets) for offsets in trainer.offsets()) == late
    assert sorted(trainer.all_rows()) == list(range(200))


def test_t152_t155_a_refused_row_gives_its_room_back_and_the_next_takes_its_place():
    rollouts = Rollouts({1: 5.0}, refused=frozenset({0, 2}))

    trainer = trained(rollouts, 6)

    assert rollouts.started[:4] == [(0, 0), (1, 0), (2, 1), (3, 2)]
    assert trainer.rows() == [[1, 3], [4, 5]]
    assert trainer.offsets() == [[0, 0]] * 2
    assert rollouts.noted[:4] == [(0, "filtered"), (2, "filtered"), (3, None), (1, None)]


def test_t155_every_step_trains_whole_batches_though_half_of_the_groups_are_refused():
    trainer = trained(
        Rollouts(refused=frozenset(range(0, 40, 2))),
        40,
        prompt_groups_per_step=5,
        max_head_offpolicy_versions=1,
    )

    assert [len(batch) for batch in trainer.batches] == [5] * 4


@pytest.mark.parametrize("late", [0, 1, 3])
def test_the_last_rows_train_as_a_smaller_batch(late):
    trainer = trained(Rollouts(), 7, prompt_groups_per_step=3, max_head_offpolicy_versions=late)

    assert trainer.rows() == [[0, 1, 2], [3, 4, 5], [6]]


def test_when_the_last_rows_are_refused_the_rest_trains():
    trainer = trained(Rollouts({3: 50.0}, refused=frozenset({3})), 4, prompt_groups_per_step=3)

    assert trainer.rows() == [[0, 1, 2]]


def test_without_any_row_there_is_no_batch():
    assert trained(Rollouts(), 0).batches == []
    assert trained(Rollouts(refused=frozenset(range(9))), 9).batches == []


def test_t147_synchronous_training_drains_before_every_step():
    rollouts = Rollouts({1: 7.0, 2: 3.0})

    async def main() -> list[list[int]]:
        queue = queue_of(
            rollouts,
            8,
            synchronous_training=True,
            max_head_offpolicy_versions=3,
            min_samples_per_fwd_bwd=2,
        )
        pieces: list[list[int]] = []
        for _ in range(4):
            while piece := await queue.piece():
                assert rollouts.running == 0
                pieces.append(numbers(piece))
                await asyncio.sleep(1)
            queue.gate.end_batch()
            queue.gate.publish()
        assert await queue.piece() == []
        return pieces

    assert during(main) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_a_submission_knows_what_the_deployment_serves():
    rollouts = Rollouts()
    served = iter([7, 7, 9])

    async def main() -> None:
        queue = queue_of(rollouts, 3, weight_version=lambda: next(served))
        await Trainer(queue).run()

    during(main)
    assert [
        (submission.version, submission.weight_version) for submission in rollouts.submissions
    ] == [(0, 7), (0, 7), (1, 9)]


# Pieces.

PIECES = [
    ({}, [(4.0, [0, 1, 2, 3])]),
    ({"max_samples_per_fwd_bwd": 4}, [(4.0, [0, 1]), (4.0, [2, 3])]),
    ({"max_samples_per_fwd_bwd": 7}, [(4.0, [0, 1, 2]), (4.0, [3])]),
    ({"min_samples_per_fwd_bwd": 4}, [(2.0, [0, 1]), (4.0, [2, 3])]),
    ({"min_samples_per_fwd_bwd": 6}, [(3.0, [0, 1, 2]), (4.0, [3])]),
    ({"min_samples_per_fwd_bwd": 3}, [(2.0, [0, 1]), (4.0, [2, 3])]),
    ({"min_samples_per_fwd_bwd": 1}, [(1.0, [0]), (2.0, [1]), (3.0, [2]), (4.0, [3])]),
    (
        {"min_samples_per_fwd_bwd": 3, "max_samples_per_fwd_bwd": 3},
        [(1.0, [0]), (2.0, [1]), (3.0, [2]), (4.0, [3])],
    ),
    ({"max_samples_per_fwd_bwd": 2, "ppo_n_minibatches": 2}, [(4.0, [0, 1, 2, 3])]),
    ({"max_head_offpolicy_versions": 1}, [(4.0, [0, 1, 2, 3])]),
    (
        {"max_head_offpolicy_versions": 1, "max_samples_per_fwd_bwd": 4},
        [(2.0, [0, 1]), (4.0, [2, 3])],
    ),
    (
        {"max_head_offpolicy_versions": 1, "max_samples_per_fwd_bwd": 6},
        [(3.0, [0, 1, 2]), (4.0, [3])],
    ),
    (
        {"max_head_offpolicy_versions": 1, "min_samples_per_fwd_bwd": 2},
        [(1.0, [0]), (2.0, [1]), (3.0, [2]), (4.0, [3])],
    ),
]


@pytest.mark.parametrize(("options", "pieces"), PIECES, ids=[str(case) for case, _ in PIECES])
def test_a_batch_is_cut_into_pieces_as_the_config_says(options, pieces):
    trainer = trained(
        Rollouts({0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0}), 4, prompt_groups_per_step=4, **options
    )

    assert trainer.pieces == pieces


def test_a_piece_takes_what_has_come_meanwhile_up_to_the_cap():
    trainer = trained(
        Rollouts({0: 1.0, 1: 1.5, 2: 2.0, 3: 2.5, 4: 9.0}),
        5,
        prompt_groups_per_step=5,
        min_samples_per_fwd_bwd=2,
        max_samples_per_fwd_bwd=4,
        train_s=3.0,
    )

    assert trainer.pieces == [(1.0, [0]), (4.0, [1, 2]), (7.0, [3]), (10.0, [4])]


def test_the_last_piece_does_not_wait_for_more_than_there_is():
    trainer = trained(
        Rollouts({0: 1.0, 1: 2.0, 2: 3.0}), 3, prompt_groups_per_step=8, min_samples_per_fwd_bwd=4
    )

    assert trainer.pieces == [(2.0, [0, 1]), (3.0, [2])]


# Late rows.


def test_a_late_row_is_given_up_after_its_wait_and_the_next_rows_take_its_place():
    rollouts = Rollouts({0: NEVER, 4: 6.0})

    trainer = trained(rollouts, 8, max_head_offpolicy_versions=1, late_row_wait_s=30.0)

    # Rows 1 and 2 overtake row 0 at 1 s, and then it is all that the next batch waits for.
    assert (0, "stale") in rollouts.noted
    assert trainer.queue.gate.stale_drops == 1
    assert [at for at, _ in trainer.pieces] == [1.0, 31.0, 32.0, 32.0]
    assert trainer.rows() == [[1, 2], [3, 4], [5, 6], [7]]


def test_at_o_0_the_wait_is_a_time_limit_for_the_batch():
    rollouts = Rollouts({1: NEVER, 3: 4.0})

    trainer = trained(rollouts, 4, late_row_wait_s=5.0)

    assert rollouts.started == [(0, 0), (1, 0), (2, 5), (3, 6)]
    assert trainer.rows() == [[0, 2], [3]]
    assert rollouts.noted == [(0, None), (1, "stale"), (2, None), (3, None)]


PATIENCE = {
    "every batch waits anew": (
        dict.fromkeys(range(6), 4.0),
        {"late_row_wait_s": 5.0, "train_s": 3.0},
        [(4.0, [0, 1]), (11.0, [2, 3]), (18.0, [4, 5])],
    ),
    "without a limit": ({0: 20_000.0}, {}, [(20_000.0, [0, 1])]),
    # The first batch waits for row 1, which might as well go into the next one.
    "a row that is not late": (
        {1: 40.0, 2: 44.0, 3: 44.0},
        {"max_head_offpolicy_versions": 1, "late_row_wait_s": 5.0, "fifo_slack": 0},
        [(40.0, [0, 1]), (44.0, [2, 3])],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "options", "pieces"), PATIENCE.values(), ids=PATIENCE)
def test_a_row_within_its_time_is_waited_for(seconds, options, pieces):
    trainer = trained(Rollouts(seconds), 2 * len(pieces), **options)

    assert trainer.pieces == pieces
    assert trainer.rows() == [rows for _, rows in pieces]
    assert trainer.queue.gate.stale_drops == 0


# Failures.


def failing(error: Exception, rollouts: Rollouts, **options: Any) -> tuple[list[list[int]], float]:
    """The batches before a run's failure, and when it came."""

    async def main() -> tuple[list[list[int]], float]:
        trainer = Trainer(queue_of(rollouts, **options))
        with pytest.raises(type(error)) as failure:
            await trainer.run()
        assert failure.value is error
        return trainer.rows(), now()

    return during(main)


def test_a_batch_whose_groups_are_there_is_trained_before_the_error_is_raised():
    error = ValueError("row 2")
    rollouts = Rollouts({2: 1.5, 3: 50.0, 1: 2.0}, fails={2: error})

    async def main() -> tuple[list[list[int]], float]:
        trainer = Trainer(queue_of(rollouts, max_head_offpolicy_versions=1))
        await asyncio.sleep(0)
        trainer.queue.submit()
        await asyncio.sleep(3)  # rows 0 and 1 are there, row 2 has failed
        with pytest.raises(ValueError, match="row 2"):
            await trainer.run()
        return trainer.rows(), now()

    assert during(main) == ([[0, 1]], 3.0)
    assert [index for index, _ in rollouts.started] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("seconds", "failures"),
    [({0: 2.0, 1: 500.0}, ["row 0"]), ({0: 2.0, 1: 2.0}, ["row 0", "row 1"])],
    ids=["at once", "the first one"],
)
def test_the_first_error_that_leaves_the_batch_short_is_raised_at_once(seconds, failures):
    errors = {row: ValueError(message) for row, message in enumerate(failures)}

    assert failing(errors[0], Rollouts(seconds, fails=errors)) == ([], 2.0)


def test_a_rollout_that_cannot_be_started_is_a_failure():
    error = RuntimeError("the thread has ended")

    def refuse(_submission: Submission) -> Awaitable[RowOutcome]:
        raise error

    assert failing(error, Rollouts(), run_row=refuse) == ([], 0.0)


def test_a_failed_publication_reaches_whoever_waits():
    error = ConnectionError("the deployment is gone")
    rollouts = Rollouts({1: 1000.0})

    async def main() -> float:
        queue = queue_of(rollouts)
        asyncio.get_running_loop().call_later(3.0, queue.fail, error)
        with pytest.raises(ConnectionError) as failure:
            await queue.piece()
        assert failure.value is error
        await queue.close()
        return now()

    assert during(main) == 3.0
    assert len(rollouts.started) == 2  # row 0 ended, and nothing took its place


def test_while_it_waits_it_is_checked_that_waiting_makes_sense():
    checked: list[float] = []

    def check() -> None:
        checked.append(now())
        if now() > 15.0:
            raise TimeoutError("a rollout holds up all others")

    async def main() -> None:
        queue = queue_of(Rollouts({0: NEVER, 1: 7.0}), check=check)
        with pytest.raises(TimeoutError, match="holds up all others"):
            await queue.piece()
        await queue.close()

    during(main)
    # Every 5 s in which no row ends: row 1 does at 7 s.
    assert checked == [5.0, 12.0, 17.0]


@pytest.mark.parametrize("farewell_s", [0.0, 20.0])
def test_close_waits_for_what_it_cancels(farewell_s):
    rollouts = Rollouts(dict.fromkeys(range(4), NEVER), farewell_s=farewell_s)

    async def main() -> float:
        queue = queue_of(rollouts, max_head_offpolicy_versions=1)
        queue.submit()
        await asyncio.sleep(3)
        assert rollouts.running == 4
        await queue.close()
        return now()

    assert during(main) == 3.0 + farewell_s
    assert rollouts.running == 0


def test_close_waits_for_rows_that_were_given_up_as_well():
    rollouts = Rollouts({0: NEVER, 1: NEVER}, farewell_s=20.0)

    async def main() -> None:
        queue = queue_of(rollouts, 2, late_row_wait_s=5.0)
        assert await queue.piece() == []
        await queue.close()

    during(main)
    assert rollouts.running == 0
    assert rollouts.noted == [(0, "stale"), (1, "stale")]


def test_after_its_end_nothing_is_started_though_a_weight_sync_makes_room():
    rollouts = Rollouts()

    async def main() -> None:
        queue = queue_of(rollouts)
        assert numbers(await queue.piece()) == [0, 1]
        queue.gate.end_batch()
        await queue.close()
        queue.gate.publish()
        queue.submit()
        assert queue.gate.rows_to_submit() == 2

    during(main)
    assert [index for index, _ in rollouts.started] == [0, 1]


@pytest.mark.parametrize("turns", range(6))
def test_whoever_waits_can_be_cancelled_at_any_moment(turns):
    """Also while a row ends: an event and a cancellation at one time must not lose either."""

    async def main() -> None:
        queue = queue_of(Rollouts({1: NEVER}))
        waiting = asyncio.create_task(queue.piece())
        await asyncio.sleep(1.0)  # row 0 ends
        for _ in range(turns):
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting], timeout=100.0)
        assert waiting.cancelled()
        await queue.close()

    during(main)


# What the watchdog asks.


def test_the_oldest_row_and_its_age_are_known():
    async def main() -> list[tuple[int, float] | None]:
        queue = queue_of(Rollouts({0: 3.0, 1: 8.0}), 2)
        seen: list[tuple[int, float] | None] = []

        def look() -> None:
            oldest = queue.oldest()
            seen.append(None if oldest is None else (oldest[0].index, oldest[1]))

        look()
        queue.submit()
        for _ in range(3):
            await asyncio.sleep(2.5)
            look()
        assert queue.num_ready == 1
        await asyncio.sleep(2.5)
        look()
        assert queue.num_ready == 2
        return seen

    assert during(main) == [None, (0, 2.5), (1, 5.0), (1, 7.5), None]


def test_the_sampler_is_busy_while_a_row_runs():
    async def main() -> tuple[float, float, float]:
        busy = BusyClock(now)
        await queue_of(Rollouts({0: 3.0, 1: 5.0}), 2, busy=busy).piece()
        await asyncio.sleep(4)
        return busy.take()

    assert during(main) == (0.0, 5.0, 0.0)


def test_without_overlap_the_gate_is_on_policy_whatever_o_is():
    assert gate_limits(config_of(max_head_offpolicy_versions=3)).max_head_offpolicy_versions == 3
    alone = config_of(max_head_offpolicy_versions=3, synchronous_training=True)
    assert gate_limits(alone).max_head_offpolicy_versions == 0


@pytest.mark.parametrize("is_alone", [False, True])
def test_a_negative_o_is_refused_with_and_without_overlap(is_alone):
    config = config_of(max_head_offpolicy_versions=-1, synchronous_training=is_alone)

    with pytest.raises(ConfigError, match="max_head_offpolicy_versions must be >= 0, got -1"):
        gate_limits(config)


# All of it at once.


@dataclass(frozen=True)
class Weather:
    """A run: its settings, and what its rollouts do."""

    seed: int
    rows: int
    options: dict[str, Any]
    slow: float
    refused: float
    fails: float
    train_s: float
    publish_s: float

    def rollouts(self) -> Rollouts:
        rng = random.Random(self.seed)
        seconds = {
            index: rng.expovariate(1.0) * (1000.0 if rng.random() < self.slow else 1.0)
            for index in range(self.rows)
        }
        rolls = {index: rng.random() for index in range(self.rows)}
        return Rollouts(
            seconds,
            frozenset(index for index, roll in rolls.items() if roll < self.refused),
            {i: ValueError(f"row {i}") for i, roll in rolls.items() if roll > 1 - self.fails},
            farewell_s=rng.choice([0.0, 2.0]),
        )


@st.composite
def weathers(draw: st.DrawFn) -> Weather:
    groups = draw(st.integers(1, 6))
    late = draw(st.integers(0, 3))
    options: dict[str, Any] = {
        "prompt_groups_per_step": groups,
        "max_head_offpolicy_versions": late,
        "synchronous_training": draw(st.sampled_from([False, False, False, True])),
        "fifo_slack": draw(st.one_of(st.none(), st.integers(0, groups))),
        "max_concurrency_rollout_sample": draw(st.one_of(st.none(), st.integers(2, 30))),
        "late_row_wait_s": draw(st.sampled_from([None, None, 0.0, 3.0, 500.0])),
        "ppo_n_minibatches": draw(st.sampled_from([1, 1, 2])),
        "max_samples_per_fwd_bwd": draw(st.sampled_from([2, 4, 6, 256])),
    }
    if options["ppo_n_minibatches"] == 1:
        most = min(8, options["max_samples_per_fwd_bwd"])
        options["min_samples_per_fwd_bwd"] = draw(st.one_of(st.none(), st.integers(2, most)))
    return Weather(
        seed=draw(st.integers(0, 2**32 - 1)),
        rows=draw(st.integers(0, 60)),
        options=options,
        slow=draw(st.sampled_from([0.0, 0.05, 0.3])),
        refused=draw(st.sampled_from([0, 0.2, 0.9])),
        fails=draw(st.sampled_from([0.0, 0.0, 0.0, 0.05])),
        train_s=draw(st.sampled_from([0.0, 0.5, 40.0])),
        publish_s=draw(st.sampled_from([0.0, 0.5, 40.0])),
    )


def run_weather(weather: Weather, rollouts: Rollouts) -> tuple[Trainer, bool]:
    """The trainer after the run, and whether a rollout ended it."""
    overlaps = weather.options["max_head_offpolicy_versions"] > 0
    is_pipelined = overlaps and not weather.options["synchronous_training"]

    async def main() -> tuple[Trainer, bool]:
        # Rare checks, so that a row that nobody waits for is soon known as a deadlock.
        queue = queue_of(rollouts, weather.rows, check_every_s=1e5, **weather.options)
        trainer = Trainer(queue, weather.train_s, weather.publish_s, is_pipelined=is_pipelined)
        try:
            await trainer.run()
        except ValueError:
            return trainer, True
        return trainer, False

    return run_virtual(main)


@pytest.mark.slow
@settings(max_examples=80, deadline=None, derandomize=True)
@given(weathers())
def test_nothing_is_lost_or_repeated_the_bound_holds_and_nobody_waits_in_vain(weather):
    rollouts = weather.rollouts()

    trainer, has_failed = run_weather(weather, rollouts)

    gate, options = trainer.queue.gate, weather.options
    taken = Counter(trainer.all_rows())
    given_up = Counter(index for index, reason in rollouts.noted if reason is not None)
    assert set((taken + given_up).values()) <= {1}
    assert {index for index, reason in rollouts.noted if reason == "filtered"} <= rollouts.refused
    assert not taken.keys() & rollouts.refused
    if not has_failed:
        assert (taken + given_up).keys() == set(range(weather.rows))
        assert gate.unresolved == rollouts.running == 0
    late = 0 if options["synchronous_training"] else options["max_head_offpolicy_versions"]
    assert {offset for batch in trainer.offsets() for offset in batch} <= set(range(late + 1))
    assert {len(batch) for batch in trainer.batches[:-1]} <= {options["prompt_groups_per_step"]}
    limit = options["max_concurrency_rollout_sample"]
    # A rollout that was given up may take a while to end; the limit is on those that are wanted.
    if limit is not None and options["late_row_wait_s"] is None:
        assert rollouts.most_running * 2 <= limit
    drops = [index for index, reason in rollouts.noted if reason == "stale"]
    assert gate.stale_drops == len(drops)
    assert not drops or options["late_row_wait_s"] is not None
