"""The rollout contract under the name that the product documents import it by (document 004)."""

from training.samples.rollout import (
    Rollout,
    RolloutFn,
    RolloutFnFactory,
    RolloutResult,
    RolloutRun,
    RolloutSample,
    RolloutSetup,
)

__all__ = [
    "Rollout",
    "RolloutFn",
    "RolloutFnFactory",
    "RolloutResult",
    "RolloutRun",
    "RolloutSample",
    "RolloutSetup",
]
