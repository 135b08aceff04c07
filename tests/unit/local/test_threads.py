"""The budget of compute threads, with a number that is only written down."""

import pytest

from hearth.local.threads import ThreadBudget


class Threads:
    """What ``torch.set_num_threads`` would have been told last."""

    def __init__(self, total):
        self.now = total
        self.budget = ThreadBudget(total, self.set)

    def set(self, threads):
        self.now = threads


@pytest.mark.parametrize(("total", "beside"), [(8, 4), (3, 1), (2, 1), (1, 1)])
def test_who_is_alone_has_all_threads_and_who_is_not_a_share(total, beside):
    threads = Threads(total)

    threads.budget.note("trainer", is_busy=True)
    assert threads.now == total
    threads.budget.note("sampler", is_busy=True)
    assert threads.now == beside
    threads.budget.note("trainer", is_busy=False)
    assert threads.now == total
    threads.budget.note("sampler", is_busy=False)
    assert threads.now == total


def test_a_worker_that_says_twice_what_it_does_counts_once():
    threads = Threads(4)

    for _ in range(3):
        threads.budget.note("trainer", is_busy=True)
    assert threads.now == 4
    for _ in range(2):
        threads.budget.note("trainer", is_busy=False)
    threads.budget.note("sampler", is_busy=True)

    assert threads.now == 4


def test_more_workers_than_threads_have_one_each():
    threads = Threads(2)

    for number in range(5):
        threads.budget.note(f"worker-{number}", is_busy=True)

    assert threads.now == 1


def test_a_worker_sets_its_own_threads_although_the_share_is_as_before():
    """torch has a number per thread as well, which may be of an earlier share."""
    told = []
    budget = ThreadBudget(2, told.append)

    budget.note("trainer", is_busy=True)
    budget.note("sampler", is_busy=True)
    budget.note("sampler", is_busy=True)

    assert told == [2, 1, 1]
