"""A worker in the cluster, as its launcher has it."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from typing import Any

import ray
from ray.exceptions import RayError

from hearth.launch.ray.host import HostFacts
from hearth.launch.spec import Endpoint, WorkerSpec, spec_as_dict


class RayWorker:
    """A worker in an actor of its own. ``launch.ray.launcher`` makes these."""

    def __init__(self, spec: WorkerSpec, name: str, token: str) -> None:
        self.spec = spec
        self.name = name
        """Of its actor and of its placement group."""
        self.token = token
        self.group: Any = None
        self.actor: Any = None
        self.facts: HostFacts | None = None
        self.url: str | None = None
        self.ends_by_s: float | None = None
        """When it is killed at the latest, on the monotonic clock; None while it is to run."""
        self.has_ended = threading.Event()
        """Set when it has no actor any more and nothing reserved."""
        self.thread: threading.Thread | None = None
        """Follows it and tells its watcher."""

    @classmethod
    def new(cls, spec: WorkerSpec) -> RayWorker:
        """A worker that is about to be started."""
        name = f"{spec.worker_id}#{secrets.token_hex(4)}"
        return cls(spec, name, secrets.token_hex(32))

    @property
    def endpoint(self) -> Endpoint:
        """Its URL, as soon as it answers."""
        return Endpoint(url=self.url, token=self.token)

    @property
    def pid(self) -> int | None:
        """Its process, on its own node; None before there is one."""
        return self.facts.pid if self.facts is not None else None

    @property
    def is_stopping(self) -> bool:
        """Whether somebody has asked for its end."""
        return self.ends_by_s is not None

    def record(self) -> dict[str, Any]:
        """JSON from which ``RayLauncher.adopt`` finds it again, also when taken early."""
        return {
            "worker_id": self.spec.worker_id,
            "spec": spec_as_dict(self.spec),
            "actor": self.name,
            "token": self.token,
        }

    def stop(self, grace_s: float = 5.0) -> None:
        """Close it, and end its process when that takes longer than ``grace_s``."""
        self.ends_by_s = time.monotonic() + grace_s
        self.ask_to_end()
        # Not for a watcher that stops a worker when it hears of it, on the thread that tells it.
        if threading.current_thread() is not self.thread:
            self.has_ended.wait()

    def ask_to_end(self) -> None:
        """Have it close, or have it end where there is nothing to close yet."""
        if self.actor is None:
            return
        with contextlib.suppress(RayError):
            if self.url is None:
                ray.kill(self.actor)
            else:
                self.actor.end.remote()
