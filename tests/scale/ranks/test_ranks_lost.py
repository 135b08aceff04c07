"""A rank that dies or hangs ends its trainer in bounded time, with its last words."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.scale.ranks.trainers import RankTrainer, random_data

from hearth.launch.records import ProcessId

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


def assert_gone(*pids: int) -> None:
    end_s = time.monotonic() + SOON_S
    while any(ProcessId.of(pid) is not None for pid in pids):
        assert time.monotonic() < end_s, f"one of {pids} still runs"
        time.sleep(0.02)


@pytest.mark.parametrize("is_busy", [False, True], ids=["idle", "amid an operation"])
def test_a_rank_that_is_killed_is_named_with_its_last_lines(
    start: Callable[..., RankTrainer], is_busy: bool
) -> None:
    trainer = start(2)
    own, pids = trainer.worker.pid, [trainer.pid(1)]
    assert own is not None
    model = trainer.create_model()
    if is_busy:
        # It cannot answer, so that the others are in the middle when it dies.
        os.kill(pids[0], signal.SIGSTOP)
        data = [datum.as_dict() for datum in random_data((50, 40, 30))]
        trainer.begin("forward_backward", model_id=model, forward_backward_input={"data": data})

    os.kill(pids[0], signal.SIGKILL)

    assert trainer.heard.has_failed.wait(SOON_S)
    assert trainer.heard.report is not None
    message = trainer.heard.report.describe()
    assert "the ranks of a trainer must all keep running, got: rank-1 ended by SIGKILL" in message
    assert f"process {pids[0]}," in message
    assert_gone(own, *pids)


def test_a_rank_that_hangs_is_given_up_after_its_time_and_named(
    start: Callable[..., RankTrainer],
) -> None:
    trainer = start(3, rank_timeout_s=8.0)
    own, pid = trainer.worker.pid, trainer.pid(1)
    assert own is not None
    model = trainer.create_model()
    os.kill(pid, signal.SIGSTOP)

    data = [datum.as_dict() for datum in random_data((50, 40, 30))]
    trainer.begin("forward_backward", model_id=model, forward_backward_input={"data": data})

    assert trainer.heard.has_failed.wait(8.0 + SOON_S)
    assert trainer.heard.report is not None
    message = trainer.heard.report.describe()
    assert "got: rank-1 still runs, and does not answer" in message
    assert f"process {pid}," in message
    assert_gone(own, pid)


def test_a_model_that_cannot_be_loaded_is_said_before_anything_runs(
    start: Callable[..., RankTrainer], tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match="base_model must be an existing folder or a hub id"):
        start(2, source=str(tmp_path / "nowhere"))


def test_a_trainer_that_is_stopped_leaves_no_rank(start: Callable[..., RankTrainer]) -> None:
    trainer = start(2)
    pid = trainer.pid(1)
    trainer.create_model()

    trainer.close()

    assert not trainer.heard.has_failed.is_set()
    assert_gone(pid)
