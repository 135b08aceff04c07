import asyncio
import gc
import io
import itertools
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from tests.unit.training.platform_script import (
    ScriptedPublisher,
    ScriptedSampler,
    ScriptedTrainer,
    Seconds,
    infra_of,
)
from tests.unit.training.trial_rollouts import config_of, rollout_number, sample_of
from tests.unit.virtual_time import now, run_virtual

from hearth.telemetry import BusyClock, Stopwatch
from training.data.rows import epoch_rows
from training.recipes.async_rl_loop import Config, make_group, train
from training.rollouts.queue import RolloutQueue, RunLinks
from training.rollouts.runner import Rollouts
from training.run.async_loop import AsyncLoop, count_outcome
from training.run.checkpoints import read_manifest
from training.run.metrics import Display, MetricsLog
from training.run.state import Run
from training.samples.groups import PromptGroup
from training.samples.rollout import RolloutFn, RolloutSample

PHASES = ("perf/train_time", "perf/train_wait_time", "perf/weight_update_time")


@dataclass
class Scene:
    """A run of the recipe's ``train`` with real parts on a platform that follows a script."""

    config: Config = field(default_factory=lambda: config_of(shuffle=False))
    rows: int = 8
    seconds: Seconds = field(default_factory=Seconds)
    rollout_s: Mapping[int, float] = field(default_factory=dict[int, float])
    """Of rows that take another time than ``seconds.rollout``."""
    error: Exception | None = None
    fails: int | None = None
    """The row whose rollout raises ``error``."""
    publication_fails: int = 0
    accepts: Callable[[PromptGroup], bool] | None = None
    infra: dict[str, Any] = field(default_factory=dict[str, Any])
    drift: float = 0.0
    """Nats by which a step makes every token less likely."""
    sampling: dict[str, Any] = field(default_factory=dict[str, Any])
    """Of the sampler that the recipe itself asks."""
    clock: Callable[[], float] = now
    fn: RolloutFn | None = None
    """Another rollout function than the scripted one."""
    running: int = 0
    ended: float = 0.0
    cursors: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    """When steps were finished, and how many rows were done then."""

    async def rollout_fn(self, _row: Any, cursor_index: int) -> RolloutSample:
        self.running += 1
        try:
            await asyncio.sleep(self.rollout_s.get(cursor_index, self.seconds.rollout))
        finally:
            self.running -= 1
        if cursor_index == self.fails and self.error is not None:
            raise self.error
        return sample_of(float(rollout_number()))

    async def play(self, folder: Path) -> None:
        """The whole run; what it leaves is in the attributes below."""
        self.folder = folder
        self.trainer = ScriptedTrainer(
            self.seconds, self.clock, lambda: self.running, drift=self.drift
        )
        self.publisher = ScriptedPublisher(self.seconds, self.clock, fails=self.publication_fails)
        self.sampler = ScriptedSampler(
            self.publisher, self.seconds, drift=self.drift, **self.sampling
        )
        parts = {"sampler": self.sampler} | self.infra
        with self._run() as self.run:
            self.loop = self._loop(infra_of(self.trainer, folder, **parts))
            await train(self.loop)

    @contextmanager
    def _run(self) -> Iterator[Run]:
        log = MetricsLog(self.folder / "metrics.jsonl")
        clock = self.clock
        run = Run(
            self.folder,
            log,
            Display(0, Console(file=io.StringIO())),
            [{}] * self.rows,
            (),
            time.perf_counter(),
            now=clock,
            step_started=clock(),
            clock=Stopwatch(clock),
            busy=BusyClock(clock),
        )
        run.on_progress = lambda: self.cursors.append((clock(), run.cursor.count))
        try:
            yield run
        finally:
            log.close()

    def _loop(self, infra: Any) -> AsyncLoop:
        config, run = self.config, self.run
        fn = self.fn or self.rollout_fn
        rollouts = Rollouts(
            fn,
            config,
            num_rows=self.rows,
            make_group=partial(make_group, config),
            accepts=self.accepts,
        )
        queue = RolloutQueue(
            config,
            epoch_rows(run.rows, epochs=1, shuffle=False, seed=0),
            rollouts.run_row,
            RunLinks(
                note=lambda outcome: count_outcome(run, outcome, rollouts),
                weight_version=lambda: run.version,
                busy=run.busy,
                now=run.now,
            ),
        )
        return AsyncLoop(config, infra, run, queue, self.publisher)

    def records(self) -> list[dict[str, float]]:
        """The metrics of the steps."""
        lines = (self.folder / "metrics.jsonl").read_bytes().splitlines()
        return [orjson.loads(line) for line in lines]


