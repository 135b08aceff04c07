"""Processes that belong to one worker: the other ranks of a trainer, the servers of a deployment.

A worker says what is to run and what it needs; where it runs is its launcher's business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

GRACE_S = 5.0
"""How long a process may take to end before it is killed."""


@dataclass(frozen=True, kw_only=True)
class ExitReport:
    """What is known of a worker that ended."""

    code: int | None = None
    """Exit status; None where a signal ended it or nobody could see it end."""
    signal: str | None = None
    """Such as ``SIGKILL``."""
    peak_rss_mb: float | None = None
    phase: str | None = None
    """What it was doing last, such as ``forward_backward``."""
    last_lines: Sequence[str] = field(default_factory=tuple)
    """The end of its log."""
    reason: str | None = None
    """Said by who watched: it never started, or was gone when it was looked for."""

    def describe(self) -> str:
        """One paragraph for a person."""
        how = self.reason or (
            f"ended by {self.signal}" if self.signal else f"exited with code {self.code}"
        )
        parts = [how]
        if self.phase:
            parts.append(f"last phase {self.phase}")
        if self.peak_rss_mb:
            parts.append(f"peak memory {self.peak_rss_mb:.0f} MiB")
        text = ", ".join(parts)
        if self.last_lines:
            text += "; its log ends with: " + " | ".join(self.last_lines)
        return text

    def as_dict(self) -> dict[str, Any]:
        """Plain containers."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Command:
    """What a sidecar runs, and what it needs.

    Example: ``Command(name="replica-0", argv=["python", "-m", "server", "--port", "{port}"])``
    """

    name: str
    """``rank-1``, ``replica-0``: one of its worker's own at a time. Names its log."""
    argv: Sequence[str]
    """``{host}`` and ``{port}`` stand for the address of where it runs and a port free there."""
    env: Mapping[str, str] = field(default_factory=lambda: {})
    """Added to the environment of where it runs."""
    cpus: float = 1.0
    gpus: float = 0.0


class Sidecar(Protocol):
    """A process that was started."""

    @property
    def host(self) -> str:
        """The address that its worker reaches it at."""
        ...

    @property
    def port(self) -> int:
        """The port that stands for ``{port}``."""
        ...

    def poll(self) -> ExitReport | None:
        """How it ended; None while it runs."""
        ...

    def last_lines(self) -> Sequence[str]:
        """The end of what it has printed."""
        ...

    def stop(self, grace_s: float = GRACE_S) -> None:
        """SIGTERM, and SIGKILL to all that it started when that takes longer than ``grace_s``."""
        ...


class Sidecars(Protocol):
    """Starts the processes of one worker. Safe to use from several threads."""

    def start(self, command: Command) -> Sidecar:
        """Start a process, and return when there is one.

        Raises:
            EngineError: it cannot be started here; the message says what is missing.
            ClosedError: the worker ends.
        """
        ...

    def close(self) -> None:
        """Stop all that still run."""
        ...
