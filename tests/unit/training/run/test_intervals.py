"""Intervals of measures over rows: formulas, edges, and how often they hold."""

import math
import random

import pytest

from training.run.intervals import Interval, mean_interval, paired_difference, share_interval


def test_the_mean_of_rows_has_the_interval_of_their_spread():
    found = mean_interval([0.0, 1.0, 1.0, 2.0])

    half = 1.959963984540054 * math.sqrt(2 / 3) / 2
    assert found.mean == 1.0
    assert found.low == pytest.approx(1 - half)
    assert found.high == pytest.approx(1 + half)


def test_single_answers_have_wilsons_interval_of_one_draw_less():
    shares = [1.0] * 8 + [0.0] * 3

    found = share_interval(shares)

    n, p, z = 10.0, 8 / 11, 1.959963984540054
    center = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    assert found == Interval(p, pytest.approx(center - half), pytest.approx(center + half))


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_all_or_nothing_is_not_certain(share):
    found = share_interval([share] * 20)

    # Wilson's bound for none of 20.
    z2 = 1.959963984540054**2
    assert abs(found.mean - share) == 0.0
    assert found.high - found.low == pytest.approx(z2 / (20 + z2))
    assert 0.0 <= found.low <= found.high <= 1.0


def test_rows_that_vary_less_than_single_answers_are_surer():
    alike = share_interval([0.4, 0.5, 0.6] * 10)
    single = share_interval([0.0, 1.0] * 15)

    assert alike.mean == pytest.approx(single.mean)
    assert alike.high - alike.low < 0.3 * (single.high - single.low)


def test_nothing_is_known_of_no_rows_and_no_spread_of_one():
    for find in (mean_interval, share_interval):
        assert all(map(math.isnan, (find([]).mean, find([]).low, find([]).high)))
    assert mean_interval([0.5]).mean == 0.5
    assert math.isnan(mean_interval([0.5]).low)
    assert share_interval([1.0]).low == pytest.approx(0.2065, abs=1e-4)


def test_a_difference_is_of_the_rows_that_both_answered():
    found = paired_difference({0: 1.0, 1: 0.5, 2: 1.0, 3: 0.0}, {1: 0.5, 2: 0.0, 3: 1.0, 4: 1.0})

    assert (found.rows, found.better, found.worse) == (3, 1, 1)
    assert found.interval == mean_interval([0.0, 1.0, -1.0])


def test_pairs_are_surer_than_two_intervals_where_rows_differ_in_difficulty():
    rng = random.Random(0)
    easy = {place: rng.random() for place in range(200)}
    better = {place: min(1.0, share + 0.05) for place, share in easy.items()}

    found = paired_difference(better, easy)

    assert found.interval.low > 0.04
    assert share_interval(list(easy.values())).high > share_interval(list(better.values())).low


def test_intervals_hold_in_about_95_of_100_evaluations_of_rows_with_four_answers():
    rng = random.Random(1)
    hits, trials = 0, 400
    for _ in range(trials):
        rows = [rng.betavariate(1.0, 2.0) for _ in range(60)]
        found = share_interval([sum(rng.random() < p for _ in range(4)) / 4 for p in rows])
        hits += found.low <= 1 / 3 <= found.high

    assert 0.92 <= hits / trials <= 0.98
