"""What goes wrong with a reward function, beside what it raises itself."""

from __future__ import annotations

from hearth.errors import ConfigError, HearthError


class WrongRewardError(ConfigError, TypeError):
    """A reward function returned what is neither a number nor a score."""


class RewardTimeoutError(HearthError, TimeoutError):
    """A reward function took longer than it may."""

    def __init__(self, timeout_s: float) -> None:
        """Say how long was waited."""
        super().__init__(
            f"reward_fn must return within {timeout_s:g} s, got nothing: raise its time limit "
            "(reward_timeout_s), or drop what it does not finish (reward_errors='drop')"
        )


class StuckRewardsError(HearthError, RuntimeError):
    """Too many calls of a reward function go on after they were given up."""


class RewardDiedError(HearthError, RuntimeError):
    """The process that ran a reward function ended."""
