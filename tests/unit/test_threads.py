"""The budget of CPU threads: shares by who computes now, in one process and across processes."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from hearth.threads import Member, ThreadBudget, refresh, use_one_if_small


@pytest.fixture(autouse=True)
def unchanged() -> Iterator[None]:
    """Other tests have the threads that they had."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Worker:
    """A thread that is told its phases, as an engine's own thread is; daemon, joined by ``end``."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self._asked: list[tuple[str, threading.Event]] = []
        self._wake = threading.Condition()
        self.threads = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def note(self, phase: str) -> int:
        """Enter a phase, or with "" only look again; the threads that it has then."""
        done = threading.Event()
        with self._wake:
            self._asked.append((phase, done))
            self._wake.notify()
        assert done.wait(30)
        return self.threads

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: bool(self._asked))
                phase, done = self._asked.pop(0)
            if phase:
                self.member.note(phase)
            else:
                refresh()
            self.threads = torch.get_num_threads()
            done.set()


@pytest.mark.parametrize(("total", "shares"), [(8, (4, 4)), (3, (2, 1)), (2, (1, 1)), (1, (1, 1))])
def test_who_is_alone_has_all_threads_and_who_is_not_a_share(
    total: int, shares: tuple[int, int]
) -> None:
    budget = ThreadBudget(total)
    trainer, sampler = Worker(budget.add_member()), Worker(budget.add_member())

    assert trainer.note("forward_backward") == total
    assert sampler.note("sampling") == shares[1]
    assert trainer.note("") == shares[0]
    trainer.note("idle")
    assert sampler.note("") == total


def test_loading_a_snapshot_takes_no_share() -> None:
    budget = ThreadBudget(2)
    trainer, sampler = Worker(budget.add_member()), Worker(budget.add_member())

    sampler.note("load_snapshot")

    assert trainer.note("forward_backward") == 2


def test_more_workers_than_threads_have_one_each() -> None:
    budget = ThreadBudget(2)
    workers = [Worker(budget.add_member()) for _ in range(5)]
    for worker in workers:
        worker.note("sampling")

    assert [worker.note("") for worker in workers] == [1] * 5


def test_who_has_left_counts_no_longer() -> None:
    budget = ThreadBudget(2)
    trainer, sampler = Worker(budget.add_member()), Worker(budget.add_member())
    trainer.note("forward_backward")
    sampler.note("sampling")

    trainer.member.leave()

    assert sampler.note("") == 2


def test_whoever_rests_leaves_the_process_its_threads() -> None:
    """Threads that are made later take torch's number of then."""
    budget = ThreadBudget(4)
    trainer, sampler = Worker(budget.add_member()), Worker(budget.add_member())
    trainer.note("forward_backward")
    assert sampler.note("sampling") == 2

    assert sampler.note("idle") == 4
    assert trainer.note("idle") == 4


def test_a_thread_outside_a_budget_keeps_its_number() -> None:
    torch.set_num_threads(3)

    refresh()

    assert torch.get_num_threads() == 3


def test_a_full_board_takes_no_part(caplog: pytest.LogCaptureFixture) -> None:
    budget = ThreadBudget(2)
    for _ in range(64):
        budget.add_member()

    # In a thread of its own: a member that still computes would set the threads of later tests.
    one_more = Worker(budget.add_member())

    assert "does not share the budget" in caplog.text
    assert one_more.note("sampling") == 2


@pytest.mark.parametrize(("values", "threads"), [(1000, 1), (10**9, 2)])
def test_small_operations_have_one_thread(values: int, threads: int) -> None:
    torch.set_num_threads(2)

    with use_one_if_small(values):
        assert torch.get_num_threads() == threads

    assert torch.get_num_threads() == 2
