"""Functions that settings name, as ``MODULE:FUNCTION``."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from hearth.errors import ConfigError


def see_current_folder() -> None:
    """Let modules of the current folder be imported."""
    if os.getcwd() not in sys.path:  # noqa: PTH109 - sys.path has texts
        sys.path.insert(0, os.getcwd())  # noqa: PTH109


def find_named(setting: str, reference: str) -> Any:
    """The callable that ``MODULE:FUNCTION`` names; modules of the current folder are found too.

    Raises:
        ConfigError: there is none.
    """
    module, _, attribute = reference.partition(":")
    if not module or not attribute:
        raise ConfigError(f"{setting} must be MODULE:FUNCTION, got {reference!r}")
    see_current_folder()
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{setting} must name a function, got {reference!r}: {error}") from None
    if not callable(found):
        kind = type(found).__name__
        raise ConfigError(f"{setting} must name a function, got {reference!r}, a {kind}")
    return found
