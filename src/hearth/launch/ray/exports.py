"""The export of a snapshot, in a process of its own on the control plane's node."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hearth.launch.child import describe_failure, load_entry
from hearth.launch.ray.snapshot_actor import buckets_through


def run_export(
    entry: str,
    arguments: Mapping[str, Any],
    snapshot_actor: Any,
    environment: Mapping[str, str],
    working_dir: str,
) -> dict[str, Any] | None:
    """Write the model folder; returns what failed, if something did."""
    os.environ.update(environment)
    os.chdir(working_dir)
    with tempfile.TemporaryDirectory(prefix="hearth-export-") as mirror:
        arguments = dict(arguments)
        if snapshot_actor is not None:
            arguments["buckets"] = buckets_through(snapshot_actor, Path(mirror), None)
        try:
            load_entry(entry)(**arguments, on_phase=lambda phase: None)
        except Exception as error:  # noqa: BLE001 - raised again where the export was called
            return describe_failure(error)
    return None
