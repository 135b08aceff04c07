import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace

import pytest
from tests.waiting import until

from hearth.errors import ConfigError
from training.rewards import (
    GuardedReward,
    RewardDiedError,
    RewardEnsemble,
    RewardTimeoutError,
    Score,
    StuckRewardsError,
    Unscored,
    answer_reward,
    guarded,
    math_reward,
    scored,
)
from training.rewards.processes import RewardProcesses
from training.rewards.timed_calls import TimedCalls

SHORT_S = 0.3


@pytest.fixture
def hang() -> Iterator[Callable[[str, object], float]]:
    """A reward function that computes without end on texts of ``hang``, until the test is over."""
    is_over = threading.Event()

    def reward(completion: str, row: object) -> float:
        while completion == "hang" and not is_over.is_set():
            sum(range(100))
        return float(len(completion))

    yield reward
    is_over.set()


# Functions that behave.


async def test_a_guarded_function_gives_what_the_function_gives():
    async def later(completion: str, row: dict) -> float:
        await asyncio.sleep(0)
        return len(completion) + row["more"]

    plain = guarded(lambda text, row: len(text) + row["more"], timeout_s=5)
    inline = guarded(lambda text, row: len(text) + row["more"])
    hidden = guarded(lambda text, row: later(text, row), timeout_s=5)
    bound = guarded(partial(later), timeout_s=5)

    for reward in (plain, inline, guarded(later, timeout_s=5), guarded(later), hidden, bound):
        assert await reward("abc", {"more": 1}) == 4.0
        assert reward.failures == {}


async def test_a_plain_function_runs_off_the_event_loop_only_with_a_time_limit():
    def here(completion: str, row: object) -> float:
        return float(threading.current_thread() is threading.main_thread())

    assert await guarded(here, timeout_s=5)("", {}) == 0.0
    assert await guarded(here)("", {}) == 1.0


async def test_an_ensemble_keeps_its_disagreement_behind_a_guard():
    ensemble = RewardEnsemble([lambda *_: 0.0, lambda *_: 1.0])

    for reward in (guarded(ensemble, timeout_s=5), guarded(ensemble)):
        assert await reward.score("", {}) == Score(0.5, 0.5)


async def test_whether_an_answer_was_found_is_kept_behind_a_guard():
    def own(completion: str, row: object) -> Score:
        return Score(0.5, parsed=bool(completion))

    for options in ({"timeout_s": 5}, {}):
        marked, unmarked = await scored(
            guarded(answer_reward, **options), ["<answer>4</answer>", "4"], {"ground_truth": 4}
        )
        assert (marked, unmarked) == (Score(1.0, parsed=True), Score(0.0, parsed=False))
        assert await guarded(own, **options).score("", {}) == Score(0.5, parsed=False)
        assert await guarded(own, **options)("", {}) == 0.5


async def test_calls_run_side_by_side_up_to_their_limit():
    running, most = 0, 0
    lock = threading.Lock()

    def reward(completion: str, row: object) -> float:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.02)
        with lock:
            running -= 1
        return float(completion)

    safe = guarded(reward, timeout_s=5, max_concurrent=3)
    rewards = await asyncio.gather(*(safe(str(place), {}) for place in range(12)))

    assert rewards == [float(place) for place in range(12)]
    assert most == 3


@pytest.mark.slow
async def test_waiting_for_a_thread_does_not_count_against_the_time_limit():
    reward = guarded(lambda *_: time.sleep(0.15) or 1.0, timeout_s=0.5, max_concurrent=1)

    assert await asyncio.gather(*(reward("", {}) for _ in range(5))) == [1.0] * 5


# Functions that fail or hang.