@pytest.fixture
def play(tmp_path: Path) -> Callable[[Scene], Scene]:
    """A scene on virtual time; it leaves no task behind."""

    def play(scene: Scene) -> Scene:
        async def main() -> float:
            await scene.play(tmp_path)
            assert len(asyncio.all_tasks()) == 1
            return now()

        scene.ended = run_virtual(main)
        return scene

    return play


def scene_of(**options: Any) -> Scene:
    """A scene whose fields and whose config's fields are ``options``."""
    names = {field.name for field in fields(Scene)} & options.keys()
    own = {name: options.pop(name) for name in names}
    return Scene(config_of(shuffle=False, **options), **own)


# T137: known answers for the time of four steps. A batch is two rows of two samples: 10 s of
# rollouts, 5 s of training, 2 s to save a snapshot, 3 s until it is served.

TIMES = [
    ({}, 4 * 20.0),
    ({"synchronous_training": True}, 4 * 20.0),
    ({"synchronous_training": True, "max_head_offpolicy_versions": 2}, 4 * 20.0),
    # Two batches at a time: they are trained from 10 s to 24 s, the first is served at 20 s, and
    # the rollouts after it end at 30 s.
    ({"max_head_offpolicy_versions": 1}, 47.0),
    # The trainer is never idle: 10 s for the first rollouts, 7 s a step, 3 s for the last serving.
    ({"max_head_offpolicy_versions": 2}, 10.0 + 4 * 7.0 + 3.0),
    ({"max_head_offpolicy_versions": 4}, 10.0 + 4 * 7.0 + 3.0),
    # One row at a time, however much may be submitted.
    ({"max_head_offpolicy_versions": 2, "max_concurrency_rollout_sample": 2}, 80.0 + 7.0 + 3.0),
]


@pytest.mark.parametrize(("options", "seconds"), TIMES, ids=[str(case) for case, _ in TIMES])
def test_t137_a_run_takes_as_long_as_its_overlap_allows(play, options, seconds):
    scene = play(scene_of(**options))

    assert scene.ended == seconds
    assert scene.run.step == 4
    assert scene.run.cursor.list_finished() == set(range(8))


def test_t137_rollouts_are_in_flight_while_the_trainer_works(play):
    assert max(play(scene_of(max_head_offpolicy_versions=1)).trainer.running_at_training) > 0


@pytest.mark.parametrize("options", [{}, {"synchronous_training": True}], ids=["o 0", "sync"])
def test_t147_t148_on_policy_no_rollout_is_in_flight_while_the_trainer_works(play, options):
    assert set(play(scene_of(**options)).trainer.running_at_training) == {0}


def test_at_o_0_the_next_rows_wait_for_the_sync_and_off_policy_the_sync_does_not_hold_up_training(
    play,
):
    on_policy, late = play(scene_of()), play(scene_of(max_head_offpolicy_versions=1))

    assert [at for _, at in on_policy.publisher.served] == [20.0, 40.0, 60.0, 80.0]
    assert on_policy.trainer.started("forward_backward") == [10.0, 30.0, 50.0, 70.0]
    assert [at for _, at in late.publisher.served] == [20.0, 27.0, 40.0, 47.0]
    assert late.trainer.started("forward_backward") == [10.0, 17.0, 30.0, 37.0]
    assert [name for name, _ in late.publisher.saved] == [f"step-{i:05d}" for i in range(1, 5)]


# Every number of a step.


def check_times(record: Mapping[str, float], **seconds: float) -> None:
    """The numbers of a step's record that begin with ``perf/`` are these."""
    assert {name: record[f"perf/{name}"] for name in seconds} == pytest.approx(seconds)


