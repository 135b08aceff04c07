"""A KL coefficient that follows the measured KL, instead of one that is fixed."""

from __future__ import annotations

import math

from hearth.errors import ConfigError, NumericsError
from training.config.rl import RLConfig

STEP_HORIZON = 10.0
"""Steps of a recipe over which the coefficient moves: the paper's gain of 0.1 a step."""

MOST_RELATIVE_ERROR = 0.2
"""However far off the KL is, it counts as a fifth of the target: one odd batch moves little."""

LEAST_COEFFICIENT = 1e-8
"""Below it a product could fall to 0, from where none comes back."""


class AdaptiveKL:
    """The controller of Ziegler et al. 2019 (arXiv:1909.08593, section 2.2).

    After each batch the coefficient is multiplied by ``1 + error / horizon``, where ``error`` is
    ``KL / target - 1``, held within a fifth. ``horizon`` is in the unit of ``observe``'s counts:
    batches by default, and 10 is the paper's gain of 0.1; their code counts samples instead.

    Raises:
        ConfigError: target, init or horizon is not above 0.
    """

    def __init__(self, target: float, init: float, horizon: float = STEP_HORIZON) -> None:
        for name, value in (("target", target), ("init", init), ("horizon", horizon)):
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name} must be finite and > 0, got {value}")
        self.target = target
        self.horizon = horizon
        self.coefficient = init
        """The coefficient in force; a resumed run sets it to the one it had."""

    def observe(self, kl: float, count: float = 1.0) -> float:
        """The coefficient from now on, after ``count`` of what ``horizon`` counts had this KL.

        More than a whole horizon at once counts as one, so that the factor stays positive.

        Raises:
            NumericsError: the KL is not finite; the coefficient stays.
        """
        if not math.isfinite(kl):
            raise NumericsError(f"kl must be finite, got {kl}: the policy has left the reference")
        error = min(max(kl / self.target - 1, -MOST_RELATIVE_ERROR), MOST_RELATIVE_ERROR)
        factor = 1 + error * min(count / self.horizon, 1.0)
        self.coefficient = max(self.coefficient * factor, LEAST_COEFFICIENT)
        return self.coefficient


def kl_control(config: RLConfig) -> AdaptiveKL | None:
    """The controller that a recipe's config asks for, at its start; None with a fixed coefficient.

    Raises:
        ConfigError: ``kl_target`` or ``kl_beta`` is not above 0.
    """
    if config.kl_target is None:
        return None
    return AdaptiveKL(config.kl_target, config.kl_beta)
