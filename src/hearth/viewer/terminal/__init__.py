"""``hearth view --terminal``: runs, curves and samples over ssh, with the keyboard alone.

    runs      the table of runs; samples: a run's samples, filtered
    curves    a run's numbers
    tokens    one sample, its tokens colored
    drawing   texts that a terminal may be given, lines of dots, colors

It asks the modules that the server asks; nothing is read or computed in two ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def show_runs(roots: Sequence[Path]) -> None:
    """Show the runs of folders until the user leaves.

    Raises:
        ConfigError: a folder is none.
    """
    from hearth.viewer.library import Library
    from hearth.viewer.terminal.app import TerminalViewer

    TerminalViewer(Library(roots)).run()
