"""A reward function that other processes import by name, and little else with it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from typing import Any

from training.rewards import Score


def length(completion: str, row: Mapping[str, Any]) -> Score:
    """The length of a completion; or what its text says: raise, hang, die."""
    if completion == "raise":
        raise ValueError("no such answer")
    if completion == "hang":
        time.sleep(600)
    if completion == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    return Score(len(completion) / row["most"], parsed=True)
