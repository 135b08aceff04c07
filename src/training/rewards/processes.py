"""Calls of one function in processes of their own, killed when they take too long."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import multiprocessing
import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

from hearth.errors import ConfigError
from training.rewards.errors import RewardDiedError, RewardTimeoutError
from training.rewards.score import Score, as_score

START_TIMEOUT_S = 120.0
"""Seconds in which a process must have imported what the function needs."""

_READY = "ready"


@dataclass
class _Worker:
    """A process that serves calls, one at a time."""

    process: SpawnProcess
    connection: Connection

    def receive(self, timeout_s: float) -> Any:
        """The process's next message.

        Raises:
            RewardTimeoutError: none came; the process is killed.
            RewardDiedError: it ended instead.
        """
        try:
            if self.connection.poll(timeout_s):
                return self.connection.recv()
        except (EOFError, ConnectionError):
            self.process.join(5.0)
            raise RewardDiedError(
                f"reward_fn's process must live, got exit code {self.process.exitcode}: see what "
                "it wrote to stderr; a program that starts processes needs the guard "
                "`if __name__ == '__main__'`"
            ) from None
        self.kill()
        raise RewardTimeoutError(timeout_s)

    def kill(self) -> None:
        """End the process, whatever it does."""
        self.process.kill()
        self.process.join()
        self.connection.close()


class RewardProcesses:
    """Processes that call ``function``; as many as there are calls at once, kept for the next ones.

    They are started afresh, without what this process has loaded, and end with it.

    Raises:
        ConfigError: the function cannot be sent to another process.
    """

    def __init__(self, function: Callable[[str, Mapping[str, Any]], Any]) -> None:
        try:
            pickle.dumps(function)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"reward_fn must be picklable with isolation='process', got {function!r} "
                f"({error}): define it at the top of a module, or leave it to isolation='thread'"
            ) from None
        self._function = function
        self._context = multiprocessing.get_context("spawn")
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []

    def call(self, completion: str, row: Mapping[str, Any], timeout_s: float) -> Score:
        """What the completion earns, after at most ``timeout_s`` and, once, a process's start.

        Raises:
            RewardTimeoutError: it took longer; its process is killed.
            RewardDiedError: its process ended.
            Exception: what it raised.
        """
        message = pickle.dumps((completion, row))
        worker = self._worker()
        with contextlib.suppress(BrokenPipeError):  # it died idle, and receive() says how
            worker.connection.send_bytes(message)
        error, score = worker.receive(timeout_s)
        with self._lock:
            self._idle.append(worker)
        if error is not None:
            raise error
        return score

    def close(self) -> None:
        """End all processes that serve no call."""
        with self._lock:
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.kill()

    def _worker(self) -> _Worker:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        ours, its = self._context.Pipe()
        process = self._context.Process(
            target=_serve, args=(its, self._function), name="reward", daemon=True
        )
        process.start()
        its.close()
        worker = _Worker(process, ours)
        worker.receive(START_TIMEOUT_S)
        return worker


def _serve(connection: Connection, function: Callable[[str, Mapping[str, Any]], Any]) -> None:
    """Answer calls until the other end is closed: (error or None, score)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run, which ends this
    connection.send(_READY)
    while True:
        try:
            completion, row = connection.recv()
        except EOFError:
            return
        connection.send(call_function(function, completion, row))


def call_function(
    function: Callable[[str, Mapping[str, Any]], Any], completion: str, row: Mapping[str, Any]
) -> tuple[Exception | None, Score | None]:
    """(error or None, score): what a call gives that another process waits for."""
    try:
        value = function(completion, row)
        if inspect.isawaitable(value):
            value = asyncio.run(_await_result(value))
        return None, as_score(value)
    except Exception as error:  # noqa: BLE001 - raised again where the call was made
        return make_portable(error), None


async def _await_result(value: Any) -> Any:
    return await value


def make_portable(error: Exception) -> Exception:
    """The error with its traceback as text, in a form that arrives."""
    error.add_note(f"in reward_fn's process:\n{''.join(traceback.format_exception(error))}")
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - its own
    except Exception:  # noqa: BLE001 - errors of any class may do anything here
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
