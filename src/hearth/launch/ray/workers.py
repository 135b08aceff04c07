"""A worker in the cluster, as its launcher has it."""

from __future__ import annotations

import contextlib
import secrets
import time
from typing import Any

import ray
from ray.exceptions import RayError

from hearth.launch.base import BaseWorker
from hearth.launch.ray.host import HostFacts
from hearth.launch.spec import Endpoint, WorkerSpec, spec_as_dict


class RayWorker(BaseWorker):
    """A worker in an actor of its own, which is called ``name``, as is its placement group."""

    def __init__(self, spec: WorkerSpec, name: str | None = None, token: str | None = None) -> None:
        super().__init__(spec)
        self.name = name or f"{spec.worker_id}#{secrets.token_hex(4)}"
        self.token = token or secrets.token_hex(32)
        self.group: Any = None
        self.actor: Any = None
        self.facts: HostFacts | None = None
        self.url: str | None = None
        self.ends_by_s: float | None = None
        """When it is killed at the latest, on the monotonic clock; None while it is to run."""

    @property
    def endpoint(self) -> Endpoint:
        """Its URL, as soon as it answers."""
        return Endpoint(url=self.url, token=self.token)

    @property
    def pid(self) -> int | None:
        """Its process, on its own node; None before there is one."""
        return self.facts.pid if self.facts is not None else None

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
        self.is_stopping = True
        if self.actor is not None:
            with contextlib.suppress(RayError):
                if self.url is None:  # there is nothing to close yet
                    ray.kill(self.actor)
                else:
                    self.actor.end.remote()
        self.wait_for_end()
