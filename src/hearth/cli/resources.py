"""``hearth ps``, ``logs``, ``stop`` and ``start``: list, read, stop and start what runs."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hearth.errors import NotFoundError, UnreachableError
from hearth.exit_codes import ExitCode, exit_code
from hearth.settings import read_api_key, read_url

if TYPE_CHECKING:  # half a second to import, which --help is spared
    from hearth.sdk.deployments import DeploymentManager
    from hearth.sdk.trainers import TrainerJobManager
    from hearth.wire.base import Record
    from hearth.wire.fireworks import Deployment, TrainerJob

RecordT = TypeVar("RecordT", bound="Record")

ACCOUNT = "me"
_DEFAULT_URL = "http://127.0.0.1:8000"
_FINISHED_STATES = ("JOB_STATE_CANCELLED", "JOB_STATE_COMPLETED")


@dataclass(frozen=True, kw_only=True)
class Platform:
    """Flags that name a platform."""

    base_url: str = ""
    """URL of the platform; default HEARTH_URL, else http://127.0.0.1:8000."""
    api_key: str = ""
    """API key; default HEARTH_API_KEY."""

    @property
    def url(self) -> str:
        """The URL to use."""
        return self.base_url or read_url() or _DEFAULT_URL

    @property
    def key(self) -> str:
        """The key to use; a platform without keys accepts any."""
        return self.api_key or read_api_key() or "none"

    def get(self, path: str, kind: type[RecordT], **params: str) -> RecordT:
        """Fetch a record of the account."""
        from hearth.sdk import background
        from hearth.sdk.transport import Http, RetryPolicy
        from hearth.wire.messages import HttpRequest

        http = Http(self.url, self.key, retries=RetryPolicy(**_FEW_RETRIES))
        request = http.request(HttpRequest("GET", f"/v1/accounts/{ACCOUNT}/{path}", params=params))
        with self.explain_absence():
            return kind.parse(background.start(request).result().content)

    @contextlib.contextmanager
    def explain_absence(self) -> Iterator[None]:
        """Say what to do where no platform answers.

        Raises:
            UnreachableError: one was raised in the body of the ``with``.
        """
        try:
            yield
        except UnreachableError as error:
            raise UnreachableError(
                f"base_url must be a platform that answers, got {self.url}: {error} Start one with "
                "`hearth serve`, or say where it is with --base-url or HEARTH_URL"
            ) from None

    def open_trainers(self) -> TrainerJobManager:
        """A client of its trainer jobs, which soon says that no platform answers."""
        from hearth.sdk.trainers import TrainerJobManager
        from hearth.sdk.transport import RetryPolicy

        return TrainerJobManager(self.key, ACCOUNT, self.url, retries=RetryPolicy(**_FEW_RETRIES))

    def open_deployments(self) -> DeploymentManager:
        """A client of its deployments, which soon says that no platform answers."""
        from hearth.sdk.deployments import DeploymentManager
        from hearth.sdk.transport import RetryPolicy

        retries = RetryPolicy(**_FEW_RETRIES)
        return DeploymentManager(self.key, self.url, account_id=ACCOUNT, retries=retries)

    def jobs(self) -> list[TrainerJob]:
        """Its trainer jobs."""
        from hearth.wire.fireworks import TrainerJobPage

        return self.get("rlorTrainerJobs", TrainerJobPage).rlor_trainer_jobs

    def deployments(self) -> list[Deployment]:
        """Its deployments."""
        from hearth.wire.fireworks import DeploymentPage

        return self.get("deployments", DeploymentPage).deployments


@dataclass(frozen=True, kw_only=True)
class PsFlags(Platform):
    """Show the trainer jobs and deployments of a platform."""

    all: Annotated[bool, tyro.conf.arg(aliases=("-a",))] = False
    """Show cancelled and completed jobs too."""


@dataclass(frozen=True, kw_only=True)
class LogsFlags(Platform):
    """Show the end of a trainer job's or deployment's log."""

    id: Annotated[str, tyro.conf.Positional]
    """A trainer job's or a deployment's id."""
    lines: Annotated[int, tyro.conf.arg(aliases=("-n",))] = 100
    """Number of last lines to show."""
    follow: Annotated[bool, tyro.conf.arg(aliases=("-f",))] = False
    """Go on with new lines, until Ctrl-C."""


@dataclass(frozen=True, kw_only=True)
class IdFlags(Platform):
    """Stop or start a trainer job or a deployment."""

    id: Annotated[str, tyro.conf.Positional]
    """A trainer job's or a deployment's id."""


_COLUMNS = ("ID", "KIND", "STATE", "MODEL", "PID", "MEMORY", "AGE", "NOTE")
_SHORTEST_NOTE = 20
_FEW_RETRIES: Mapping[str, Any] = {"attempts": 2, "base_s": 0.2}
_LOOK_EVERY_S = 1.0
_MOST_NEW_LINES = 1000


