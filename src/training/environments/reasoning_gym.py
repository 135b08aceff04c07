"""Tasks of reasoning-gym (``pip install 'hearth-rl[reasoning-gym]'``): procedural, without a net.

``reasoning_gym:TASK``; ``environment_args`` are the fields of the task's config, and
``system_prompt``.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache, partial
from typing import Any

import reasoning_gym
from reasoning_gym.factory import DATASETS
from reasoning_gym.utils import SYSTEM_PROMPTS, extract_answer

from hearth.errors import ConfigError
from training.environments.protocol import Environment, Step
from training.environments.tasks import EpisodeTasks

KEPT_ENTRIES = 4096
"""Tasks that are kept after they were made; some take long."""


def find_tasks(name: str, task: str, args: Mapping[str, Any]) -> EpisodeTasks:
    """The task of that name.

    Raises:
        ConfigError: there is none, or it has no such settings.
    """
    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, 1)
        hint = f"did you mean {near[0]}?" if near else f"they are {', '.join(sorted(DATASETS))}"
        raise ConfigError(f"environment must name a task of reasoning_gym, got {task!r}: {hint}")
    options = dict(args)
    system_prompt = options.pop("system_prompt", SYSTEM_PROMPTS["default"])
    if not isinstance(system_prompt, str):
        raise ConfigError(f"system_prompt must be a text, got {system_prompt!r}: '' is none")
    known = {field.name for field in fields(DATASETS[task][1])} - {"size"}
    unknown = sorted(options.keys() - known)
    if unknown:
        raise ConfigError(
            f"environment_args of {name} must be {', '.join(sorted(known))} or system_prompt, got "
            f"{', '.join(unknown)}"
        )
    settings = json.dumps({"seed": 0, **options}, sort_keys=True)
    try:
        _open(task, settings)
    except Exception as error:  # of the library's own kinds, assertions mostly
        raise ConfigError(
            f"environment_args must be what {name} takes, got {options!r}: "
            f"{type(error).__name__}: {error}"
        ) from error
    return EpisodeTasks(name, partial(ReasoningGym, task, settings, system_prompt))


class ReasoningGym(Environment):
    """One question, and an answer in ``<answer>`` tags, which the task's own scorer judges."""

    def __init__(self, task: str, settings: str, system_prompt: str) -> None:
        self.task = task
        self.settings = settings
        self.system_prompt = system_prompt
        self.entry: dict[str, Any] = {}

    def reset(self, seed: int) -> list[dict[str, str]]:
        """The question."""
        self.entry = _make_entry(self.task, self.settings, seed)
        self.ground_truth = self.entry["answer"]
        question = [{"role": "user", "content": self.entry["question"]}]
        if self.system_prompt:
            return [{"role": "system", "content": self.system_prompt}, *question]
        return question

    def step(self, answer: str) -> Step:
        """The score of the last marked answer, 0 to 1."""
        marked = extract_answer(answer)
        score = _open(self.task, self.settings).score_answer(marked, self.entry)
        return Step(reward=float(score), done=True, parsed=marked is not None)


@lru_cache(maxsize=64)
def _open(task: str, settings: str) -> Any:
    return reasoning_gym.create_dataset(task, **json.loads(settings))


@lru_cache(maxsize=KEPT_ENTRIES)
def _make_entry(task: str, settings: str, seed: int) -> dict[str, Any]:
    return _open(task, settings)[seed]
