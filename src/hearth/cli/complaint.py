"""Exit codes of verbs, and errors as one line."""

from __future__ import annotations

import sys
from collections.abc import Callable

from rich.console import Console

from hearth.errors import HearthError


def exit_code(run: Callable[[], None]) -> int:
    """0 after ``run()``; 2 for a user's mistake, 1 for ours, 130 for Ctrl-C, each with one line."""
    try:
        run()
    except HearthError as error:
        _complain(error)
        return 2 if error.category == "user" else 1
    except KeyboardInterrupt:
        return 130
    return 0


def _complain(error: object) -> None:
    console = Console(file=sys.stderr)
    console.print(f"error: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
