"""Held-out evaluation: its numbers, and how it goes on beside the training."""

import asyncio
import io
import itertools
import logging
import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from rich.console import Console
from tests.unit.training.trial_rollouts import config_of, row_of, sample_of
from tests.unit.virtual_time import now, run_virtual

from hearth.errors import ConfigError
from training.data.seeds import row_seed
from training.rollouts.failures import RecoverableRolloutError
from training.rollouts.runner import Rollouts, Submission
from training.rollouts.sampler import current_rollout
from training.run.background_evaluation import BackgroundEvaluation
from training.run.evaluation import EVAL_SEED_OFFSET, EvalResult, EvalSample
from training.run.metrics import Display, MetricsLog
from training.run.pass_at_k import pass_at_k, pass_rates
from training.run.state import Run
from training.samples.rollout import RolloutRun, RolloutSample

# pass@k


@pytest.mark.parametrize(("n", "k"), [(1, 1), (4, 1), (4, 2), (5, 3), (6, 6)])
def test_pass_at_k_is_the_share_of_choices_of_k_answers_with_a_right_one(n, k):
    for c in range(n + 1):
        chosen = list(itertools.combinations(range(n), k))
        lucky = sum(any(answer < c for answer in subset) for subset in chosen)

        assert pass_at_k(n, c, k) == pytest.approx(lucky / len(chosen), abs=1e-12)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 0), (4, 1, 5)])
def test_counts_that_cannot_be_are_refused(n, c, k):
    with pytest.raises(ConfigError, match="n, c and k must satisfy"):
        pass_at_k(n, c, k)


def test_k_doubles_up_to_the_number_of_answers_and_short_rows_are_left_out():
    assert pass_rates([(4, 0), (4, 4)]) == {1: 0.5, 2: 0.5, 4: 0.5}
    assert list(pass_rates([(5, 1)])) == [1, 2, 4]
    assert pass_rates([(4, 1), (1, 1)]) == {1: 0.625, 2: 0.5, 4: 1.0}
    assert pass_rates([]) == {}


# A result's numbers


def answer(place: int = 0, reward: float = 1.0, **changes: Any) -> EvalSample:
    usual: dict[str, Any] = {"text": "4", "length": 2, "is_truncated": False}
    return EvalSample({}, place, reward, **(usual | changes))


def test_a_result_says_how_often_answers_are_right_and_what_they_are_like():
    result = EvalResult(
        [
            answer(0, 1.0, length=2, versions=[[3, 2]]),
            answer(0, 0.0, length=6, is_truncated=True, versions=[[3, 2], [4, 4]]),
            answer(1, 0.75, length=1, versions=[[5, 1]]),
            answer(1, 0.5, length=3, versions=[[5, 3]]),
        ],
        failed_rewards=1,
        failed_samples=2,
    )

    assert result.metrics() == {
        "eval/samples": 4.0,
        "eval/reward_fail_count": 1.0,
        "eval/sample_fail_count": 2.0,
        "eval/pass@1": 0.5,
        "eval/pass@2": 1.0,
        "eval/weight_version_mean": pytest.approx((4 * 3 + 4 * 4 + 4 * 5) / 12),
        "eval/weight_version_min": 3.0,
        "eval/weight_version_max": 5.0,
        "eval/accuracy": 0.5,
        "eval/reward": 0.5625,
        "eval/response_len/mean": 3.0,
        "eval/truncated_ratio": 0.25,
    }


@pytest.mark.parametrize(
    ("rewards", "said"),
    [
        ([1.0, 0.0, 1.0, 1.0], "accuracy 0.750"),
        ([0.25, 0.0, 0.5], "reward 0.250"),
        ([0.0, 0.0], "reward 0.000"),
        ([], "reward nan"),
    ],
)
def test_graded_rewards_are_not_said_as_a_share_of_right_answers(rewards, said):
    assert EvalResult([answer(0, reward) for reward in rewards]).describe() == said


def test_the_share_without_an_answer_is_over_those_whose_reward_says_so():
    said = [None, True, False, False]
    result = EvalResult([answer(0, parsed=parsed) for parsed in said])

    assert result.metrics()["eval/parse_fail_ratio"] == pytest.approx(2 / 3)


def test_without_any_answer_there_are_only_counts():
    empty = EvalResult([], failed_samples=3)

    assert math.isnan(empty.accuracy)
    assert empty.metrics() == {
        "eval/samples": 0.0,
        "eval/reward_fail_count": 0.0,
        "eval/sample_fail_count": 3.0,
    }


