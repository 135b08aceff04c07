"""``hearth conformance``: how far a server keeps Tinker's API."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import httpx
import orjson
import tyro
from rich.console import Console
from rich.table import Table

from hearth.errors import ConfigError
from hearth.exit_codes import exit_code

if TYPE_CHECKING:
    from hearth.conformance.suite import Report, Verdict

Group = Literal["surface", "identities", "numbers", "load"]
_COLORS: Mapping[Verdict, str] = {
    "passed": "green",
    "refused": "yellow",
    "failed": "red",
    "skipped": "dim",
}


@dataclass(frozen=True, kw_only=True)
class ConformanceFlags:
    """Say how far a server keeps Tinker's API, with a score."""

    url: Annotated[str, tyro.conf.Positional]
    """Where the server answers."""
    base_model: str
    """A small model that it has; runs of rank 4 are trained on it."""
    api_key: str | None = None
    """Default: TINKER_API_KEY, else ``tml-any``."""
    other_key: str | None = None
    """A key of somebody else, who must see nothing of the first."""
    reference: Path | None = None
    """A folder with the weights of the base model: numbers are compared with float64."""
    outstanding: int = 200
    """Samples in flight at one time, beside runs that train."""
    only: tuple[Group, ...] = ()
    """Groups of checks; all where none is given."""
    json: Path | None = None
    """Write every outcome into this file."""


def conformance(arguments: list[str]) -> int:
    """Say how far a server keeps Tinker's API, with a score."""
    flags = tyro.cli(ConformanceFlags, args=arguments, prog="hearth conformance")
    failed: list[int] = []

    def run() -> None:
        if flags.json is not None and not flags.json.expanduser().parent.is_dir():
            raise ConfigError(f"json must be a file in a folder that exists, got {flags.json}")
        try:
            httpx.get(flags.url, timeout=10)
        except (httpx.TransportError, httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
            raise ConfigError(
                f"url must be where a server answers, got {flags.url!r}: {error}"
            ) from None
        report = _run(flags)
        _show(report)
        if flags.json is not None:
            text = orjson.dumps(report.as_dict(), option=orjson.OPT_INDENT_2)
            flags.json.expanduser().write_bytes(text)
        failed.append(report.count("failed"))

    return exit_code(run) or int(failed[0] > 0)


def _run(flags: ConformanceFlags) -> Report:
    # They take seconds to import, and --help must be fast.
    import tinker

    from hearth.conformance import identities, load, numbers, surface
    from hearth.conformance.suite import Report, Server, run_checks

    server = Server(
        url=flags.url.rstrip("/"),
        key=flags.api_key or os.environ.get("TINKER_API_KEY") or "tml-any",
        base_model=flags.base_model,
        other_key=flags.other_key,
        reference=flags.reference,
        outstanding=flags.outstanding,
    )
    checks = [*surface.list_checks(), *identities.CHECKS, *numbers.CHECKS, *load.CHECKS]
    wanted = [check for check in checks if not flags.only or check.group in flags.only]
    console = Console(stderr=True, highlight=False, markup=False)
    outcomes = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, outcome in enumerate(run_checks(server, wanted), start=1):
            outcomes.append(outcome)
            if console.is_terminal:
                console.print(f"{number}/{len(wanted)} {outcome.name}: {outcome.verdict}")
        server.close()
    return Report(flags.url, f"tinker {tinker.__version__}", outcomes)


def _show(report: Report) -> None:
    console = Console(soft_wrap=True, highlight=False)
    table = Table("group", *_COLORS, box=None, pad_edge=False)
    for group in dict.fromkeys(each.group for each in report.outcomes):
        table.add_row(group, *(str(report.count(verdict, group)) for verdict in _COLORS))
    for column in table.columns[1:]:
        column.justify = "right"
    console.print(table)
    for outcome in report.outcomes:
        if outcome.verdict != "passed":
            console.print(f"\n[{_COLORS[outcome.verdict]}]{outcome.verdict}[/] {outcome.name}")
            console.print(f"  {outcome.detail}", markup=False)
    passed = report.count("passed")
    ran = len(report.outcomes) - report.count("skipped")
    console.print(
        f"\n{report.url} with {report.client}: {report.score:.1f} % ({passed} of {ran} checks)",
        markup=False,
    )