def test_the_times_of_a_step_at_o_0(play):
    for record in play(scene_of()).records():
        check_times(
            record,
            step_time=20,
            step_wall_time=20,
            train_time=5,
            train_wait_time=10,
            train_chunk_wait_time=0,
            weight_update_time=5,
            fwd_bwd_time=4,
            optim_step_time=1,
        )
        # The trainer works for 7 s, the saving included; the sampler for 10 s.
        check_times(
            record,
            wait_time_ratio=0.5,
            weight_sync_ratio=0.25,
            overlap_ratio=0,
            trainer_idle_ratio=0.65,
            sampler_idle_ratio=0.5,
            trainer_wait_for_sampler_time=10,
            sampler_wait_for_trainer_time=7,
        )


# Seconds: the whole step, training, waiting for rollouts, saving; then of the step without work:
# the trainer and the sampler.
STEPS_AT_O_1 = [
    (17, 5, 10, 2, 10, 7),  # from 0 to 17 s: no row runs while the first batch is trained
    (7, 5, 0, 2, 0, 3),  # from 17 s to 24 s: the batch is there; new rows run from 20 s on
    (13, 5, 6, 2, 6, 0),  # from 24 s to 37 s: rows run all the time, the batch's until 30 s
]


def test_the_times_of_steps_at_o_1(play):
    records = play(scene_of(rows=10, max_head_offpolicy_versions=1)).records()

    for record, seconds in zip(records, STEPS_AT_O_1, strict=False):
        step, train, wait, update, trainer_idle, sampler_idle = seconds
        check_times(
            record,
            step_time=step,
            train_time=train,
            train_wait_time=wait,
            weight_update_time=update,
        )
        check_times(
            record,
            wait_time_ratio=wait / step,
            trainer_idle_ratio=trainer_idle / step,
            sampler_idle_ratio=sampler_idle / step,
        )
    assert records[2]["perf/overlap_ratio"] == pytest.approx(7 / 13)


def test_a_slow_weight_sync_holds_up_the_one_after_it(play):
    scene = play(scene_of(max_head_offpolicy_versions=1, seconds=Seconds(serve=9.0)))

    first, second, *_ = scene.records()

    # The first snapshot is served at 26 s; the second batch is trained at 22 s and saved at 28 s.
    check_times(first, step_time=17, weight_update_time=2)
    check_times(second, step_time=11, train_time=5, weight_update_time=6)


def test_the_wait_within_a_batch_is_told_apart(play):
    scene = scene_of(min_samples_per_fwd_bwd=2, rows=2, rollout_s={0: 4.0, 1: 9.0})

    (record,) = play(scene).records()

    # Row 0 is trained from 4 s to 6 s, row 1 from 9 s to 12 s.
    check_times(record, train_wait_time=4 + 3, train_chunk_wait_time=3, train_time=5)
    check_times(record, overlap_ratio=2 / 17)
    assert record["async/realized_training_chunks"] == 2
    assert record["train/effective_grad_accum_steps"] == 2


def test_offsets_are_split_into_those_in_flight_and_those_in_the_queue(play):
    records = play(scene_of(rows=8, max_head_offpolicy_versions=1)).records()
    names = ("mean", "max", "min", "in_flight_mean", "in_queue_mean")

    assert [
        tuple(record[f"async/version_offset_{name}"] for name in names) for record in records
    ] == [
        (0, 0, 0, 0, 0),
        (1, 1, 1, 0, 1),  # sampled beside the first batch, then it waited
        (1, 1, 1, 1, 0),  # from 20 s to 30 s, with a weight sync at 27 s
        (1, 1, 1, 0, 1),
    ]
    assert [record["async/trained_against_version"] for record in records] == [0, 1, 2, 3]
    assert [record["version/sample_staleness_max"] for record in records] == [0, 1, 1, 1]


