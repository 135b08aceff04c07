"""What an environment is: ``reset`` gives a task, ``step`` answers the policy and rewards it."""

from __future__ import annotations

import math
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from training.rollouts.failures import DroppedRolloutError

Message = Mapping[str, Any]
Observation = str | Sequence[Message]
"""What the policy is told: a text of the user, or messages ``{"role": ..., "content": ...}``."""

HELD_OUT = 2**30
"""Held-out tasks have seeds from here on, training tasks those from 0 on."""
LONGEST = 1_000_000
"""Characters that an observation may have."""


@dataclass(frozen=True)
class Step:
    """What comes of an answer."""

    observation: Observation = ""
    """What the policy is told next; nobody sees that of the last step."""
    reward: float = 0.0
    """What the answer earned. An episode earns the sum of its steps."""
    done: bool = False
    """Whether the episode is over. After ``max_turns`` answers it is in any case."""
    parsed: bool | None = None
    """Whether the answer had the form that is looked for; None where that is not known."""
    parts: Mapping[str, float] | None = None
    """What the reward is made of, by name, for who reads the samples."""


class Environment(ABC):
    """One episode of a task; its attributes are the episode's state.

    Each rollout makes an object of its own with ``config.environment_args``, calls ``reset`` with
    the row's seed, and ``step`` with each answer of the policy. Both may be async. Plain ones run
    on threads, several episodes side by side.

    What fails, takes longer than ``timeout_s`` or gives no finite reward drops the rollout.
    """

    max_turns: int = 1
    """Answers that the policy gives at most, those that call tools included."""
    timeout_s: float = 60.0
    """Seconds that one call of the environment or of a tool may take."""
    tools: Sequence[Callable[..., Any]] = ()
    """Functions that the policy may call: plain or async, with type hints and a docstring whose
    ``Args:`` explain each. What one returns is told as text, and a ``ValueError`` too. An answer
    that calls tools goes to them; one that calls none goes to ``step``."""
    ground_truth: str | None = None
    """The task's right answer, where ``reset`` knows it; ``igpo_loop`` needs it."""

    @abstractmethod
    def reset(self, seed: int) -> Observation | Awaitable[Observation]:
        """The task with this number: the same for the same number."""

    @abstractmethod
    def step(self, answer: str) -> Step | Awaitable[Step]:
        """What comes of an answer."""

    def close(self) -> Awaitable[None] | None:
        """Called once at the end of the episode, whatever ended it."""
        return None


def read_observation(observation: Any, where: str) -> list[dict[str, Any]]:
    """An observation as messages.

    Raises:
        DroppedRolloutError: it is none, is empty, or is too long.
    """
    if isinstance(observation, str):
        messages: Any = [{"role": "user", "content": observation}] if observation else []
    else:
        messages = observation
    are_messages = isinstance(messages, Sequence) and all(
        isinstance(message, Mapping)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str)
        for message in messages
    )
    if not are_messages or not messages:
        raise DroppedRolloutError(
            f"{where} must give a text or messages {{role, content}}, got "
            f"{reprlib.repr(observation)}"
        )
    length = sum(len(message["content"]) for message in messages)
    if length > LONGEST:
        raise DroppedRolloutError(
            f"{where} must give at most {LONGEST:,} characters, got {length:,}"
        )
    for message in messages:
        try:
            message["content"].encode()
        except UnicodeEncodeError as error:
            raise DroppedRolloutError(f"{where} must give text of Unicode: {error}") from None
    return [dict(message) for message in messages]


def check_step(step: Any) -> Step:
    """The step itself if its reward and its parts are finite numbers.

    Raises:
        DroppedRolloutError: it is no step.
    """
    if not isinstance(step, Step):
        raise DroppedRolloutError(f"step must return a Step, got {reprlib.repr(step)}")
    numbers = {"reward": step.reward, **(step.parts or {})}
    for name, value in numbers.items():
        is_number = isinstance(value, int | float) or hasattr(value, "__float__")
        if isinstance(value, str) or not is_number or not math.isfinite(float(value)):
            raise DroppedRolloutError(
                f"step must return a finite reward, got {name}={reprlib.repr(value)}"
            )
    return step
