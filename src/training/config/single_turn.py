"""The settings of recipes that sample a row's completions in one turn and score them here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tyro.conf import Suppress

from training.config.rl import RLConfig

RewardWorkers = Literal["loop", "process", "ray"]


@dataclass(kw_only=True)
class SingleTurnConfig(RLConfig):
    """Settings of sampling and rewards beside those that all recipes share."""

    reward: str | None = None
    """Reward function where main gets none, as MODULE:FUNCTION; modules of the current folder are
    found too. None compares the last marked answer with the row's ground_truth."""
    max_concurrent: int = 32
    """Sampling requests in flight, counted one by one."""
    truncated_completions: Literal["drop", "score"] = "drop"
    """What becomes of completions cut by max_completion_tokens: drop leaves them out, since an
    answer that was not finished cannot be judged; score gives them to the reward function. The run
    says so when it drops the first. Where most answers are long, raise max_completion_tokens."""
    reward_timeout_s: float | None = None
    """Seconds that the reward of one completion may take, off the event loop; None: no limit."""
    reward_errors: Literal["raise", "drop"] = "raise"
    """What a reward function that fails or is late does: end the run, or drop the completion."""
    reward_workers: RewardWorkers = "loop"
    """Where reward functions run: on this program's event loop (with reward_timeout_s on threads
    beside it), in processes of this machine, or as tasks of the Ray cluster that RAY_ADDRESS
    names; the last two need reward_timeout_s and a picklable function."""
    try_reward: bool = True
    """Call the reward function once before anything is started, on a made-up completion of the
    first row, so that a mistake in it is found at once. Turn it off for a function whose calls cost
    something or leave something behind. Async functions, functions that capture variables, objects
    with attributes and functions that run on a Ray cluster are not tried."""
    rollout_workers: Suppress[RewardWorkers | None] = None
    """Older name of reward_workers."""
