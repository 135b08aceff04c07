import asyncio

import pytest

from hearth.errors import ConfigError
from hearth.sdk import AdaptiveConcurrencyController, FixedConcurrencyController, RequestOutcome


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def controller(clock) -> AdaptiveConcurrencyController:
    return AdaptiveConcurrencyController(initial_window=16, now=clock)


def finish(controller, *outcomes: RequestOutcome) -> None:
    """Attempts one after the other, each admitted and given back."""

    async def run() -> None:
        for outcome in outcomes:
            await controller.acquire()
            controller.release(outcome)

    asyncio.run(run())


def queued(seconds: float, times: int = 32) -> list[RequestOutcome]:
    return [RequestOutcome(200, prefill_queue_s=seconds)] * times


def test_the_window_starts_where_it_is_told_and_at_8_otherwise():
    assert AdaptiveConcurrencyController().window == 8
    assert AdaptiveConcurrencyController(initial_window=16).window == 16


def test_short_queues_let_the_window_grow_by_at_most_four_per_interval(controller):
    finish(controller, *queued(0.0, 31))
    assert controller.window == 16
    finish(controller, *queued(0.0, 1))
    assert controller.window == 20
    finish(controller, *queued(0.0))
    assert controller.window == 24


WINDOWS = {
    "growth is the headroom below the target": (queued(0.25), 18),
    "long queues halve it": (queued(0.6), 8),
    "congestion quarters it from the third attempt on": ([RequestOutcome(503, attempt=3)], 4),
    "errors without congestion": ([RequestOutcome(500), RequestOutcome(408)], 16),
    "failures, once queue times are known": (
        [*queued(0.5, 1), *[RequestOutcome(429)] * 5, RequestOutcome(None)],
        16,
    ),
}


@pytest.mark.parametrize(("outcomes", "window"), WINDOWS.values(), ids=WINDOWS)
def test_a_window_of_16_becomes(controller, outcomes, window):
    finish(controller, *outcomes)

    assert controller.window == window


def test_one_bad_interval_counts_three_tenths_in_the_average(controller):
    finish(controller, *queued(0.1))

    finish(controller, *queued(1.0))

    summary = controller.step_completed()
    assert summary["prefill_queue_s"] == pytest.approx(0.3 * 1.0 + 0.7 * 0.1)
    assert controller.window == 21, "16 + 4, then 16 + 4 + 0.5 / 0.37"


def test_the_window_stays_within_its_bounds():
    controller = AdaptiveConcurrencyController(initial_window=4, min_window=3, max_window=6)

    for _ in range(3):
        finish(controller, *queued(9.0))
    assert controller.window == 3
    for _ in range(12):
        finish(controller, *queued(0.0))
    assert controller.window == 6


def test_without_queue_times_congestion_shrinks_at_once_and_at_most_once_per_second(
    clock, controller
):
    finish(controller, RequestOutcome(429), RequestOutcome(503), RequestOutcome(None))
    assert controller.window == 8
    clock.now_s += 1.0
    finish(controller, RequestOutcome(None))
    assert controller.window == 4


def test_an_interval_of_successes_without_congestion_adds_one(controller):
    finish(controller, *[RequestOutcome(200)] * 32)
    assert controller.window == 17
    finish(controller, *[RequestOutcome(200)] * 31, RequestOutcome(429))
    assert controller.window == 8
    finish(controller, *[RequestOutcome(400)] * 32)
    assert controller.window == 8


def test_interval_0_adjusts_only_when_the_step_is_completed():
    controller = AdaptiveConcurrencyController(initial_window=16, adjustment_interval=0)
    finish(controller, *queued(0.0, 100))
    assert controller.window == 16

    controller.step_completed()

    assert controller.window == 20


def test_a_shrink_below_what_is_in_flight_is_repaid_before_anybody_is_admitted(clock):
    controller = AdaptiveConcurrencyController(initial_window=4, now=clock)
    admitted: list[int] = []

    async def run() -> None:
        for _ in range(4):
            await controller.acquire()

        async def late(number: int) -> None:
            await controller.acquire()
            admitted.append(number)

        waiting = [asyncio.create_task(late(number)) for number in range(2)]
        await asyncio.sleep(0)
        controller.release(RequestOutcome(429))
        assert (controller.window, controller.in_flight) == (2, 3)
        await asyncio.sleep(0)
        assert admitted == []
        controller.release(RequestOutcome(200))
        assert (controller.window, controller.in_flight) == (2, 2)
        await asyncio.sleep(0)
        assert admitted == []
        controller.release(RequestOutcome(200))
        await asyncio.sleep(0)
        assert admitted == [0]
        controller.release()
        await asyncio.gather(*waiting)

    asyncio.run(run())
    assert admitted == [0, 1]


def test_the_step_summary_counts_and_begins_anew(clock):
    controller = AdaptiveConcurrencyController(initial_window=4, now=clock)
    finish(controller, RequestOutcome(200), RequestOutcome(500), RequestOutcome(429))

    summary = controller.step_completed()

    assert summary == {
        "window": 2.0,
        "requests": 3.0,
        "failures": 2.0,
        "congested": 1.0,
        "grown": 0.0,
        "shrunk": 1.0,
        "in_flight_max": 1.0,
    }
    assert controller.step_completed()["requests"] == 0.0


def test_growth_at_a_steps_end_wakes_those_who_wait_on_another_thread():
    controller = AdaptiveConcurrencyController(initial_window=1, adjustment_interval=0)
    finish(controller, *queued(0.0, 1))

    async def run() -> int:
        await controller.acquire()
        waiting = asyncio.create_task(controller.acquire())
        await asyncio.sleep(0)
        await asyncio.to_thread(controller.step_completed)
        await asyncio.wait_for(waiting, 5)
        return controller.in_flight

    assert asyncio.run(run()) == 2


@pytest.mark.parametrize(
    "make", [lambda: FixedConcurrencyController(1), lambda: AdaptiveConcurrencyController(1)]
)
def test_controllers_outlive_event_loops_and_cancelled_waits(make):
    controller = make()

    async def one_waits_in_vain() -> None:
        await controller.acquire()
        waiting = asyncio.create_task(controller.acquire())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        controller.release()

    for _ in range(3):
        asyncio.run(one_waits_in_vain())
    assert controller.in_flight == 0
    finish(controller, RequestOutcome(200))


def test_room_given_to_one_who_was_cancelled_meanwhile_goes_to_the_next():
    controller = FixedConcurrencyController(1)

    async def run() -> None:
        await controller.acquire()
        first = asyncio.create_task(controller.acquire())
        second = asyncio.create_task(controller.acquire())
        await asyncio.sleep(0)
        controller.release()
        first.cancel()
        await asyncio.wait_for(second, 5)
        assert first.cancelled()
        assert controller.in_flight == 1

    asyncio.run(run())


def test_a_release_without_an_acquire_is_a_programming_error():
    with pytest.raises(RuntimeError, match="one more release"):
        FixedConcurrencyController(1).release()


@pytest.mark.parametrize(
    "options",
    [
        {"initial_window": 0},
        {"initial_window": 300},
        {"min_window": 9},
        {"multiplicative_decrease": 0.0},
        {"ema_alpha": 1.5},
        {"prefill_queue_target": 0.0},
        {"adjustment_interval": -1},
    ],
)
def test_bounds_and_rates_that_make_no_sense_are_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options)).split("_")[0]):
        AdaptiveConcurrencyController(**options)
