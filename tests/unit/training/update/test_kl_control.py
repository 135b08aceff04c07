import math
from types import SimpleNamespace

import pytest

from hearth.errors import ConfigError, NumericsError
from training.update.kl_control import LEAST_COEFFICIENT, AdaptiveKL, kl_control


@pytest.mark.parametrize(
    ("kl", "factor"),
    [
        (0.02, 1.0),
        (0.021, 1.005),
        (0.019, 0.995),
        (0.024, 1.02),
        (0.5, 1.02),
        (0.016, 0.98),
        (0.0, 0.98),
        (-0.1, 0.98),
    ],
)
def test_a_step_moves_the_coefficient_by_a_tenth_of_the_relative_error_within_a_fifth(kl, factor):
    control = AdaptiveKL(target=0.02, init=0.1)

    assert control.observe(kl) == control.coefficient == pytest.approx(0.1 * factor)


def test_a_horizon_counts_what_observe_counts():
    # 5 of 100 at a fifth above the target.
    assert AdaptiveKL(1.0, 1.0, horizon=100).observe(9.0, count=5) == pytest.approx(1.01)
    assert AdaptiveKL(1.0, 1.0, horizon=100).observe(9.0, count=500) == pytest.approx(1.2)
    assert AdaptiveKL(1.0, 1.0, horizon=100).observe(0.0, count=500) == pytest.approx(0.8)


def test_it_finds_the_coefficient_that_holds_the_target():
    control = AdaptiveKL(target=0.05, init=0.001)

    for _ in range(600):
        control.observe(0.01 / control.coefficient)  # a policy that gives in to the pull

    assert control.coefficient == pytest.approx(0.2, rel=1e-3)


def test_it_comes_back_from_the_least_coefficient():
    control = AdaptiveKL(target=1.0, init=2 * LEAST_COEFFICIENT)

    lowest = [control.observe(0.0) for _ in range(100)][-1]
    highest = [control.observe(2.0) for _ in range(2000)][-1]

    assert lowest == LEAST_COEFFICIENT
    assert highest > 1.0


@pytest.mark.parametrize("kl", [math.nan, math.inf])
def test_a_kl_that_is_not_finite_is_refused_and_moves_nothing(kl):
    control = AdaptiveKL(target=1.0, init=0.5)

    with pytest.raises(NumericsError, match="kl must be finite"):
        control.observe(kl)

    assert control.coefficient == 0.5


@pytest.mark.parametrize("name", ["target", "init", "horizon"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_numbers_that_are_not_above_0_are_refused(name, value):
    with pytest.raises(ConfigError, match=rf"{name} must be finite and > 0, got {value}"):
        AdaptiveKL(**({"target": 1.0, "init": 1.0, "horizon": 1.0} | {name: value}))


def test_a_recipe_has_a_controller_only_with_a_target():
    assert kl_control(SimpleNamespace(kl_target=None, kl_beta=0.1)) is None

    control = kl_control(SimpleNamespace(kl_target=0.02, kl_beta=0.1))
    assert (control.target, control.coefficient, control.horizon) == (0.02, 0.1, 10.0)
