"""Processes that belong to one worker: the other ranks of a trainer, the servers of a deployment.

A worker states what to run and what it needs; its launcher decides where it runs.
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
    """Exit status; None if a signal ended it or its end was not observed."""
    signal: str | None = None
    """Such as ``SIGKILL``."""
    peak_rss_mb: float | None = None
    phase: str | None = None
    """Its last phase, such as ``forward_backward``."""
    last_lines: Sequence[str] = field(default_factory=tuple)
    """The end of its log."""
    reason: str | None = None
    """From the launcher: the worker never started, or was gone when the launcher looked for it."""

    @property
    def was_killed(self) -> bool:
        """Whether it ended by SIGKILL from outside: it says nothing of what it was to do."""
        return self.signal == "SIGKILL" and self.reason is None

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
    """``rank-1``, ``replica-0``: unique within its worker. Names its log."""
    argv: Sequence[str]
    """``{host}`` and ``{port}`` stand for the address of its machine and a free port there."""
    env: Mapping[str, str] = field(default_factory=lambda: {})
    """Added to the environment of its machine."""
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
        """The last lines of its output."""
        ...

    def stop(self, grace_s: float = GRACE_S) -> None:
        """Send SIGTERM, and after ``grace_s`` SIGKILL to it and its child processes."""
        ...


class Sidecars(Protocol):
    """Starts the processes of one worker. Safe to use from several threads."""

    def start(self, command: Command) -> Sidecar:
        """Start a process, and return once it exists.

        Raises:
            EngineError: it cannot be started here; the message says what is missing.
            ClosedError: the worker is ending.
        """
        ...

    def close(self) -> None:
        """Stop all processes that still run."""
        ...
