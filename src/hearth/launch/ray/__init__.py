"""The ``ray`` placement: workers as actors of a Ray cluster, on as many machines as it has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hearth.errors import ConfigError
from hearth.launch.spec import Launcher


def make_ray_launcher(data_dir: Path, **options: Any) -> Launcher:
    """A ``RayLauncher`` with its options.

    Raises:
        ConfigError: Ray is not installed, there is no such cluster, or an option breaks its rule.
    """
    try:
        from hearth.launch.ray.launcher import RayLauncher
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ConfigError(
            "placement must be 'inline' or 'process' where Ray is not installed, got 'ray': "
            "pip install 'hearth-rl[ray]'"
        ) from None
    return RayLauncher(data_dir, **options)
