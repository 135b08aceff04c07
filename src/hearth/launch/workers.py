"""A worker in a process of its own, as its launcher has it."""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import threading
from dataclasses import asdict
from typing import Any

from hearth.launch.records import Living, ProcessFacts, WorkerFolder
from hearth.launch.spec import Endpoint, WorkerSpec, spec_as_dict

logger = logging.getLogger(__name__)

_PING_TIMEOUT_S = 5.0


class ProcessWorker:
    """A worker in a process of its own. ``launch.processes`` makes these."""

    def __init__(self, spec: WorkerSpec, folder: WorkerFolder) -> None:
        self.spec = spec
        self.folder = folder
        self.facts: ProcessFacts | None = None
        self.living: Living | None = None
        self.has_begun = threading.Event()
        """Set when it has a process, or will have none."""
        self.has_ended = threading.Event()
        """Set when it has none any more, and nobody reads its folder."""
        self.is_stopping = False
        self.thread: threading.Thread | None = None
        """Follows it and tells its watcher."""

    @property
    def endpoint(self) -> Endpoint:
        """Its socket, as soon as it has a process."""
        return Endpoint(socket=self.facts.socket if self.facts is not None else None)

    @property
    def pid(self) -> int | None:
        """Its process; None before the fork."""
        return self.facts.process.pid if self.facts is not None else None

    def record(self) -> dict[str, Any]:
        """JSON from which ``ProcessLauncher.adopt`` finds it again, also when taken early."""
        found = {"worker_id": self.spec.worker_id, "spec": spec_as_dict(self.spec)}
        if self.facts is not None:
            process = asdict(self.facts.process)
            found |= {"socket": self.facts.socket, **process}
        return found

    def stop(self, grace_s: float = 5.0) -> None:
        """SIGTERM, and SIGKILL to it and what it started when that takes longer than ``grace_s``.

        A worker that is being forked is stopped as soon as it is there.
        """
        self.is_stopping = True
        self.has_begun.wait()
        if self.living is not None and not end(self.living, grace_s):
            logger.warning("worker %s did not end in time and was killed", self.spec.worker_id)
        # Not for a watcher that stops a worker when it hears of it, on the thread that tells it.
        if threading.current_thread() is not self.thread:
            self.has_ended.wait()


def end(living: Living, grace_s: float) -> bool:
    """End a process; False when it had to be killed."""
    living.send(signal.SIGTERM)
    if living.wait(grace_s):
        return True
    living.kill_group()
    living.wait(None)
    return False


def ping(path: str, health_path: str) -> None:
    """Ask a worker for its health, so that it knows somebody is there; the answer is not judged."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as line:
        line.settimeout(_PING_TIMEOUT_S)
        line.connect(path)
        asked = f"GET {health_path} HTTP/1.1\r\nhost: worker\r\nconnection: close\r\n\r\n"
        line.sendall(asked.encode())
        line.recv(1024)
