"""Tasks of reasoning-gym (``pip install 'hearth-rl[reasoning-gym]'``): procedural, without a net.

``reasoning_gym:TASK``; ``environment_args`` are the fields of the task's config, and
``system_prompt``.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache, partial
from typing import Any

import reasoning_gym
from reasoning_gym.composite import DatasetSpec
from reasoning_gym.factory import DATASETS
from reasoning_gym.utils import SYSTEM_PROMPTS, extract_answer

from hearth.errors import ConfigError
from training.environments.protocol import Environment, Step
from training.environments.tasks import EpisodeTasks

KEPT = 4096
"""Tasks that are kept after they were made; some take long."""
BLOCK = 500
"""Tasks of one of the library's datasets: some make no more than their size, which is this."""
HASHED = frozenset(
    {"isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder"}
)
"""Their tasks follow the order of sets of texts, which is another in each process of Python."""
UNREPEATABLE = frozenset({"codeio", "list_functions"})
"""Their tasks are others each time, whatever the seed."""


def find_tasks(name: str, task: str, args: Mapping[str, Any]) -> EpisodeTasks:
    """The task of that name.

    Raises:
        ConfigError: there is none, or it has no such settings.
    """
    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, 1)
        hint = f"did you mean {near[0]}?" if near else f"they are {', '.join(sorted(DATASETS))}"
        raise ConfigError(f"environment must name a task of reasoning_gym, got {task!r}: {hint}")
    if task in UNREPEATABLE:
        raise ConfigError(
            f"environment must have the same task for the same seed, got {name!r}, which has "
            "others in each process: a run could not go on"
        )
    if task in HASHED and os.environ.get("PYTHONHASHSEED", "random") == "random":
        raise ConfigError(
            f"PYTHONHASHSEED must be set for {name}, got none: its tasks follow Python's hashes, "
            "and a run could not go on; set it to 0"
        )
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
    settings = json.dumps(options, sort_keys=True)
    try:
        _open(task, settings, 0)
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
        self.seed = 0
        self.entry: dict[str, Any] = {}

    def reset(self, seed: int) -> list[dict[str, str]]:
        """The question."""
        self.seed = seed
        self.entry = _make_entry(self.task, self.settings, seed)
        self.ground_truth = self.entry["answer"]
        question = [{"role": "user", "content": self.entry["question"]}]
        if self.system_prompt:
            return [{"role": "system", "content": self.system_prompt}, *question]
        return question

    def step(self, answer: str) -> Step:
        """The score of the last marked answer, 0 to 1."""
        marked = extract_answer(answer)
        scorer = _open(self.task, self.settings, self.seed // BLOCK)
        score = scorer.score_answer(marked, self.entry)
        return Step(reward=float(score), done=True, parsed=marked is not None)


@lru_cache(maxsize=64)
def _open(task: str, settings: str, block: int) -> Any:
    options = json.loads(settings)
    if task == "composite":
        options["datasets"] = [DatasetSpec(**spec) for spec in options["datasets"]]
    # Most tasks have the seed of their dataset and their place added: no two blocks share one.
    seed = options.pop("seed", 0) + block * BLOCK
    return reasoning_gym.create_dataset(task, seed=seed, size=BLOCK, **options)


@lru_cache(maxsize=KEPT)
def _make_entry(task: str, settings: str, seed: int) -> dict[str, Any]:
    block, place = divmod(seed, BLOCK)
    return _open(task, settings, block)[place]
