"""``hearth quickstart``: train the shipped model with ``rl_loop`` and show it before and after."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

import tyro


@dataclass(kw_only=True)
class QuickstartOptions:
    """Train the shipped model with GRPO and show it before and after."""

    log_path: str = "runs/quickstart"
    """Folder for metrics, plot, answers before and after, and the trained model."""
    seed: int = 0
    """Fixes everything but the wall times."""
    steps: int = 128
    """Rows to train on, 16 for each; at most 128. Rows that teach nothing make it fewer steps."""


def quickstart(arguments: list[str] | None = None) -> int:
    """Train the shipped model with GRPO and show it before and after."""
    started = time.perf_counter()
    given = sys.argv[1:] if arguments is None else arguments
    options = tyro.cli(QuickstartOptions, args=given, prog="hearth quickstart")
    # Importing torch takes a second; --help and a misspelled flag answer without it.
    from training.quickstart.run import train_and_report
    from training.run.command import run_to_exit_code

    return run_to_exit_code(lambda: train_and_report(options, started))
