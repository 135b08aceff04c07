"""A rank that dies or hangs ends its trainer in bounded time, with its last words."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.scale.ranks.trainers import RankTrainer, random_data
from tests.waiting import is_running, wait_until

SOON_S = 30.0
"""For a machine that is busy; a death is known within a second on another."""


@pytest.fixture
def start(start: Callable[..., RankTrainer]) -> Iterator[Callable[..., RankTrainer]]:
    """Trainers that end with the test."""
    made: list[RankTrainer] = []

    def begin(ranks: int, **options: Any) -> RankTrainer:
        made.append(start(ranks, **options))
        return made[-1]

    yield begin
    for trainer in made:
        trainer.close()


def wait_for_end(*pids: int) -> None:
    wait_until(lambda: not is_running(*pids), SOON_S, f"the end of {pids}")


def stop_amid_a_pass(trainer: RankTrainer, pid: int) -> None:
    """Stop a rank, which cannot answer a pass that the others have begun."""
    model = trainer.create_model()
    os.kill(pid, signal.SIGSTOP)
    data = [datum.as_dict() for datum in random_data((50, 40, 30))]
    trainer.begin("forward_backward", model_id=model, forward_backward_input={"data": data})


@pytest.mark.parametrize("is_busy", [False, True], ids=["idle", "amid an operation"])
def test_a_rank_that_is_killed_is_named_with_its_last_lines(start, is_busy):
    trainer = start(2)
    own, pid = trainer.worker.pid, trainer.pid(1)
    assert own is not None
    if is_busy:
        stop_amid_a_pass(trainer, pid)
    else:
        trainer.create_model()

    os.kill(pid, signal.SIGKILL)

    message = trainer.watcher.wait_failed(SOON_S).describe()
    assert "the ranks of a trainer must all keep running, got: rank-1 ended by SIGKILL" in message
    assert f"process {pid}," in message
    wait_for_end(own, pid)


@pytest.mark.parametrize("is_busy", [False, True], ids=["idle", "amid an operation"])
def test_a_rank_that_is_stopped_is_killed_long_before_its_time(start, is_busy):
    trainer = start(2)
    own, pid = trainer.worker.pid, trainer.pid(1)
    assert own is not None

    if is_busy:
        stop_amid_a_pass(trainer, pid)
    else:
        os.kill(pid, signal.SIGSTOP)

    message = trainer.watcher.wait_failed(SOON_S).describe()
    assert "rank-1 hung, and was killed: it was stopped for" in message
    wait_for_end(own, pid)


def test_a_rank_that_does_not_answer_is_given_up_after_its_time_and_named(start):
    trainer = start(3, rank_timeout_s=2.0)
    own, pid = trainer.worker.pid, trainer.pid(1)
    assert own is not None

    stop_amid_a_pass(trainer, pid)

    message = trainer.watcher.wait_failed(SOON_S).describe()
    assert "got: rank-1 still runs, and does not answer" in message
    assert f"process {pid}," in message
    wait_for_end(own, pid)


def test_a_model_that_cannot_be_loaded_is_said_before_anything_runs(start, tmp_path):
    with pytest.raises(AssertionError, match="base_model must be an existing folder or a hub id"):
        start(2, source=str(tmp_path / "nowhere"))


def test_a_trainer_that_is_stopped_leaves_no_rank(start):
    trainer = start(2)
    pid = trainer.pid(1)
    trainer.create_model()

    trainer.close()

    assert not trainer.watcher.has_failed.is_set()
    wait_for_end(pid)