def ps(arguments: list[str]) -> int:
    """Show the trainer jobs and deployments of a platform."""
    flags = tyro.cli(PsFlags, args=arguments, prog="hearth ps")

    def run() -> None:
        lines: list[list[str]] = []
        for job in flags.jobs():
            if flags.all or job.state not in _FINISHED_STATES:
                kind = "reference" if job.forward_only else "trainer"
                state = (job.state or "").removeprefix("JOB_STATE_")
                lines.append(_columns(job, kind, state, job.training_config.base_model))
        for deployment in flags.deployments():
            state = deployment.state or ""
            if state == "READY" and deployment.max_replica_count == 0:
                state = "STOPPED"
            lines.append(_columns(deployment, "deployment", state, deployment.base_model))
        if lines:
            _show(lines)
        else:
            Console(soft_wrap=True).print(f"nothing runs at {flags.url}", highlight=False)

    return exit_code(run)


def logs(arguments: list[str]) -> int:
    """Show the end of a trainer job's or deployment's log."""
    flags = tyro.cli(LogsFlags, args=arguments, prog="hearth logs")

    def run() -> None:
        from hearth.wire.fireworks import LogLines

        path = f"workers/{_kind(flags, flags.id)}-{flags.id}/log"
        console = Console(soft_wrap=True, highlight=False, markup=False)
        read = max(flags.lines, _MOST_NEW_LINES) if flags.follow else flags.lines
        lines = flags.get(path, LogLines, lines=str(read)).lines
        for line in lines[-flags.lines :]:
            console.print(line)
        while flags.follow:
            time.sleep(_LOOK_EVERY_S)
            known, lines = lines, flags.get(path, LogLines, lines=str(read)).lines
            for line in find_new(known, lines):
                console.print(line)

    code = exit_code(run)
    return ExitCode.DONE if flags.follow and code == ExitCode.INTERRUPTED else code


def find_new(known: Sequence[str], lines: Sequence[str]) -> Sequence[str]:
    """The lines after those that begin with the end of the known ones; all where none does."""
    for count in range(min(len(known), len(lines)), 0, -1):
        if lines[:count] == known[-count:]:
            return lines[count:]
    return lines


def stop(arguments: list[str]) -> int:
    """Cancel a trainer job, or scale a deployment to zero."""
    flags = tyro.cli(IdFlags, args=arguments, prog="hearth stop")

    def run() -> None:
        if _kind(flags, flags.id) == "trainer":
            flags.open_trainers().cancel(flags.id)
            message = f"trainer job {flags.id} is cancelled; its checkpoints are kept"
        else:
            flags.open_deployments().scale_to_zero(flags.id)
            message = f"deployment {flags.id} is scaled to zero"
        Console().print(message, highlight=False, soft_wrap=True)

    return exit_code(run)


def start(arguments: list[str]) -> int:
    """Start a stopped trainer job or deployment again."""
    flags = tyro.cli(IdFlags, args=arguments, prog="hearth start")

    def run() -> None:
        if _kind(flags, flags.id) == "trainer":
            flags.open_trainers().resume(flags.id)
            message = f"trainer job {flags.id} starts, from its base weights: a client that resumes"
            message += " it loads its last checkpoint"
        else:
            flags.open_deployments().update(flags.id, min_replica_count=1)
            message = f"deployment {flags.id} starts"
        Console().print(f"{message}: hearth ps", highlight=False, soft_wrap=True)

    return exit_code(run)


def _kind(flags: Platform, id: str) -> str:
    """``trainer`` or ``deployment``, the kind of an id.

    Raises:
        NotFoundError: it is neither; the message lists both.
    """
    jobs = [(job.name or "").rsplit("/", 1)[-1] for job in flags.jobs()]
    deployments = [(deployment.name or "").rsplit("/", 1)[-1] for deployment in flags.deployments()]
    if id in jobs:
        return "trainer"
    if id in deployments:
        return "deployment"
    raise NotFoundError(f"id must be one of {jobs + deployments}, got {id!r}")


def _show(lines: list[list[str]]) -> None:
    """Print a table. Ids are never cut: the next command needs them."""
    columns = zip(_COLUMNS, *lines, strict=True)
    *widths, _ = [max(map(len, column)) for column in columns]
    taken = sum(widths) + 2 * len(widths)
    room = max(_SHORTEST_NOTE, Console().width - taken)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name, width in zip(_COLUMNS, [*widths, room], strict=True):
        table.add_column(name, no_wrap=True, overflow="ellipsis", min_width=width, max_width=width)
    for line in lines:
        table.add_row(*map(Text, line))
    Console(width=taken + room).print(table, crop=False)


def _columns(resource: TrainerJob | Deployment, kind: str, state: str, model: str) -> list[str]:
    note = (resource.status_message or "").split("; its log")[0]
    return [
        (resource.name or "").rsplit("/", 1)[-1],
        kind,
        state,
        _short(model),
        str(resource.pid or ""),
        _memory(resource.pid),
        _age(resource.create_time),
        " ".join(note.split()),
    ]


def _short(model: str) -> str:
    return model if len(model) <= 40 else "..." + model[-37:]


def _memory(pid: int | None) -> str:
    """Resident memory of a process on this machine; empty if there is none."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return ""
    return f"{pages * os.sysconf('SC_PAGE_SIZE') / 2**20:.0f} MiB"


def _age(created: str | None) -> str:
    if not created:
        return ""
    moment = datetime.strptime(created, "%Y-%m-%dT%H:%M:%S.%fZ").replace(tzinfo=UTC)
    seconds = max(0, int(time.time() - moment.timestamp()))
    minutes, hours = seconds // 60, seconds // 3600
    return f"{hours} h" if hours else f"{minutes} min" if minutes else f"{seconds} s"