async def test_a_function_that_raises_ends_the_run_or_drops_the_completion(caplog):
    def reward(completion: str, row: dict) -> float:
        return row["absent"]

    for timeout_s in (None, 5.0):
        with pytest.raises(KeyError, match="absent"):
            await guarded(reward, timeout_s=timeout_s)("a", {})

        dropping = guarded(reward, timeout_s=timeout_s, on_error="drop")
        assert await dropping("a", {}) is None
        outcome = await dropping.score("a", {})
        assert isinstance(outcome, Unscored)
        assert isinstance(outcome.error, KeyError)
        assert dropping.failures == {"KeyError": 2}
    assert "a completion is dropped: KeyError: 'absent'" in caplog.text


async def test_what_is_no_number_is_a_failure():
    dropping = guarded(lambda *_: None, on_error="drop")

    assert await dropping("", {}) is None
    assert dropping.failures == {"WrongRewardError": 1}


@pytest.mark.parametrize("error", [StopIteration, TimeoutError])
async def test_errors_that_mean_something_to_asyncio_arrive_too(error):
    def reward(completion: str, row: object) -> float:
        raise error("its own")

    with pytest.raises((RuntimeError, TimeoutError)) as raised:
        await guarded(reward, timeout_s=5)("", {})

    assert not isinstance(raised.value, RewardTimeoutError)


@pytest.mark.slow
async def test_a_plain_function_that_computes_on_is_given_up(hang):
    dropping = guarded(hang, timeout_s=SHORT_S, on_error="drop")

    outcomes = await asyncio.gather(*(dropping(text, {}) for text in ("aa", "hang", "b")))

    assert outcomes == [2.0, None, 1.0]
    assert dropping.failures == {"RewardTimeoutError": 1}
    assert dropping.stuck == 1
    with pytest.raises(RewardTimeoutError, match=r"within 0\.3 s.*reward_timeout_s"):
        await guarded(hang, timeout_s=SHORT_S)("hang", {})


@pytest.mark.slow
async def test_an_async_function_that_waits_on_is_canceled():
    canceled = []

    async def reward(completion: str, row: object) -> float:
        try:
            await asyncio.sleep(60 * len(completion))
        except asyncio.CancelledError:
            canceled.append(completion)
            raise
        return 1.0

    dropping = guarded(reward, timeout_s=SHORT_S, on_error="drop")

    assert await asyncio.gather(dropping("", {}), dropping("hang", {})) == [1.0, None]
    assert canceled == ["hang"]
    assert dropping.stuck == 0


@pytest.mark.slow
async def test_too_many_hung_calls_are_refused_even_where_failures_are_dropped(hang):
    dropping = guarded(hang, timeout_s=SHORT_S, on_error="drop", max_stuck=2, max_concurrent=2)

    assert await asyncio.gather(*(dropping("hang", {}) for _ in range(2))) == [None, None]
    with pytest.raises(StuckRewardsError, match=r"got 2 that go on.*isolation='process'"):
        await dropping("a", {})


@pytest.mark.slow
async def test_calls_that_wait_behind_hung_ones_are_refused_and_start_no_thread():
    release = threading.Event()

    def reward(completion: str, row: object) -> float:
        time.sleep(0.01)
        return float(completion != "hang" or release.wait(30))

    safe = guarded(reward, timeout_s=SHORT_S, on_error="drop", max_stuck=2, max_concurrent=2)

    outcomes = await asyncio.gather(
        *(safe("hang", {}) for _ in range(2)),
        *(safe("a", {}) for _ in range(20)),
        return_exceptions=True,
    )

    # One place is free between the first time-out and the second, for whoever is quick enough.
    refused = [outcome for outcome in outcomes if isinstance(outcome, StuckRewardsError)]
    assert outcomes[:2] == [None, None]
    assert refused
    assert all(outcome in (1.0, None) for outcome in outcomes if outcome not in refused)
    assert safe.stuck == 2
    release.set()


@pytest.mark.slow
async def test_a_call_that_ends_after_all_makes_room_again():
    release = threading.Event()

    def reward(completion: str, row: object) -> float:
        release.wait(30)
        return 1.0

    safe = guarded(reward, timeout_s=SHORT_S, on_error="drop", max_stuck=1)
    assert await safe("", {}) is None
    release.set()
    await until(lambda: safe.stuck == 0)

    assert await safe("", {}) == 1.0


