"""A worker in a process of its own, as its launcher has it."""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import threading
from dataclasses import asdict
from typing import Any

from hearth.launch.base import BaseWorker
from hearth.launch.records import ProcessFacts, ProcessHandle, WorkerFolder
from hearth.launch.spec import Endpoint, WorkerSpec, spec_as_dict

logger = logging.getLogger(__name__)

_PING_TIMEOUT_S = 5.0


class ProcessWorker(BaseWorker):
    """A worker in a process of its own. ``launch.processes`` makes these."""

    def __init__(self, spec: WorkerSpec, folder: WorkerFolder) -> None:
        super().__init__(spec)
        self.folder = folder
        self.facts: ProcessFacts | None = None
        self.handle: ProcessHandle | None = None
        self.has_begun = threading.Event()
        """Set when it has a process, or will have none."""

    def attach(self, facts: ProcessFacts) -> None:
        """Take the process that was started for it."""
        self.facts, self.handle = facts, ProcessHandle(facts.process)
        self.has_begun.set()

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
        record = {"worker_id": self.spec.worker_id, "spec": spec_as_dict(self.spec)}
        if self.facts is not None:
            record |= {"socket": self.facts.socket, **asdict(self.facts.process)}
        return record

    def stop(self, grace_s: float = 5.0) -> None:
        """SIGTERM, and SIGKILL to it and what it started when that takes longer than ``grace_s``.

        A worker that is being forked is stopped as soon as it is there.
        """
        self.is_stopping = True
        self.has_begun.wait()
        if self.handle is not None and not end_process(self.handle, grace_s):
            logger.warning("worker %s did not end in time and was killed", self.spec.worker_id)
        self.wait_for_end()


def end_process(handle: ProcessHandle, grace_s: float) -> bool:
    """End a process; False when it had to be killed."""
    handle.send(signal.SIGTERM)
    if handle.wait(grace_s):
        return True
    handle.kill_group()
    handle.wait(None)
    return False


def ping(path: str, health_path: str) -> None:
    """Request a worker's health, so that it does not count as an orphan; ignores the answer."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_PING_TIMEOUT_S)
        connection.connect(path)
        request = f"GET {health_path} HTTP/1.1\r\nhost: worker\r\nconnection: close\r\n\r\n"
        connection.sendall(request.encode())
        connection.recv(1024)
