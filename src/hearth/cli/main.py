"""The ``hearth`` command: looks the verb up, imports what it needs, and runs it.

A verb is a function ``(arguments: list[str]) -> int``. Other packages add verbs by entry points of
the group ``hearth.verbs``. Nothing is imported for the list of verbs and the version.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points

from rich.console import Console
from rich.table import Table

import hearth
from hearth.cli.verbs import VERBS
from hearth.collector import collect_rarely
from hearth.exit_codes import ExitCode, print_error

Verb = Callable[[list[str]], int]
GROUP = "hearth.verbs"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; returns its exit code (``hearth.exit_codes``)."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        _show_help()
        return ExitCode.DONE
    if given[0] in ("-V", "--version"):
        Console().print(hearth.__version__, highlight=False)
        return ExitCode.DONE
    verb = _find_entry_point(given[0])
    if verb is None:
        known = sorted({*VERBS, *entry_points(group=GROUP).names})
        print_error(f"verb must be one of {known}, got {given[0]!r}")
        return ExitCode.REFUSED
    if not _is_ours_alone():
        return ExitCode.REFUSED
    _set_openmp_waiting()
    try:
        with collect_rarely():
            run: Verb = verb.load()
            return run(given[1:])
    except BrokenPipeError:
        if not _is_output_unread():
            raise
        return ExitCode.DONE


def _is_output_unread() -> bool:
    """Whether nobody reads our output any more, as after ``| head``; its rest is dropped then."""
    output = sys.stdout.fileno()
    poll = select.poll()
    poll.register(output, 0)
    is_unread = any(events & select.POLLERR for _, events in poll.poll(0))
    if is_unread:
        os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    return is_unread


def _find_entry_point(name: str) -> EntryPoint | None:
    if name in VERBS:
        return EntryPoint(name, VERBS[name].target, GROUP)
    return next(iter(entry_points(group=GROUP, name=name)), None)


def _is_ours_alone() -> bool:
    """Whether ``training`` is ours; says which packages are in the way, if any."""
    from hearth.cli.strangers import find_shadow, find_strangers

    for stranger in find_strangers(sys.path):
        print_error(stranger, label="warning")
    shadow = find_shadow()
    if shadow:
        print_error(shadow)
    return not shadow


def _set_openmp_waiting() -> None:
    """Let idle OpenMP threads sleep; the library reads this when torch is first imported.

    Trainer and sampler take turns on the same cores. Threads that spin while they wait made a
    forward and backward pass 2 to 10 times slower on two busy cores.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")


def _show_help() -> None:
    table = Table(
        "verb", "what it does", box=None, title="hearth VERB --help", title_justify="left"
    )
    for name, verb in VERBS.items():
        table.add_row(name, verb.summary)
    others = {point.name: point.module for point in entry_points(group=GROUP)}
    for name in sorted(others.keys() - VERBS.keys()):
        table.add_row(name, f"(of {others[name]})")
    Console().print(table)
