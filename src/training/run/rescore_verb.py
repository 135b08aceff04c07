"""``hearth rescore``: its flags, which are read without the libraries that scoring needs."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated

import tyro


@dataclass(kw_only=True)
class RescoreOptions:
    """Score a run's recorded samples with another reward function, and compare."""

    run: Annotated[str, tyro.conf.Positional]
    """Folder of the run."""
    reward: str
    """The function, as MODULE:FUNCTION; modules of the current folder are found too."""
    name: str | None = None
    """What the result is called, in rescored/NAME.parquet; None takes the function's name."""
    workers: int = 1
    """Processes that a plain function runs in, or calls of an async one that run at once."""
    replace: bool = False
    """Overwrite the result of this name."""


def rescore(arguments: list[str] | None = None) -> int:
    """Score a run's recorded samples with another reward function, and compare."""
    given = sys.argv[1:] if arguments is None else arguments
    options = tyro.cli(RescoreOptions, args=given, prog="hearth rescore")
    from rich.console import Console

    from training.run.command import run_to_exit_code
    from training.run.rescore import rescore_and_report

    return run_to_exit_code(lambda: rescore_and_report(options, Console()))