# Beside the training


class Bench:
    """A run that evaluates, on virtual time; a held-out rollout takes 10 s."""

    def __init__(self, folder: Path, *, rows: int = 4, **options: Any) -> None:
        self.config = config_of(**options)
        self.log = MetricsLog(folder / "metrics.jsonl")
        self.run = Run(
            folder,
            self.log,
            Display(0, Console(file=io.StringIO())),
            [{}],
            [{"number": number} for number in range(rows)],
            0.0,
            now=now,
        )
        self.running = 0
        self.most = 0
        self.seen: list[tuple[int, int, bool, int]] = []
        self.fails: Callable[[int], Exception | None] = lambda _call: None
        self.evaluation = BackgroundEvaluation(
            self.config, self.run, self.rollout_fn, lambda evaluate: evaluate()
        )

    async def rollout_fn(
        self, row: dict[str, Any], cursor_index: int, end_of_epoch: bool
    ) -> RolloutSample | RolloutRun:
        running = current_rollout.get()
        self.seen.append((cursor_index, running.sample, end_of_epoch, running.row_seed))
        call = len(self.seen)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(10.0)
        finally:
            self.running -= 1
        if error := self.fails(call):
            raise error
        return sample_of(float(row["number"] % 2), length=2 + row["number"])

    def records(self) -> list[dict[str, Any]]:
        lines = (self.run.log_path / "metrics.jsonl").read_bytes().splitlines()
        return [orjson.loads(line) for line in lines]

    def play(self, body: Callable[[], Awaitable[None]]) -> None:
        async def main() -> None:
            await body()
            assert len(asyncio.all_tasks()) == 1

        run_virtual(main)
        self.log.close()


def test_an_evaluation_goes_through_the_rollout_function_while_others_go_on(tmp_path):
    bench = Bench(tmp_path, eval_samples_per_prompt=2)

    async def body() -> None:
        bench.evaluation.begin_if_due(0, always=True)
        assert now() == 0.0
        bench.run.step, bench.run.version = 7, 3
        await bench.evaluation.finish(0)

    bench.play(body)

    (record,) = bench.records()
    assert (record["type"], record["step"]) == ("eval", 0)
    assert record["eval/samples"] == 8
    assert record["eval/accuracy"] == record["eval/pass@1"] == record["eval/pass@2"] == 0.5
    assert record["eval/response_len/mean"] == pytest.approx(3.5)
    assert [step for step, _ in bench.run.evaluations] == [0]
    # A batch is 4 samples, so 2 rows of 2 are sampled at a time.
    assert bench.most == 4
    assert record["perf/eval_time"] == 20.0
    assert {(row, sample) for row, sample, *_ in bench.seen} == {
        (row, sample) for row in range(4) for sample in range(2)
    }
    assert {row for row, _, is_last, _ in bench.seen if is_last} == {3}
    assert {seed for row, _, _, seed in bench.seen if row == 2} == {row_seed(EVAL_SEED_OFFSET, 2)}


def test_rows_that_begin_after_a_weight_sync_carry_its_version(tmp_path):
    bench = Bench(tmp_path, rows=8)

    async def body() -> None:
        bench.evaluation.begin_if_due(0, always=True)
        await asyncio.sleep(5.0)
        bench.run.version = 1  # four of eight rows run already
        await bench.evaluation.finish(0)

    bench.play(body)

    (record,) = bench.records()
    assert record["eval/weight_version_min"] == 0
    assert record["eval/weight_version_max"] == 1
    tokens = [2 + number for number in range(8)]
    assert record["eval/weight_version_mean"] == pytest.approx(sum(tokens[4:]) / sum(tokens))


def test_it_is_due_every_so_many_steps_one_at_a_time_and_at_the_end(tmp_path):
    bench = Bench(tmp_path, eval_every=2)

    async def body() -> None:
        bench.evaluation.begin_if_due(0, always=True)
        for step in range(1, 8):
            await asyncio.sleep(4.0)
            bench.evaluation.begin_if_due(step)
        await bench.evaluation.finish(7)
        await bench.evaluation.finish(7)

    bench.play(body)

    # At step 2 (8 s) the first one still runs; it ends at 10 s.
    assert [record["step"] for record in bench.records()] == [0, 3, 6, 7]