def test_the_queues_numbers_are_those_of_the_steps_end(play):
    records = play(scene_of(rows=8, max_head_offpolicy_versions=1)).records()
    names = (
        "in_flight",
        "running_samples",
        "accepted_samples",
        "ready_groups",
        "staleness_capacity_at_step",
        "concurrency_capacity_at_step",
        "stale_drops",
        "sample_fails",
        "empty_samples",
        "filter_drops",
    )

    assert tuple(records[0][f"async/{name}"] for name in names) == (0, 0, 8, 2, 0, -1, 0, 0, 0, 0)
    # At 24 s rows 4 and 5 run, and the second snapshot is on its way.
    assert tuple(records[1][f"async/{name}"] for name in names) == (2, 4, 8, 0, 0, -1, 0, 0, 0, 0)


def test_t155_refused_groups_are_counted_and_replaced(play):
    scene = scene_of(rows=7, accepts=lambda group: group.row.index not in (0, 3))

    records = play(scene).records()

    assert [record["async/filter_drops"] for record in records] == [1, 1, 0]
    assert [record["rollout/valid_prompt_groups"] for record in records] == [2, 2, 1]
    assert [record["rollout/dropped/filtered"] for record in records[:2]] == [1, 1]
    assert [record["rollout/filter_reject_ratio"] for record in records] == [1 / 3, 1 / 3, 0]
    assert scene.run.cursor.count == 7


def test_rows_that_come_too_late_are_counted_with_what_they_had_sampled(play):
    async def rollout_fn(_row: Any, cursor_index: int, rollout_idx: int) -> RolloutSample:
        await asyncio.sleep(500.0 if (cursor_index, rollout_idx) == (0, 1) else 10.0)
        return sample_of(float(rollout_idx), length=2 + cursor_index + rollout_idx)

    scene = play(scene_of(rows=3, late_row_wait_s=20.0, fn=rollout_fn))
    (record,) = scene.records()

    assert (record["async/stale_drops"], record["async/total_stale_drops"]) == (1, 1)
    assert record["async/stale_drop_response_len_mean"] == 2
    assert record["rollout/valid_prompt_groups"] == 2
    assert scene.run.cursor.count == 3


def test_t153_the_recipe_owns_kl_tis_and_the_minibatch_loop(play):
    scene = scene_of(
        max_head_offpolicy_versions=1, ppo_n_minibatches=2, kl_beta=0.1, parity_probe_tokens=0
    )
    reference = ScriptedTrainer(Seconds(), now, lambda: 0)
    scene.infra = {"reference_client": reference}

    records = play(scene).records()

    assert [record["train/num_minibatches"] for record in records] == [2.0] * 4
    assert [record["train/step"] for record in records] == [2.0, 4.0, 6.0, 8.0]
    assert len(scene.trainer.started("optim_step")) == 8
    assert len(scene.trainer.started("forward")) == 4
    assert [name for name, _ in reference.calls] == ["forward"] * 4
    wanted = {"train/mean_kl", "train/ppo_kl", "train/tis/weight_mean", "train/grad_norm"}
    assert wanted <= records[0].keys()


@pytest.mark.parametrize("late", range(5))
def test_t150_one_field_raises_o_and_the_run_stays_valid(play, late):
    config = replace(config_of(shuffle=False), max_head_offpolicy_versions=late)
    config.validate()

    scene = play(Scene(config, rows=12))

    assert scene.run.step == 6
    assert scene.run.cursor.list_finished() == set(range(12))
    offsets = [record["async/version_offset_max"] for record in scene.records()]
    assert max(offsets) == late
    assert scene.records()[0].keys() >= {"async/version_offset_mean", *PHASES}


