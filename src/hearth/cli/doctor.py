"""``hearth doctor``: what this machine has for Hearth, what is wrong, and what to do about it."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson
import tyro
from rich.console import Console

from hearth.cli.doctor_checks import CHECKS, Finding, Place, check_training
from hearth.exit_codes import ExitCode

_COLORS = {"ok": "green", "warning": "yellow", "error": "red"}
_TOPIC_WIDTH = 12


@dataclass(frozen=True, kw_only=True)
class DoctorFlags:
    """Check this machine: versions, compiler, GPU, memory, ports; train a little."""

    data_dir: Path = Path("~/.hearth")
    """Where hearth serve keeps its data."""
    port: int = 8000
    """Where hearth serve would listen."""
    database_url: str = ""
    """SQLAlchemy URL that hearth serve would get; not given, SQLite in data_dir."""
    self_test: bool = True
    """Train two steps of the shipped model, and compare sampler and trainer."""
    json: bool = False
    """One JSON object instead of lines."""


def doctor(arguments: list[str]) -> int:
    """Check this machine: versions, compiler, GPU, memory, ports; train a little."""
    flags = tyro.cli(DoctorFlags, args=arguments, prog="hearth doctor")
    place = Place(flags.data_dir.expanduser(), flags.port, flags.database_url)
    findings: list[Finding] = []
    checks = [*CHECKS, check_training] if flags.self_test else CHECKS
    for check in checks:
        try:
            finding = check(place)
        except ImportError as error:
            topic = check.__name__.removeprefix("check_")
            finding = Finding(topic, "error", f"{error}", "install that package again")
        findings.append(finding)
        if not flags.json:
            _show(finding)
    levels = [finding.level for finding in findings]
    worst = next((level for level in ("error", "warning") if level in levels), "ok")
    if flags.json:
        content = {"level": worst, "findings": [asdict(finding) for finding in findings]}
        Console(soft_wrap=True).print_json(orjson.dumps(content).decode())
    else:
        counts = f"errors: {levels.count('error')}, warnings: {levels.count('warning')}"
        Console(highlight=False).print(f"\n{counts}", style=_COLORS[worst])
    return ExitCode.FAILED if worst == "error" else ExitCode.DONE


def _show(finding: Finding) -> None:
    console = Console(highlight=False, markup=False, soft_wrap=True)
    text = finding.text + (f": {finding.advice}" if finding.advice else "")
    room = max(30, console.width - len("warning  ") - _TOPIC_WIDTH)
    first, *others = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False)
    console.print(f"{finding.level:<9}", style=_COLORS[finding.level], end="")
    console.print(f"{finding.topic:<{_TOPIC_WIDTH}}{first}")
    for line in others:
        console.print(" " * (len("warning  ") + _TOPIC_WIDTH) + line)
