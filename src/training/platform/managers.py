"""Managers of the official SDK, taken as they are: its scripts hand theirs to our functions.

We read of one only where the platform is and the key; requests then go out through our own.
"""

from __future__ import annotations

from typing import Any

from hearth.sdk import DeploymentManager, TrainerJobManager


def own_trainers(manager: Any) -> TrainerJobManager:
    """The manager itself, or ours for the platform of an official one."""
    if not _is_official(manager):
        return manager
    return TrainerJobManager(manager.api_key, base_url=manager.base_url)


def own_deployments(manager: Any) -> DeploymentManager:
    """The manager itself, or ours for the platform of an official one."""
    if not _is_official(manager):
        return manager
    return DeploymentManager(
        manager.api_key, base_url=manager.base_url, inference_url=manager.inference_url
    )


def _is_official(manager: object) -> bool:
    return type(manager).__module__.startswith("fireworks.")
