"""The actor that a worker lives in: it builds the worker in its own process and serves its app.

Requests come over the network, at a port of the node's address, and are answered only with the
worker's token. Ray carries no request, only the worker's life: its start, its health, its end.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray

from hearth.errors import HearthError
from hearth.launch.app_server import AppServer, listener_at
from hearth.launch.child import Task, describe_failure, load_entry, open_log, start_phases
from hearth.launch.ray.cluster import Probe
from hearth.launch.ray.placing import Place
from hearth.launch.ray.sidecars import RaySidecars
from hearth.launch.ray.snapshot_actor import buckets_through
from hearth.launch.records import WorkerFolder, write_json

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class WorkerPlan:
    """What a worker's actor is to do."""

    task: Task
    places: tuple[Place, ...]
    folder: str
    """The worker's folder, on its own node."""
    token: str = field(repr=False)
    probe: Probe | None
    """Of the data folder, where nodes share it."""
    snapshot_actor: Any
    """The actor that keeps snapshots, where they go through Ray."""
    keep_snapshots: int | None
    is_detached: bool
    """It outlives the control plane, and clears up behind itself."""
    scratch: str
    """Name of a folder of the platform on each machine."""
    environment: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """Where a worker's actor lives."""

    node_id: str
    address: str
    pid: int


class WorkerHost:
    """The actor: one trainer or one deployment. Its methods are called from other nodes."""

    def __init__(self, plan: WorkerPlan) -> None:
        self._plan = plan
        self._address = ray.util.get_node_ip_address()
        self._folder = WorkerFolder(Path(plan.folder))
        self._server: AppServer | None = None
        self._url: str | None = None
        self._failure: str | None = None
        self._answers = threading.Event()
        self._has_ended = threading.Event()

    def begin(self) -> str | None:
        """Begin to build the worker; returns why that cannot be, where the node lacks something."""
        try:
            if self._plan.probe is not None:
                self._plan.probe.check(f"the node at {self._address}")
            self._folder.prepare()
            self._take_over()
        except (HearthError, OSError) as error:
            return describe_failure(error)["reason"]
        threading.Thread(target=self._run_worker, name="hearth-worker", daemon=True).start()
        return None

    def facts(self) -> HostFacts:
        """Where it lives."""
        node_id = ray.get_runtime_context().get_node_id()
        return HostFacts(node_id=node_id, address=self._address, pid=os.getpid())

    def wait_ready(self, timeout_s: float) -> str | None:
        """Its URL, once it answers; None where it does not yet, or has ended."""
        answers = self._answers.wait(timeout_s) and not self._has_ended.is_set()
        return self._url if answers else None

    def wait_end(self, timeout_s: float) -> tuple[bool, str | None]:
        """Whether it has ended, ``timeout_s`` from now at the latest, and why by itself.

        A launcher that waits lives: the worker is no orphan.
        """
        if self._server is not None:
            self._server.touch()
        return self._has_ended.wait(timeout_s), self._failure

    def end(self) -> None:
        """Answer no more, and close the worker."""
        if self._server is not None:
            self._server.end()

    def _take_over(self) -> None:
        """Make the process the worker's: its log, its folder, its environment."""
        open_log(self._folder.log)
        if self._plan.task.threads is None:
            # Ray's own, as many as the place has CPUs; the worker takes its share of the machine.
            os.environ.pop("OMP_NUM_THREADS", None)
        os.environ.update(self._plan.environment)
        with contextlib.suppress(OSError):
            os.chdir(self._plan.task.working_dir)

    def _run_worker(self) -> None:
        """The worker's whole life; runs on a thread of its own."""
        scratch = Path(tempfile.gettempdir(), self._plan.scratch)
        scratch.mkdir(parents=True, exist_ok=True, mode=0o700)
        mirror = Path(tempfile.mkdtemp(prefix="snapshots-", dir=scratch))
        try:
            self._serve(scratch, mirror)
        except Exception as error:  # the boundary: its launcher must hear of it
            if not isinstance(error, HearthError):
                logger.exception("worker %s ends", self._plan.task.worker_id)
            failure = describe_failure(
                error, "ended" if self._answers.is_set() else "could not start"
            )
            write_json(self._folder.failure, failure)
            self._failure = failure["reason"]
        finally:
            shutil.rmtree(mirror, ignore_errors=True)
            self._has_ended.set()
            self._answers.set()
            if self._plan.is_detached:
                self._leave()

    def _serve(self, scratch: Path, mirror: Path) -> None:
        task = self._plan.task
        assert task.health_path is not None, "workers have apps"
        shared = replace(task, thread_board=str(scratch / "threads"))
        on_phase = start_phases(shared, self._folder)
        sidecars = RaySidecars(
            ray.util.get_current_placement_group(),
            self._plan.places[1:],
            self._folder.path / "sidecars",
            self._plan.probe,
        )
        try:
            arguments = dict(task.arguments)
            if self._plan.snapshot_actor is not None:
                arguments["buckets"] = buckets_through(
                    self._plan.snapshot_actor, mirror, self._plan.keep_snapshots
                )
            app, close = load_entry(task.entry)(**arguments, on_phase=on_phase, sidecars=sidecars)
            try:
                self._answer(app, task.health_path)
            finally:
                logger.info("worker %s closes", task.worker_id)
                close()
        finally:
            sidecars.close()

    def _answer(self, app: Any, health_path: str) -> None:
        listener = listener_at(self._address)
        host, port = listener.getsockname()[:2]
        self._url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._server = AppServer(
            app,
            listener,
            health_path=health_path,
            token=self._plan.token,
            orphan_timeout_s=self._plan.task.orphan_timeout_s,
            on_ready=self._answers.set,
        )
        self._server.run()

    def _leave(self) -> None:
        """Free what was reserved, this actor's own place included; nobody else may be left to."""
        with contextlib.suppress(Exception):
            group: Any = ray.util.get_current_placement_group()
            ray.util.remove_placement_group(group)


def read_report(folder: str, reason: str) -> Any:
    """How the worker of a folder ended, as the folder of this node has it."""
    return WorkerFolder(Path(folder)).report(reason)
