"""The simulation of many GPUs: nothing is lost in it, and simple cases are as one computes them."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.modules import load_module

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "scale_simulation.py"
CONSTANTS = {
    "recipe_s": 1e-3,
    "recipe_token_s": 1e-6,
    "gateway_s": 5e-4,
    "gateway_token_s": 5e-7,
    "answer_bytes_per_token": 40.0,
    "datum_bytes_per_token": 12.0,
    "save_s_per_byte": 1e-10,
    "load_s_per_byte": 1e-10,
    "delta_share": 0.03,
}


@pytest.fixture(scope="module")
def scale() -> ModuleType:
    return load_module(SCRIPT)


@pytest.fixture
def fleet(scale: ModuleType) -> Any:
    """Four replicas, and a trainer that keeps up with them."""
    return scale.Fleet(
        replicas=4,
        rows=32,
        step_s=0.02,
        row_s=1e-4,
        training_s=1e-4,
        gateway_s=1e-4,
        recipe_s=1e-3,
        save_s=0.5,
        transfer_s=0.1,
        load_s=0.3,
        swap_s=0.1,
        prompts=8,
        group=4,
        median_tokens=200.0,
        longest=1000,
        prompt_tokens=50,
    )


def never() -> bool:
    return False


@pytest.mark.parametrize("late", [0, 1, 3])
def test_every_sample_is_trained_or_still_on_its_way(scale, fleet, late):
    report = scale.simulate(replace(fleet, late=late), steps=6)

    assert report.submitted == report.trained + report.unresolved
    assert report.trained >= (scale.WARM_UP + 6) * fleet.batch
    assert report.unresolved <= (late + 1) * fleet.batch
    assert 0 <= report.mean_offset <= report.most_offset <= late


def test_no_share_is_above_one(scale, fleet):
    report = scale.simulate(fleet)

    for name in ("trainer", "recipe", "gateway", "sync"):
        assert 0 < getattr(report, name) <= 1 + 1e-9, name
    assert report.sync_s >= fleet.save_s + fleet.transfer_s + fleet.load_s + fleet.swap_s - 1e-9


def test_two_servers_in_a_row_are_as_slow_as_the_slower_one(scale):
    clock = scale.Clock()
    cores = scale.Cores(clock, math.inf)
    first, second = scale.Line(clock, cores), scale.Line(clock, cores)
    ends: list[float] = []

    for _ in range(10):
        first.put(2.0, lambda: second.put(3.0, lambda: ends.append(clock.now)))
    clock.run(never)

    assert ends == pytest.approx([2 + 3 * number for number in range(1, 11)])
    assert (first.busy_s, second.busy_s) == (20.0, 30.0)


def test_two_random_servers_in_a_row_have_the_mean_time_of_a_jackson_network(scale):
    # Poisson arrivals and exponential work: each server is M/M/1, with 1 / (mu - lambda).
    arrivals, rates, chance = 0.6, (1.0, 0.9), random.Random(3)
    clock = scale.Clock()
    cores = scale.Cores(clock, math.inf)
    lines = [scale.Line(clock, cores) for _ in rates]
    times: list[float] = []

    def arrive(begun_s: float) -> None:
        lines[0].put(
            chance.expovariate(rates[0]),
            lambda: lines[1].put(
                chance.expovariate(rates[1]), lambda: times.append(clock.now - begun_s)
            ),
        )

    now = 0.0
    for _ in range(100_000):
        now += chance.expovariate(arrivals)
        clock.after(now, lambda now=now: arrive(now))
    clock.run(never)

    expected = sum(1 / (rate - arrivals) for rate in rates)
    assert statistics.fmean(times) == pytest.approx(expected, rel=0.05)
    assert lines[0].busy_s / clock.now == pytest.approx(arrivals / rates[0], rel=0.02)


def test_rows_of_a_replica_are_sampled_side_by_side(scale, fleet):
    clock = scale.Clock()
    asked = replace(fleet, rows=2, step_s=1.0, row_s=0.5)
    replica = scale.Replica(clock, asked, scale.Cores(clock, math.inf))
    ends: dict[str, float] = {}

    def sample(name: str, tokens: int) -> None:
        replica.add(tokens, lambda: ends.__setitem__(name, clock.now))

    sample("short", 10)
    sample("long", 30)
    sample("waits", 5)
    clock.after(5.0, lambda: replica.pause(100.0, lambda: None))
    clock.run(never)

    # Two seconds a token with two rows: short ends at 20, the next one takes its place until 30,
    # and the long one has 15 of 30 tokens then, and is alone.
    assert ends == pytest.approx({"short": 120.0, "waits": 130.0, "long": 130.0 + 15 * 1.5})
    assert replica.sampled == 45


def test_completions_go_to_the_replica_with_least_to_do(scale, fleet):
    clock = scale.Clock()
    asked = replace(fleet, replicas=3, rows=1, step_s=1.0, row_s=0.0)
    pool = scale.Pool(clock, asked, scale.Cores(clock, math.inf))
    ends: list[float] = []

    for tokens in (9, 2, 5, 1):
        pool.add(tokens, lambda: ends.append(clock.now))
    clock.run(lambda: len(ends) == 1)
    pool.add(1, lambda: ends.append(clock.now))
    clock.run(never)

    # The fourth waited for the first of three equals; the fifth found one that was idle.
    assert ends == pytest.approx([2, 3, 5, 9, 10])


def test_a_drain_ends_all_completions_before_the_swap_and_has_new_ones_wait(scale, fleet):
    ends: dict[bool, dict[str, float]] = {}
    for in_flight in (False, True):
        clock = scale.Clock()
        asked = replace(fleet, replicas=2, step_s=1.0, row_s=0.0, swap_s=5.0, in_flight=in_flight)
        pool = scale.Pool(clock, asked, scale.Cores(clock, math.inf))
        seen = ends.setdefault(in_flight, {})

        def sample(name, tokens, pool=pool, seen=seen, clock=clock):
            pool.add(tokens, lambda: seen.__setitem__(name, clock.now))

        sample("short", 10)
        sample("long", 30)
        clock.after(
            4.0,
            lambda pool=pool, seen=seen, clock=clock: pool.swap(
                lambda: seen.__setitem__("served", clock.now)
            ),
        )
        clock.after(12.0, lambda sample=sample: sample("new", 10))
        clock.run(never)

    assert ends[False] == pytest.approx({"short": 10, "long": 30, "served": 35, "new": 45})
    assert ends[True] == pytest.approx({"served": 9, "short": 15, "long": 35, "new": 22})


def test_who_computes_at_one_time_shares_the_cores(scale):
    clock = scale.Clock()
    cores = scale.Cores(clock, 2)
    lines = [scale.Line(clock, cores, processes) for processes in (1, 1, 2)]
    ends: list[tuple[int, float]] = []

    for number, work in enumerate((2.0, 4.0, 3.0)):
        lines[number].put(work, lambda number=number: ends.append((number, clock.now)))
    clock.run(never)

    # Four processes on two cores are half as fast until the first ends at 4; then three have two
    # thirds of a core each: the last has a second of work left then, which ends at 5.5, and the
    # other, alone, the rest of its second.
    assert ends == [(0, pytest.approx(4.0)), (2, pytest.approx(5.5)), (1, pytest.approx(6.5))]


@pytest.mark.parametrize(
    ("better", "name"),
    [
        ({"replicas": 8}, "more replicas"),
        ({"training_s": 5e-5}, "a faster trainer"),
        ({"recipe_s": 1e-4}, "a faster recipe"),
        ({"save_s": 0.0, "load_s": 0.0}, "a faster weight sync"),
        ({"late": 2}, "more overlap"),
    ],
    ids=lambda case: case if isinstance(case, str) else "",
)
def test_nothing_that_is_better_makes_a_run_slower(scale, fleet, better, name):
    # A drain makes runs wait for the longest completions, whatever else is faster.
    fleet = replace(fleet, in_flight=True)
    before = scale.simulate(fleet, steps=20).samples_per_s

    assert scale.simulate(replace(fleet, **better), steps=20).samples_per_s >= 0.98 * before


@pytest.mark.parametrize(
    ("slow", "bottleneck", "most"),
    [
        ({"recipe_s": 0.4}, "recipe process", 2.5),
        ({"gateway_s": 0.4}, "gateway", 2.5),
        ({"training_s": 0.01}, "trainer", 1 / (0.01 * 50)),
        ({"rows": 1000, "sigma": 3.0, "longest": 100_000}, "long completions", 30.0),
        ({"save_s": 0.0, "transfer_s": 60.0}, "weight sync", 2 * 32 / 60),
        ({"in_flight": False}, "drain", 2.5),
    ],
)
def test_what_is_slow_is_named_and_sets_the_pace(scale, fleet, slow, bottleneck, most):
    report = scale.simulate(replace(fleet, **({"in_flight": True} | slow)))

    assert report.bottleneck == bottleneck
    assert report.samples_per_s <= most


def test_a_run_is_as_its_seed_says(scale, fleet):
    assert scale.simulate(fleet, seed=1) == scale.simulate(fleet, seed=1)
    assert scale.simulate(fleet, seed=1) != scale.simulate(fleet, seed=2)


def test_gpus_are_divided_and_the_table_has_a_row_for_each_number(scale):
    asked = scale.read_arguments(["--least-prompts", "4", "--median-tokens", "100"])
    found = scale.Constants(**CONSTANTS)

    reports = {}
    for gpus in (2, 8):
        fleet = scale.fleet_of(gpus, found, asked)
        reports[gpus] = fleet, scale.simulate(fleet, steps=2)

    assert 1 <= reports[8][0].replicas <= 7
    assert reports[8][1].samples_per_s > reports[2][1].samples_per_s
    assert scale.table(reports).count("\n") == 3
