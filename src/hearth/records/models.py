"""Which model a name stands for, and what a deployment of it is called."""

from __future__ import annotations

import re
from pathlib import Path

from hearth.errors import ConfigError


def find_model(name: str) -> str:
    """The model that a name stands for: a run's newest one, a folder's whole path, else the name.

    Raises:
        ConfigError: it is a folder with neither a model nor a run that has made one.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir():
        return name
    if (folder / "config.json").is_file() and any(folder.glob("*.safetensors*")):
        return str(folder.resolve())
    models = [file.parent for file in folder.glob("models/*/config.json")]
    if not models:
        raise ConfigError(
            f"model must be a model's folder or a run that has one, got {name!r} without "
            "models/NAME: runs write theirs at their end"
        )
    return str(max(models, key=lambda model: model.stat().st_mtime).resolve())


def find_model_folder(name: str) -> Path:
    """The folder of a model or of an adapter, or a run's newest one.

    Raises:
        ConfigError: there is none.
    """
    folder = Path(name).expanduser()
    if _has_weights(folder):
        return folder.resolve()
    models = [model for model in folder.glob("models/*") if _has_weights(model)]
    if not models:
        raise ConfigError(
            f"model must be a folder with a model or an adapter, or a run that has made one, got "
            f"{name!r}: runs write theirs at their end"
        )
    return max(models, key=lambda model: model.stat().st_mtime).resolve()


def _has_weights(folder: Path) -> bool:
    names = ("config.json", "adapter_config.json")
    is_described = any((folder / name).is_file() for name in names)
    return is_described and any(folder.glob("*.safetensors*"))


def name_deployment(model: str) -> str:
    """An id for the deployment of a model: the last part of its name, in the letters of ids.

    A run's ``models/final`` is named after the run: all runs have one.
    """
    leaf = model.rstrip("/").removesuffix("/models/final").rsplit("/", 1)[-1].lower()
    return re.sub(r"[^a-z0-9]+", "-", leaf).strip("-")[:63].strip("-") or "model"
