"""Exit codes of commands, and their errors as one line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from enum import IntEnum

from rich.console import Console

from hearth.errors import HearthError


class ExitCode(IntEnum):
    """What the exit code of every ``hearth`` command says; docs/cli.md has the table."""

    DONE = 0
    """It did what was asked."""
    FAILED = 1
    """The platform, or a check, failed."""
    REFUSED = 2
    """What was asked breaks a rule: a flag, a setting, a row, a name. Nothing was started."""
    INTERRUPTED = 130
    """Ctrl-C ended it."""
    TERMINATED = 143
    """SIGTERM ended it."""


def exit_code(run: Callable[[], object], *, interrupted: str = "") -> ExitCode:
    """The exit code after ``run()``; errors are one line on stderr.

    ``interrupted`` begins the line for Ctrl-C, if any; the interruption's notes end it.
    """
    try:
        run()
    except HearthError as error:
        print_error(error)
        return ExitCode.REFUSED if error.category == "user" else ExitCode.FAILED
    except KeyboardInterrupt as interruption:
        if interrupted:
            print_error(": ".join([interrupted, *getattr(interruption, "__notes__", ())]))
        return ExitCode.INTERRUPTED
    return ExitCode.DONE


def print_error(error: object, *, label: str = "error") -> None:
    """Print one line on stderr, in red, with an error's notes below; a ``warning`` is yellow."""
    console = Console(file=sys.stderr)
    style = "red" if label == "error" else "yellow"
    text = "\n".join([f"{label}: {error}", *getattr(error, "__notes__", ())])
    console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)
