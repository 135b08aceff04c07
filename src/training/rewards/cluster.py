"""Calls of one function as tasks of a Ray cluster, given up when they take too long."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hearth.errors import ConfigError
from training.rewards.errors import RewardDiedError, RewardTimeoutError
from training.rewards.processes import call_function
from training.rewards.score import Score

ROOM_TIMEOUT_S = 600.0
"""Seconds in which the cluster must have a CPU for a call."""

_connecting = threading.Lock()


class RewardTasks:
    """Calls ``function`` in tasks of one CPU each, on the cluster that ``RAY_ADDRESS`` names.

    Without one it is a cluster of this machine.

    Raises:
        ConfigError: Ray is not installed, or the function cannot be sent to another process.
    """

    def __init__(self, function: Callable[[str, Mapping[str, Any]], Any]) -> None:
        require_ray("isolation")
        from ray import cloudpickle

        try:
            self._function: bytes = cloudpickle.dumps(function)
        except Exception as error:  # noqa: BLE001 - pickling an object may run anything
            raise ConfigError(
                f"reward_fn must be picklable with isolation='ray', got {function!r} ({error}): "
                "define it at the top of a module, or leave it to isolation='thread'"
            ) from None

    def call(self, completion: str, row: Mapping[str, Any], timeout_s: float) -> Score:
        """The score of a completion; the call has ``timeout_s`` from when its task begins.

        Raises:
            RewardTimeoutError: it took longer; its process is ended.
            RewardDiedError: its process or its machine died, or the cluster had no room for it.
            Exception: what the function raised.
        """
        import ray
        from ray.exceptions import RayError

        connect_to_ray()
        task = ray.remote(_score_in_task).options(num_returns="streaming", max_retries=0)
        reports: Any = task.remote(self._function, completion, dict(row))
        try:
            if not ray.wait([reports], timeout=ROOM_TIMEOUT_S)[0]:
                ray.cancel(reports)
                raise RewardDiedError(
                    f"cluster must have a CPU for reward_fn within {ROOM_TIMEOUT_S:g} s, got none"
                )
            ray.get(next(reports))
            if not ray.wait([reports], timeout=timeout_s)[0]:
                ray.cancel(reports, force=True)
                raise RewardTimeoutError(timeout_s)
            error, score = ray.get(next(reports))
        except RayError as error:
            text = " ".join(str(error).split())[:300]
            raise RewardDiedError(f"reward_fn's process must live, got: {text}") from None
        if error is not None:
            raise error
        return score

    def close(self) -> None:
        """Nothing: a task's process is the cluster's, and ends with the program."""


def require_ray(field: str) -> None:
    """Judge a field that asks for Ray.

    Raises:
        ConfigError: it is not installed.
    """
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            f"{field} must not be 'ray' where Ray is not installed: pip install 'hearth-rl[ray]'"
        )


def connect_to_ray() -> bool:
    """Connect to the cluster that ``RAY_ADDRESS`` names, or to one of this machine's own.

    False when this process was connected before.
    """
    from hearth.launch.ray.cluster import connect

    with _connecting:
        return connect(least_cpus=None)


def _score_in_task(pickled: bytes, completion: str, row: Mapping[str, Any]) -> Iterator[Any]:
    """That it begins, then (error or None, score)."""
    from ray import cloudpickle

    # What the function imports is not its call's time.
    function: Callable[[str, Mapping[str, Any]], Any] = cloudpickle.loads(pickled)
    yield None
    yield call_function(function, completion, row)
