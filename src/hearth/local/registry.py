"""Which weights a model name stands for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hearth.errors import ConfigError

DOCUMENTED_MODELS: Mapping[str, str] = {
    "accounts/fireworks/models/qwen3-0p6b": "Qwen/Qwen3-0.6B",
    "accounts/fireworks/models/qwen3-1p7b": "Qwen/Qwen3-1.7B",
    "accounts/fireworks/models/qwen3-4b": "Qwen/Qwen3-4B",
    "accounts/fireworks/models/qwen3-8b": "Qwen/Qwen3-8B",
    "accounts/fireworks/models/qwen3-14b": "Qwen/Qwen3-14B",
    "accounts/fireworks/models/qwen3-32b": "Qwen/Qwen3-32B",
}
"""Registered names and the hub ids behind them."""


def resolve_model(name: str, registered: Mapping[str, str] = DOCUMENTED_MODELS) -> str:
    """The folder or hub id to load for a model name.

    A registered name gives what it stands for; anything else is a folder or hub id already.

    Raises:
        ConfigError: the name looks registered (``accounts/...``) and is not, or looks like a path
            and is no folder.
    """
    if name in registered:
        return registered[name]
    if name.startswith("accounts/"):
        raise ConfigError(
            f"base_model must be a registered name, a folder or a hub id, got {name!r}: "
            f"registered are {sorted(registered)}"
        )
    looks_like_a_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    if looks_like_a_path and not Path(name).expanduser().is_dir():
        raise ConfigError(f"base_model must be an existing folder, got {name!r}")
    return name
