"""The ``ray`` placement: each trainer and each deployment an actor of a Ray cluster.

    launcher --reserves--> placement group --holds--> worker's actor, and its sidecars'
       |                                                  |
       +--- waits for its end, through Ray               +--- answers at a port of its node

A worker's place and those of its sidecars are reserved together, so that a worker that runs can
have what it needs. What cannot be placed within a budget fails, and says which resource is short.
An actor's end, with its process or its whole machine, is an answer to a call that waits for it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import ray
from ray.exceptions import ActorUnavailableError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from hearth.errors import ConfigError, EngineError
from hearth.files import SERVING_FILE
from hearth.launch.base import ENTRIES, BaseLauncher, BaseWorker, raise_failure
from hearth.launch.child import describe_failure, load_entry
from hearth.launch.ray.cluster import (
    call_on,
    check_is_node,
    connect,
    explain_death,
    has_gpus,
    kill_if_stopped,
    living_nodes,
    own_node_id,
    write_probe,
)
from hearth.launch.ray.host import HostFacts, WorkerHost, WorkerPlan, read_report
from hearth.launch.ray.placing import Place, device_of, places_of, shortage
from hearth.launch.ray.sidecars import hearth_variables
from hearth.launch.ray.snapshot_actor import SnapshotActor, buckets_through
from hearth.launch.records import WorkerFolder, last_lines
from hearth.launch.spec import (
    Endpoint,
    ExitReport,
    ExportSpec,
    Placement,
    SnapshotRecord,
    Watcher,
    WorkerSpec,
    spec_as_dict,
    spec_from_dict,
)
from hearth.objects import check_store

logger = logging.getLogger(__name__)

_POLL_S = 0.2
"""How often a worker that is waited for is looked at: it may have been stopped."""
_WAIT_S = 30.0
"""How long one call waits for a worker's first answer before the next one does."""
_WATCH_S = 2.0
"""How long one call waits for a worker's end. A worker that lives answers it then."""
_SILENT_S = 3.0
"""From when on a worker that does not answer is looked at on its node, and how often."""
_HUNG_S = 120.0
"""It hangs then, although it is not stopped: an operation may keep others from running so long."""
_CALL_TIMEOUT_S = 30.0
_UNREACHABLE_S = 60.0
"""A worker that cannot be reached for so long counts as lost; Ray itself is surer and slower."""
_SNAPSHOT_ACTOR = "snapshots"


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


