"""Exit codes of commands, and their errors as one line."""

from __future__ import annotations

import sys
from collections.abc import Callable

from rich.console import Console

from hearth.errors import HearthError


def exit_code(run: Callable[[], object], *, interrupted: str = "") -> int:
    """0 after ``run()``; 2 for a user's mistake, 1 for ours, 130 for Ctrl-C.

    Errors are one line on stderr; ``interrupted`` is the line for Ctrl-C, if any.
    """
    try:
        run()
    except HearthError as error:
        _print_error(error)
        return 2 if error.category == "user" else 1
    except KeyboardInterrupt:
        if interrupted:
            _print_error(interrupted)
        return 130
    return 0


def _print_error(error: object) -> None:
    console = Console(file=sys.stderr)
    console.print(f"error: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