async def test_a_thread_takes_one_call_after_the_other():
    threads = TimedCalls(limit=4, max_stuck=8)

    used = {await threads.call(threading.get_ident, timeout_s=5.0) for _ in range(20)}

    assert len(used) == 1


async def test_as_many_calls_run_at_once_as_may_and_their_threads_stay():
    threads = TimedCalls(limit=3, max_stuck=8)
    together = threading.Barrier(3)

    for _ in range(2):
        calls = [threads.call(lambda: together.wait(10), timeout_s=10.0) for _ in range(3)]
        assert sorted(await asyncio.gather(*calls)) == [0, 1, 2]


async def test_a_canceled_call_that_has_no_thread_yet_is_never_made():
    calls = []
    release = threading.Event()
    threads = TimedCalls(limit=1, max_stuck=8)
    first = asyncio.create_task(threads.call(lambda: release.wait(30), timeout_s=None))
    await asyncio.sleep(0)

    second = asyncio.create_task(threads.call(lambda: calls.append("made"), timeout_s=None))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    release.set()

    assert await first is True
    assert calls == []
    assert threads.stuck == 0


def test_a_hung_thread_outlives_its_event_loop_in_peace(recwarn):
    release = threading.Event()
    reward = guarded(lambda *_: float(release.wait(30)), timeout_s=0.02, on_error="drop")

    assert asyncio.run(reward("", {})) is None
    release.set()
    asyncio.run(until(lambda: reward.stuck == 0))

    assert asyncio.run(reward("", {})) == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timeout_s": 0.0}, "timeout_s must be > 0"),
        ({"on_error": "zero"}, "on_error must be one of"),
        ({"isolation": "container", "timeout_s": 1.0}, "isolation must be one of"),
        ({"isolation": "process"}, "timeout_s must be given with isolation='process'"),
        ({"max_stuck": 0}, "max_stuck must be >= 1, got 0"),
        ({"max_concurrent": 0}, "max_concurrent must be >= 1, got 0"),
    ],
)
def test_options_that_break_their_rule_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        guarded(answer_reward, **options)


def test_a_guard_around_a_guard_is_refused():
    with pytest.raises(ConfigError, match="must not be guarded twice"):
        guarded(guarded(answer_reward))


# Processes.


@pytest.fixture(scope="module")
def module(tmp_path_factory) -> Iterator[SimpleNamespace]:
    """Functions of a module that another process can import."""
    folder = tmp_path_factory.mktemp("module")
    source = """
import os, sys, time

class OddError(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")

def reward(completion, row):
    if completion == "hang":
        while True:
            pass
    if completion == "die":
        os._exit(7)
    if completion == "fail":
        raise LookupError("no judge")
    if completion == "odd":
        raise OddError("one", "two")
    if completion == "pid":
        return float(os.getpid())
    if completion == "torch":
        return float("torch" in sys.modules)
    return row["worth"]

async def later(completion, row):
    return row["worth"]
"""
    (folder / "rewards_of_a_test.py").write_text(source)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        import rewards_of_a_test

        yield rewards_of_a_test


@pytest.fixture
def isolated(module) -> Iterator[Callable[..., GuardedReward]]:
    made: list[GuardedReward] = []

    def make(reward_fn=module.reward, **options) -> GuardedReward:
        made.append(guarded(reward_fn, isolation="process", **({"timeout_s": 20} | options)))
        return made[-1]

    yield make
    for guard in made:
        guard.close()


@pytest.mark.slow
async def test_a_process_scores_what_is_sent_and_is_kept(isolated, module):
    reward = isolated()

    assert await reward("a", {"worth": 0.25}) == 0.25
    process = await reward("pid", {})
    assert process == await reward("pid", {}) != os.getpid()
    assert await reward("torch", {}) == 0.0
    assert await isolated(module.later)("a", {"worth": 0.5}) == 0.5


