"""Managers of the official SDK, taken as they are: its scripts hand theirs to our functions.

Only where the platform is and the key are taken of one; requests then go out through ours.
"""

from __future__ import annotations

from typing import Protocol, cast

from hearth.sdk import DeploymentManager, TrainerJobManager

_PACKAGE = "fireworks."


class OfficialManager(Protocol):
    """What is read of the official SDK's managers."""

    api_key: str
    base_url: str


class OfficialDeployments(OfficialManager, Protocol):
    """The one of deployments also says where they answer."""

    inference_url: str


def own_trainers(manager: TrainerJobManager | OfficialManager) -> TrainerJobManager:
    """The manager itself, or ours for the platform of an official one."""
    if not _is_official(manager):
        return cast("TrainerJobManager", manager)
    official = cast("OfficialManager", manager)
    return TrainerJobManager(official.api_key, base_url=official.base_url)


def own_deployments(manager: DeploymentManager | OfficialDeployments) -> DeploymentManager:
    """The manager itself, or ours for the platform of an official one."""
    if not _is_official(manager):
        return cast("DeploymentManager", manager)
    official = cast("OfficialDeployments", manager)
    return DeploymentManager(
        official.api_key, base_url=official.base_url, inference_url=official.inference_url
    )


def _is_official(manager: object) -> bool:
    return type(manager).__module__.startswith(_PACKAGE)
