"""Environments by their names: ``LIBRARY:TASK`` of the field's libraries, or ``MODULE:CLASS``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

from hearth.errors import ConfigError
from training.config.named import find_named
from training.environments.protocol import Environment
from training.environments.tasks import EnvironmentTasks, EpisodeTasks

LIBRARIES: Mapping[str, str] = {
    "reasoning_gym": "reasoning-gym",
    "gymnasium": "gymnasium",
    "verifiers": "verifiers",
    "openenv": "openenv",
}
"""Module of each adapter in this folder, and the extra that it needs."""


def find_environment(
    environment: str | Callable[..., Environment], args: Mapping[str, Any] | None = None
) -> EnvironmentTasks:
    """The tasks of an environment, given by its name, as a class, or as a function that makes one.

    ``args`` are the arguments of the class, or what the library's task is told.

    Raises:
        ConfigError: there is none of that name, its library is not installed, or it does not take
            the arguments.
    """
    arguments = dict(args or {})
    if not isinstance(environment, str):
        module = getattr(environment, "__module__", "")
        name = getattr(environment, "__qualname__", type(environment).__name__)
        return _make_tasks(f"{module}:{name}", environment, arguments)
    library, _, task = environment.partition(":")
    if library in LIBRARIES and task:
        adapter = _import_adapter(environment, library)
        return adapter.find_tasks(environment, task, arguments)
    if not task:
        raise ConfigError(
            f"environment must be LIBRARY:TASK or MODULE:CLASS, got {environment!r}: libraries are "
            f"{', '.join(LIBRARIES)}"
        )
    return _make_tasks(environment, find_named("environment", environment), arguments)


def _make_tasks(name: str, found: Callable[..., Environment], args: dict[str, Any]) -> EpisodeTasks:
    try:
        return EpisodeTasks(name, partial(found, **args))
    except ConfigError:
        raise
    except Exception as error:  # whatever a class of the user raises
        raise ConfigError(
            f"environment must be made with environment_args={args!r}, got {name!r}, which raised "
            f"{type(error).__name__}: {error}"
        ) from error


def _import_adapter(environment: str, library: str) -> Any:
    try:
        return import_module(f"training.environments.{library}")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"environment must be of a library that is installed, got {environment!r} without "
            f"{error.name}: pip install 'hearth-rl[{LIBRARIES[library]}]'"
        ) from None