# T154: the phases are parts of the step.


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seconds=st.builds(
        Seconds,
        **dict.fromkeys(
            ("rollout", "fwd_bwd", "optim_step", "save", "serve"),
            st.sampled_from([0.0, 0.5, 3.0, 40.0]),
        ),
    ),
    slow=st.dictionaries(st.integers(0, 6), st.sampled_from([0.0, 7.0, 300.0])),
    late=st.integers(0, 3),
    synchronous=st.booleans(),
    least=st.sampled_from([None, 2]),
    first=st.booleans(),
)
def test_t154_the_phases_never_add_up_to_more_than_their_step(
    seconds, slow, late, synchronous, least, first
):
    scene = scene_of(
        rows=7,
        seconds=seconds,
        max_head_offpolicy_versions=late,
        synchronous_training=synchronous,
        min_samples_per_fwd_bwd=least,
        weight_sync_before_training=first,
    )
    scene.rollout_s = slow
    with tempfile.TemporaryDirectory() as folder:

        async def main() -> float:
            await scene.play(Path(folder))
            return now()

        total = run_virtual(main)
        records = scene.records()

    assert len(records) == 4
    for record in records:
        step = record["perf/step_time"] + 1e-6
        assert sum(record[phase] for phase in PHASES) <= step
        assert record["perf/train_chunk_wait_time"] <= record["perf/train_wait_time"] + 1e-6
        parts = ("fwd_bwd_time", "optim_step_time")
        assert sum(record[f"perf/{part}"] for part in parts) <= record["perf/train_time"] + 1e-6
        ratios = ("wait_time", "weight_sync", "overlap", "trainer_idle", "sampler_idle")
        assert all(0 <= record[f"perf/{ratio}_ratio"] <= 1 for ratio in ratios)
    assert sum(record["perf/step_time"] for record in records) <= total + 1e-6


# Publishing, the cursor and checkpoints.


def test_weights_that_were_loaded_are_published_before_the_first_rollout(play):
    scene = scene_of(rows=2, weight_sync_before_training=True)

    (record,) = play(scene).records()

    assert scene.publisher.served == [("step-00000", 5.0), ("step-00001", 25.0)]
    check_times(record, step_time=25, weight_update_time=10, train_wait_time=10)


def test_t162_the_cursor_moves_when_a_step_is_served(play):
    on_policy, late = play(scene_of()), play(scene_of(max_head_offpolicy_versions=1))

    assert on_policy.cursors == [(20.0, 2), (40.0, 4), (60.0, 6), (80.0, 8)]
    # A step ends with its snapshot saved: the rows that it trained are done 3 s later.
    assert late.cursors == [(17.0, 0), (24.0, 2), (37.0, 4), (44.0, 6)]
    assert late.run.cursor.count == 8


@contextmanager
def complaints() -> Iterator[list[dict[str, Any]]]:
    """What asyncio complains of, as of errors that nobody looked at."""
    seen: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: seen.append(context))
    yield seen
    gc.collect()


def ended_by(scene: Scene, folder: Path, error: type[Exception]) -> float:
    """When a run failed; it leaves no task behind, and no error that nobody looked at."""

    async def main() -> float:
        with complaints() as seen:
            with pytest.raises(error):
                await scene.play(folder)
            assert len(asyncio.all_tasks()) == 1
            del scene.loop
        assert seen == []
        return now()

    return run_virtual(main)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("late", "ended", "rows_done", "steps"),
    [
        (0, 40.0, 2, 1),  # awaited at once
        (1, 27.0, 2, 2),  # while the trainer waits for rows 4 and 5, due at 30 s
    ],
)
def test_t162_a_publication_that_fails_ends_the_run_and_its_rows_are_not_done(
    tmp_path, late, ended, rows_done, steps
):
    options = {"max_head_offpolicy_versions": late, "dcp_save_interval": 100}
    scene = scene_of(publication_fails=2, **options)

    assert ended_by(scene, tmp_path, ConnectionError) == ended
    assert scene.run.cursor.list_finished() == set(range(rows_done))
    assert len(scene.records()) == steps
    assert scene.trainer.saved == []


@pytest.mark.slow
def test_t161_a_batch_that_is_there_is_trained_and_published_before_a_rollouts_error_comes(
    tmp_path,
):
    failing = {"fails": 4, "error": ValueError("row 4"), "rollout_s": {4: 2.0}}
    scene = scene_of(max_head_offpolicy_versions=1, **failing)

    # Rows 4 and 5 start at 20 s; row 4 fails while rows 2 and 3 are trained, whose snapshot is
    # saved at 24 s and served 3 s later.
    assert ended_by(scene, tmp_path, ValueError) == 27.0
    assert len(scene.records()) == 2
    assert scene.run.cursor.list_finished() == {0, 1, 2, 3}


