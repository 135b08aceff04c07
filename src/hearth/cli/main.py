"""The ``hearth`` command: finds verbs by the ``hearth.verbs`` entry points, which packages may add.

A verb is a function ``(arguments: list[str]) -> int``; the first line of its docstring is its help.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points

from rich.console import Console
from rich.table import Table

import hearth

Verb = Callable[[list[str]], int]
GROUP = "hearth.verbs"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; returns its exit code, 2 when there is no such verb."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    verbs = {point.name: point for point in entry_points(group=GROUP)}
    if not given or given[0] in ("-h", "--help"):
        _show_help(verbs)
        return 0
    if given[0] == "--version":
        Console().print(hearth.__version__, highlight=False)
        return 0
    if given[0] not in verbs:
        message = f"error: verb must be one of {sorted(verbs)}, got {given[0]!r}"
        Console(stderr=True).print(message, style="red", highlight=False, markup=False)
        return 2
    _set_openmp_waiting()
    verb: Verb = verbs[given[0]].load()
    return verb(given[1:])


def _set_openmp_waiting() -> None:
    """Let idle OpenMP threads sleep; the library reads this when torch is first imported.

    Trainer and sampler take turns on the same cores. Threads that spin while they wait made a
    forward and backward pass 2 to 10 times slower on two busy cores.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")


def _show_help(verbs: dict[str, EntryPoint]) -> None:
    table = Table(
        "verb", "what it does", box=None, title="hearth VERB --help", title_justify="left"
    )
    for name, point in sorted(verbs.items()):
        table.add_row(name, (point.load().__doc__ or "").strip().splitlines()[0])
    Console().print(table)
