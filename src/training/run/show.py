"""``hearth show``: one run in the terminal, and why its reward is flat where it is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from hearth.exit_codes import exit_code


@dataclass(frozen=True, kw_only=True)
class ShowFlags:
    """Print a run: its reward curve, best and worst samples, why the reward is flat."""

    run: Annotated[Path, tyro.conf.Positional]
    """The log_path of a run."""


def show(arguments: list[str]) -> int:
    """Print a run: its reward curve, best and worst samples, why the reward is flat."""
    flags = tyro.cli(ShowFlags, args=arguments, prog="hearth show")

    def run() -> None:
        from hearth.viewer.database import Database
        from hearth.viewer.printed import make_console, open_runs, print_run
        from training.run.signal import find_problems  # with torch behind it

        (opened,) = open_runs([flags.run])
        print_run(opened, Database([opened.folder]), find_problems, make_console())

    return exit_code(run)