class RayLauncher(BaseLauncher[RayWorker]):
    """A ``Launcher``: workers as actors of the cluster that ``RAY_ADDRESS`` names, or of one here.

    ``snapshot_store`` says how snapshots get from node to node: through ``data_dir``, which is then
    one folder on every node, through Ray's object store, or through the store of a URL. A worker
    that has no room for ``placement_timeout_s`` fails.

    Raises:
        ConfigError: there is no such cluster, or an option breaks its rule.
    """

    placement: Placement = "ray"

    def __init__(
        self,
        data_dir: Path,
        *,
        snapshot_store: str = "folder",
        die_with_parent: bool = False,
        orphan_timeout_s: float = 900.0,
        placement_timeout_s: float = 300.0,
    ) -> None:
        check_store(snapshot_store, "ray")
        if not placement_timeout_s > 0:
            raise ConfigError(f"placement_timeout_s must be > 0, got {placement_timeout_s}")
        super().__init__(
            data_dir,
            die_with_parent=die_with_parent,
            orphan_timeout_s=orphan_timeout_s,
            snapshot_store=snapshot_store,
        )
        self._root.mkdir(parents=True, exist_ok=True)
        self._lifetime = None if die_with_parent else "detached"
        self._placement_timeout_s = placement_timeout_s
        self._namespace = (
            f"hearth-{secrets.token_hex(6)}" if die_with_parent else _read_namespace(self._root)
        )
        check_is_node()
        self._is_ours = connect(self._namespace)
        self._probe = write_probe(self._root) if snapshot_store == "folder" else None
        if snapshot_store == "ray" and die_with_parent:
            # These name snapshots that ended with the platform before this one.
            for file in self._root.glob(f"deployments/*/{SERVING_FILE}"):
                file.unlink(missing_ok=True)
        self._snapshot_actor = self._find_snapshot_actor() if snapshot_store == "ray" else None

    def start(self, spec: WorkerSpec, watcher: Watcher) -> RayWorker:
        """Begin to start a worker, and return at once.

        Raises:
            ConfigError: it runs already.
            ClosedError: the launcher was closed.
        """
        worker = RayWorker(spec)
        self._look_after(worker, watcher)
        return worker

    def adopt(self, record: dict[str, Any], watcher: Watcher) -> RayWorker | ExitReport:
        """As ``Launcher.adopt``; ``ready`` is called again, also where it has answered before."""
        if "actor" not in record:
            return ExitReport(reason="ran outside the cluster, in a process that has ended")
        spec = cast("WorkerSpec", spec_from_dict(record["spec"]))
        worker = RayWorker(spec, record["actor"], record["token"])
        try:
            worker.actor = ray.get_actor(worker.name, namespace=self._namespace)
        except ValueError:
            return self._folder(worker).report("was gone when the control plane came back")
        with contextlib.suppress(ValueError):
            worker.group = ray.util.get_placement_group(worker.name)
        self._look_after(worker, watcher)
        return worker

    def snapshots(self, bucket: str) -> list[SnapshotRecord]:
        """What a bucket holds, oldest first."""
        if self._snapshot_actor is None:
            return super().snapshots(bucket)
        try:
            records = ray.get(self._snapshot_actor.facts.remote(bucket), timeout=_CALL_TIMEOUT_S)
        except RayError as error:
            raise EngineError(
                f"snapshots must be listed, got: {explain_death(error, None)}"
            ) from None
        return [SnapshotRecord(**record) for record in records]

    def log_path(self, worker_id: str) -> Path:
        """The file of a worker's log.

        Where nodes share no folder it is a copy of its end, made now.
        """
        path = WorkerFolder(self._workers_dir / worker_id).log
        worker = self._workers.get(worker_id)
        if worker is not None and (node_id := self._find_other_node(worker)) is not None:
            with contextlib.suppress(RayError):
                lines = call_on(node_id, last_lines, path, timeout_s=_CALL_TIMEOUT_S)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return path

    def _export_once(self, spec: ExportSpec) -> str | None:
        try:
            failure = call_on(
                own_node_id(),
                _run_export,
                ENTRIES[ExportSpec][0],
                asdict(spec) | {"buckets": self._bucket_root},
                self._snapshot_actor,
                hearth_variables(),
                str(Path.cwd()),
                timeout_s=None,
            )
        except RayError as error:
            return explain_death(error, None)
        raise_failure(failure)
        return None

    def _disconnect(self) -> None:
        if self._snapshot_actor is not None and not self._leaves.is_set():
            ray.kill(self._snapshot_actor)
        if self._is_ours:
            ray.shutdown()

    def _follow(self, worker: RayWorker, watcher: Watcher) -> ExitReport:
        """Start a worker that has no actor yet, and wait for its end.

        Raises:
            _StopFollowing: it was stopped, or this launcher leaves before.
            EngineError: there is no room for it.
            RayError: its actor died.
        """
        start_s = time.monotonic()
        if worker.actor is None:
            self._end_strays(worker.spec.worker_id)
            self._place(worker)
            failure = self._call(worker, "begin", budget_s=self._placement_timeout_s)
            if failure is not None:
                return ExitReport(reason=failure)
        worker.facts = self._call(worker, "facts")
        has_ended, failure = False, None
        while worker.url is None and not has_ended:
            worker.url = self._call(worker, "wait_ready", _WAIT_S)
            has_ended, failure = self._call(worker, "wait_end", 0.0)
        if worker.url is not None:
            self._report_ready(worker, watcher, start_s)
        try:
            while not has_ended:
                has_ended, failure = self._call(worker, "wait_end", _WATCH_S, watches_s=_WATCH_S)
        except _HangError as hang:
            return self._report(worker, f"hung, and was killed: {hang}")
        return self._report(worker, failure or "ended because it had answered no request")

    def _place(self, worker: RayWorker) -> None:
        """Reserve a worker's places, and make its actor there.

        Raises:
            EngineError: there is no room for it; the message says which resource is short.
        """
        places = places_of(worker.spec, has_gpus=has_gpus())
        worker.group = placement_group(
            [place.bundle() for place in places], name=worker.name, lifetime=self._lifetime
        )
        end_s = time.monotonic() + self._placement_timeout_s
        while not worker.group.wait(timeout_seconds=1):
            self._check_stays(worker)
            if time.monotonic() > end_s:
                free, nodes = ray.available_resources(), living_nodes()
                raise EngineError(shortage(places, nodes, free, self._placement_timeout_s))
        self._check_stays(worker)
        strategy = PlacementGroupSchedulingStrategy(worker.group, placement_group_bundle_index=0)
        worker.actor = (
            ray.remote(WorkerHost)
            .options(
                name=worker.name,
                namespace=self._namespace,
                lifetime=self._lifetime,
                num_cpus=places[0].cpus,
                num_gpus=places[0].gpus,
                max_concurrency=8,
                scheduling_strategy=strategy,
            )
            .remote(self._plan(worker, places))
        )

    def _plan(self, worker: RayWorker, places: Sequence[Place]) -> WorkerPlan:
        task = self._make_task(worker.spec.worker_id, worker.spec)
        task.arguments["device"] = device_of(worker.spec, places)
        return WorkerPlan(
            task=task,
            places=tuple(places),
            folder=str(self._folder(worker).path),
            token=worker.token,
            probe=self._probe,
            snapshot_actor=self._snapshot_actor,
            keep_snapshots=task.arguments.get("keep_snapshots"),
            is_detached=not self._die_with_parent,
            scratch=self._namespace,
            environment=hearth_variables(),
        )

    def _call(
        self,
        worker: RayWorker,
        method: str,
        *arguments: Any,
        budget_s: float = math.inf,
        watches_s: float = math.inf,
    ) -> Any:
        """What a method of the worker's actor returns.

        An actor that cannot be reached may come back: only Ray knows whether it died. One that
        lives returns within ``watches_s`` seconds.

        Raises:
            _HangError: it does not, and hangs; it is killed.
            _StopFollowing: the worker was stopped and its time is over, or this launcher leaves.
            EngineError: there is no answer within ``budget_s``.
            RayError: it died, or was out of reach for too long.
        """
        start_s, lost_s = time.monotonic(), None
        looked_s = start_s
        answer = getattr(worker.actor, method).remote(*arguments)
        while True:
            try:
                if ray.wait([answer], timeout=_POLL_S)[0]:
                    return ray.get(answer)
            except ActorUnavailableError:
                lost_s = lost_s or time.monotonic()
                if time.monotonic() - lost_s > _UNREACHABLE_S:
                    raise
                time.sleep(_POLL_S)
                answer = getattr(worker.actor, method).remote(*arguments)
            self._check_stays(worker)
            now_s = time.monotonic()
            if lost_s is None and now_s - looked_s > watches_s + _SILENT_S:
                looked_s = now_s
                self._end_if_hung(worker, now_s - start_s - watches_s)
            if time.monotonic() - start_s > budget_s:
                raise EngineError(f"its actor must answer within {budget_s:g} s, got nothing")

    def _end_if_hung(self, worker: RayWorker, silent_s: float) -> None:
        """Kill a worker that is stopped, or silent for too long.

        Raises:
            _HangError: it was killed.
        """
        if worker.facts is None:
            return
        is_over = silent_s > _HUNG_S
        with contextlib.suppress(RayError):  # a node that is lost is Ray's to say
            was_stopped = call_on(
                worker.facts.node_id,
                kill_if_stopped,
                worker.facts.pid,
                is_over,
                timeout_s=_CALL_TIMEOUT_S,
            )
            if was_stopped or is_over:
                how = "it is stopped" if was_stopped else "it has not answered"
                raise _HangError(f"{how} since {silent_s:.0f} s")

    def _check_stays(self, worker: RayWorker) -> None:
        is_over = worker.ends_by_s is not None and time.monotonic() > worker.ends_by_s
        # What holds nothing yet is not waited for.
        if self._leaves.is_set() or is_over or (worker.is_stopping and worker.url is None):
            raise _StopFollowing

    def _report_error(self, worker: RayWorker, error: Exception) -> ExitReport | None:
        if isinstance(error, _StopFollowing):
            return None
        if not isinstance(error, RayError):
            return super()._report_error(worker, error)
        lost = None
        if worker.facts is not None:
            node_id = worker.facts.node_id
            if not any(node.node_id == node_id for node in living_nodes()):
                lost = f"node {node_id[:8]} ({worker.facts.address})"
        return self._report(worker, explain_death(error, lost))

    def _report(self, worker: RayWorker, reason: str) -> ExitReport:
        """How a worker ended, from its folder, wherever that is."""
        folder, node_id = self._folder(worker), self._find_other_node(worker)
        if node_id is None:
            return folder.report(reason)
        with contextlib.suppress(RayError):
            return call_on(
                node_id, read_report, str(folder.path), reason, timeout_s=_CALL_TIMEOUT_S
            )
        return ExitReport(reason=reason)

    def _find_other_node(self, worker: RayWorker) -> str | None:
        """The node that has a worker's folder, where that is not this one."""
        if self._probe is not None or worker.facts is None:
            return None
        return worker.facts.node_id if worker.facts.node_id != own_node_id() else None

    def _clean_up(self, worker: RayWorker) -> None:
        """End a worker's actor, if it still runs, and free what was reserved for it."""
        if self._leaves.is_set():
            return
        # A cluster that is gone has nothing to clear up.
        with contextlib.suppress(Exception):
            if worker.actor is not None:
                ray.kill(worker.actor)
            if worker.group is not None:
                remove_placement_group(worker.group)

    def _folder(self, worker: RayWorker) -> WorkerFolder:
        return WorkerFolder(self._workers_dir / worker.spec.worker_id)

    def _end_strays(self, worker_id: str) -> None:
        """End what an earlier launcher has started under that id and nobody has adopted."""
        if self._die_with_parent:
            return
        actors: list[Any] = ray.util.list_named_actors(all_namespaces=True)
        for actor in actors:
            name = actor["name"]
            if actor["namespace"] != self._namespace or not name.startswith(f"{worker_id}#"):
                continue
            logger.warning("worker %s of an earlier launcher is ended", worker_id)
            with contextlib.suppress(ValueError):
                ray.kill(ray.get_actor(name, namespace=self._namespace))
            with contextlib.suppress(ValueError):
                remove_placement_group(ray.util.get_placement_group(name))

    def _find_snapshot_actor(self) -> Any:
        return (
            ray.remote(SnapshotActor)
            .options(
                name=_SNAPSHOT_ACTOR,
                namespace=self._namespace,
                get_if_exists=True,
                num_cpus=0,
                lifetime=self._lifetime,
                scheduling_strategy=NodeAffinitySchedulingStrategy(own_node_id(), soft=True),
            )
            .remote(Path.cwd())
        )


class _StopFollowing(Exception):  # noqa: N818 - no error
    """Nobody waits for the worker any more."""


class _HangError(Exception):
    """A worker hung, and was killed."""


def _read_namespace(root: Path) -> str:
    """The platform's own name in the cluster; the same for every launcher of a data folder."""
    path = root / "ray-namespace"
    if not path.exists():
        path.write_text(f"hearth-{secrets.token_hex(6)}", encoding="ascii")
    return path.read_text(encoding="ascii")


def _run_export(
    entry: str,
    arguments: Mapping[str, Any],
    snapshot_actor: Any,
    environment: Mapping[str, str],
    working_dir: str,
) -> dict[str, Any] | None:
    """Write a snapshot as a model folder, in a process of its own; returns what failed, if any."""
    os.environ.update(environment)
    os.chdir(working_dir)
    with tempfile.TemporaryDirectory(prefix="hearth-export-") as mirror:
        arguments = dict(arguments)
        if snapshot_actor is not None:
            arguments["buckets"] = buckets_through(snapshot_actor, Path(mirror), None)
        try:
            load_entry(entry)(**arguments, on_phase=lambda phase: None)
        except Exception as error:  # noqa: BLE001 - raised again where the export was called
            return describe_failure(error)
    return None