@pytest.mark.slow
async def test_a_process_that_computes_on_is_killed(isolated):
    reward = isolated(timeout_s=1.0, on_error="drop")
    before = int(await reward("pid", {}))

    assert await reward("hang", {}) is None

    assert reward.failures == {"RewardTimeoutError": 1}
    assert reward.stuck == 0
    with pytest.raises(ProcessLookupError):
        os.kill(before, 0)
    assert await reward("pid", {}) != before


@pytest.mark.slow
async def test_what_a_process_finds_arrives_too(isolated):
    reward = isolated(answer_reward)

    assert await reward.score("42", {"ground_truth": "42"}) == Score(0.0, parsed=False)


@pytest.mark.slow
async def test_errors_of_a_process_arrive_with_their_traceback(isolated):
    reward = isolated()

    with pytest.raises(LookupError, match="no judge") as raised:
        await reward("fail", {})
    assert 'raise LookupError("no judge")' in raised.value.__notes__[0]
    # Its class does not survive being sent, so that the text comes.
    with pytest.raises(RuntimeError, match="OddError: one and two"):
        await reward("odd", {})
    with pytest.raises(RewardDiedError, match="got exit code 7"):
        await reward("die", {})
    with pytest.raises(AttributeError, match="local object"):
        await reward("a", {"unsendable": lambda: None})
    assert await reward("a", {"worth": 1.0}) == 1.0


@pytest.mark.slow
def test_an_expression_without_end_is_killed():
    processes = RewardProcesses(math_reward)
    # The first call imports much, which takes seconds on a busy machine.
    right = processes.call(r"\boxed{\frac{1}{2}}", {"ground_truth": "0.5"}, timeout_s=60.0)
    assert right.reward == 1.0

    with pytest.raises(RewardTimeoutError, match="within 1 s"):
        processes.call(r"\boxed{100000000!}", {"ground_truth": "3"}, timeout_s=1.0)

    processes.close()


def test_a_function_that_cannot_be_sent_is_refused():
    with pytest.raises(ConfigError, match="reward_fn must be picklable with isolation='process'"):
        guarded(lambda *_: 1.0, timeout_s=1.0, isolation="process")


# What a recipe calls.


async def test_plain_functions_score_in_order_here_and_now():
    calls: list[str] = []

    def reward(completion: str, row: dict) -> int:
        calls.append(completion)
        return len(completion) * row["worth"]

    pending = scored(reward, ["a", "bb", ""], {"worth": 2})
    with pytest.raises(StopIteration) as done:
        pending.send(None)  # it ends without a turn of any event loop

    assert done.value.value == [Score(2.0), Score(4.0), Score(0.0)]
    assert calls == ["a", "bb", ""]


async def test_awaited_functions_score_side_by_side_and_in_order():
    waiting: list[str] = []
    all_wait = asyncio.Event()

    async def reward(completion: str, row: object) -> float:
        waiting.append(completion)
        if len(waiting) == 3:
            all_wait.set()
        await all_wait.wait()
        return float(completion)

    async with asyncio.timeout(5):
        assert await scored(reward, ["3", "1", "2"], {}) == [Score(3.0), Score(1.0), Score(2.0)]


async def test_the_first_failure_ends_what_is_under_way():
    canceled = []

    async def reward(completion: str, row: object) -> float:
        if completion == "fail":
            raise OSError("no judge")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            canceled.append(completion)
            raise
        return 1.0

    with pytest.raises(OSError, match="no judge"):
        await scored(reward, ["a", "fail", "b"], {})
    assert canceled == ["a", "b"]


async def test_ensembles_and_guards_score_with_what_they_know():
    ensemble = RewardEnsemble([lambda *_: 0.0, lambda *_: 1.0], "minimum")

    def some(completion: str, row: object) -> float:
        return 1 / len(completion)

    assert await scored(ensemble, ["a"], {}) == [Score(0.0, 0.5)]
    first, second = await scored(guarded(some, on_error="drop"), ["ab", ""], {})
    assert first == Score(0.5)
    assert isinstance(second, Unscored)
    assert isinstance(second.error, ZeroDivisionError)