async def cancel_at(scene: Scene, folder: Path, *times: float, look: Any = None) -> None:
    """Play until the last of ``times``, and ``look`` at each of them; no task is left behind."""
    task = asyncio.create_task(scene.play(folder))
    for at in times:
        await asyncio.sleep(at - now())
        if look is not None:
            look()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(asyncio.all_tasks()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("at", [3.0, 12.0, 16.0, 18.0, 23.0])
def test_a_run_that_is_cancelled_leaves_nothing_running(tmp_path, at):
    """While rollouts run, at forward and backward, while it saves, and while it serves."""
    scene = scene_of(max_head_offpolicy_versions=1)

    async def main() -> None:
        with complaints() as seen:
            await cancel_at(scene, tmp_path, at)
        assert seen == []
        assert scene.running == 0
        assert now() == at

    run_virtual(main)


def test_a_weight_sync_that_ends_while_the_run_does_starts_no_more_rollouts(tmp_path):
    started: list[int] = []

    async def rollout_fn(_row: Any, cursor_index: int) -> RolloutSample:
        started.append(cursor_index)
        try:
            await asyncio.sleep(300.0 if cursor_index == 3 else 10.0)
        except asyncio.CancelledError:
            await asyncio.sleep(2.0)
            raise
        return sample_of(float(rollout_number()))

    scene = scene_of(max_head_offpolicy_versions=1, fn=rollout_fn)

    async def main() -> None:
        await cancel_at(scene, tmp_path, 19.0)  # the first snapshot is served at 20 s
        assert now() == 21.0

    run_virtual(main)

    assert set(started) == {0, 1, 2, 3}


QUICK = Seconds(rollout=0.0, fwd_bwd=0.0, optim_step=0.0, save=0.0, serve=0.001)


@pytest.mark.parametrize("late", [0, 1, 3])
@pytest.mark.parametrize("interval", [1, 2, 3])
async def test_t162_a_checkpoint_holds_published_steps_only(tmp_path, late, interval):
    scene = scene_of(
        rows=12, max_head_offpolicy_versions=late, dcp_save_interval=interval, seconds=QUICK
    )
    scene.clock = time.perf_counter

    await scene.play(tmp_path)

    points = read_manifest(tmp_path)
    assert [point.step for point in points] == list(range(interval, 7, interval))
    for point in points:
        # Its rows are those of its steps: none is trained twice after a resumption, none is lost.
        assert (point.cursor, point.beyond) == (2 * point.step, [])
        assert point.version == point.step


def jumps(seed: int) -> Iterator[float]:
    """Seconds between two looks at a clock: mostly few, now and then as many as a whole step."""
    rng = random.Random(seed)
    while True:
        yield rng.expovariate(1.0) ** 4


@pytest.mark.slow
@pytest.mark.parametrize("late", [0, 1, 3])
async def test_t162_a_checkpoint_that_becomes_due_between_two_looks_at_the_clock_waits(
    tmp_path, late
):
    scene = scene_of(rows=80, max_head_offpolicy_versions=late, seconds=QUICK)
    scene.infra = {"is_embedded": True}
    looks = itertools.accumulate(jumps(late))
    scene.clock = lambda: next(looks)

    await scene.play(tmp_path)

    points = read_manifest(tmp_path)
    assert len(points) > 5, "or the race is too rare to be seen"
    for point in points:
        assert (point.cursor, point.beyond, point.version) == (2 * point.step, [], point.step)


# What the watchdog would tell.


def test_who_waits_for_whom_is_told(tmp_path):
    scene = scene_of(max_head_offpolicy_versions=1, rollout_s={2: 100.0})
    reports: list[str] = []

    def look() -> None:
        reports.append(scene.loop.describe())

    run_virtual(lambda: cancel_at(scene, tmp_path, 5.0, 18.0, 35.0, look=look))

    assert reports[0].splitlines() == [
        "the trainer is in phase 'waiting for rollouts' of step 1, weight version 0",
        "4 rows are being sampled (8 rollouts), 0 groups wait for their batch, which lacks 2 of 2",
        "the gate has room for 0 rows; late rows: []",
        "the oldest rollout is of row 0, for 5 s",
    ]
    assert "step 2, weight version 0, a weight sync is under way" in reports[1]
    assert reports[2].splitlines()[2:] == [
        "the gate has room for 0 rows; late rows: [2]",
        "the oldest rollout is of row 2, for 35 s",
    ]
