"""The export of a snapshot, in a process of its own on the control plane's node."""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hearth.launch.child import failure_of
from hearth.launch.ray.snapshot_actor import buckets_through


def run_export(
    entry: str,
    arguments: Mapping[str, Any],
    snapshot_actor: Any,
    environment: Mapping[str, str],
    working_dir: str,
) -> dict[str, Any] | None:
    """Write the model folder; what went wrong, where something did."""
    os.environ.update(environment)
    os.chdir(working_dir)
    module, _, name = entry.partition(":")
    export: Callable[..., None] = getattr(importlib.import_module(module), name)
    with tempfile.TemporaryDirectory(prefix="hearth-export-") as mirror:
        given = dict(arguments)
        if snapshot_actor is not None:
            given["buckets"] = buckets_through(snapshot_actor, Path(mirror), None)
        try:
            export(**given, on_phase=lambda phase: None)
        except Exception as error:  # noqa: BLE001 - told to who asked for it
            return failure_of(error)
    return None