def test_what_may_pass_is_retried_and_a_failure_is_a_warning_without_a_record(tmp_path, caplog):
    bench = Bench(tmp_path, eval_every=1, rollout_retries=1)
    bench.fails = lambda call: {
        2: RecoverableRolloutError("try again"),
        6: ValueError("a bug"),
    }.get(call)

    async def body() -> None:
        for step in range(3):
            bench.evaluation.begin_if_due(step, always=True)
            await asyncio.sleep(60.0)

    with caplog.at_level(logging.WARNING):
        bench.play(body)

    first, last = bench.records()
    assert (first["step"], first["eval/samples"], first["eval/sample_fail_count"]) == (0, 4, 0)
    assert last["step"] == 2
    said = (
        "the evaluation of step 1 failed and has no record: ValueError: a bug, in the rollout of "
    )
    (warning,) = [record for record in caplog.records if said in record.getMessage()]
    assert warning.getMessage().removeprefix(said) == "held-out row 0, sample 0"
    assert "raise error" in caplog.text  # the line, in its traceback
    assert [step for step, _ in bench.run.evaluations] == [0, 2]


def test_samples_that_are_given_up_are_counted_and_too_many_fail_only_this_evaluation(
    tmp_path, caplog
):
    bench = Bench(tmp_path, rows=6, eval_every=1, rollout_retries=0)
    bench.fails = lambda call: RecoverableRolloutError("down") if call == 1 else None

    async def body() -> None:
        bench.evaluation.begin_if_due(0, always=True)
        await asyncio.sleep(60.0)
        bench.fails = lambda _call: RecoverableRolloutError("down")
        bench.evaluation.begin_if_due(1)
        await asyncio.sleep(60.0)
        bench.fails = lambda _call: None
        await bench.evaluation.finish(2)

    with caplog.at_level(logging.WARNING):
        bench.play(body)

    records = bench.records()
    assert [record["step"] for record in records] == [0, 2]
    assert [record["eval/samples"] for record in records] == [5, 6]
    assert [record["eval/sample_fail_count"] for record in records] == [1, 0]
    assert "the evaluation of step 1 failed and has no record: RolloutsFailingError" in caplog.text


def test_only_the_rows_that_the_run_waits_for_at_its_end_are_progress(tmp_path):
    bench = Bench(tmp_path, rows=8)
    seen: list[float] = []
    bench.run.on_progress = lambda: seen.append(now())

    async def body() -> None:
        bench.evaluation.begin_if_due(0, always=True)
        await asyncio.sleep(15.0)  # four of its eight rows have ended
        await bench.evaluation.finish(1)

    bench.play(body)

    assert seen == [20.0] * 4 + [30.0] * 4 + [40.0] * 4


def test_an_evaluation_that_is_closed_leaves_nothing_running_and_no_record(tmp_path):
    bench = Bench(tmp_path)

    async def body() -> None:
        bench.evaluation.begin_if_due(0, always=True)
        await asyncio.sleep(1.0)
        assert bench.running == 4
        await bench.evaluation.close()
        assert bench.running == 0

    bench.play(body)

    assert bench.records() == []


def test_without_held_out_rows_nothing_is_evaluated(tmp_path):
    bench = Bench(tmp_path, rows=0, eval_every=1)

    bench.play(lambda: bench.evaluation.finish(5))

    assert bench.seen == bench.records() == []


def test_trajectories_of_a_row_keep_every_run_and_count_what_gave_none():
    async def rollout_fn(_row: dict[str, Any], sample_index: int) -> RolloutSample | None:
        return None if sample_index == 1 else sample_of(0.25)

    rollouts = Rollouts(rollout_fn, config_of(completions_per_prompt=3), num_rows=1)
    done = run_virtual(lambda: rollouts.trajectories(Submission(row_of(0), 0, 9)))

    assert [run.reward for run in done.runs] == [0.25, 0.25]
    assert done.failed == 1
    assert [run.segments[0].versions for run in done.runs] == [[[9, 2]], [[9, 2]]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eval_every": -1}, "eval_every must be >= 0, got -1"),
        ({"eval_rows": 0, "eval_dataset": "rows.jsonl"}, "eval_rows must be >= 1, got 0"),
        ({"eval_samples_per_prompt": 0}, "eval_samples_per_prompt must be >= 1, got 0"),
    ],
)
def test_settings_that_break_their_rule_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        config_of(**changes).validate()
