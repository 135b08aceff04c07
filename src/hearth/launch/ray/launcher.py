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
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast, get_args

import ray
from ray.exceptions import ActorUnavailableError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from hearth.errors import ClosedError, ConfigError, EngineError, HearthError, NotFoundError
from hearth.launch.buckets import read_bucket
from hearth.launch.child import Task
from hearth.launch.processes import ENTRIES
from hearth.launch.ray.cluster import call_on, connect, has_gpus, living_nodes, own_node_id
from hearth.launch.ray.deaths import death_of
from hearth.launch.ray.exports import run_export
from hearth.launch.ray.host import WorkerHost, WorkerPlan, report_of
from hearth.launch.ray.placing import Place, places_of, shortage
from hearth.launch.ray.sharing import write_probe
from hearth.launch.ray.sidecars import hearth_variables
from hearth.launch.ray.snapshot_actor import SnapshotActor
from hearth.launch.ray.workers import RayWorker
from hearth.launch.records import WorkerFolder, last_lines
from hearth.launch.spec import (
    ExitReport,
    ExportSpec,
    Placement,
    SnapshotPlace,
    SnapshotRecord,
    Watcher,
    WorkerSpec,
    spec_from_dict,
)

logger = logging.getLogger(__name__)

_LOOK_S = 0.2
"""How often somebody's wish to stop is looked for, while a worker is waited for."""
_WAIT_S = 30.0
"""How long one call waits for a worker's end before the next one does."""
_ASK_TIMEOUT_S = 30.0
_UNREACHABLE_S = 60.0
"""A worker that cannot be reached for so long counts as lost; Ray itself is surer and slower."""
_SNAPSHOT_ACTOR = "snapshots"


class RayLauncher:
    """A ``Launcher``: workers as actors of the cluster that ``RAY_ADDRESS`` names, or of one here.

    ``snapshot_store`` says how snapshots get from node to node: through ``data_dir``, which is then
    one folder on every node, or through Ray's object store. With ``die_with_parent`` the workers
    end with this process; otherwise they run on after it has died, for a later launcher with the
    same ``data_dir`` to adopt, and end themselves when nobody has asked for ``orphan_timeout_s``.

    Raises:
        ConfigError: there is no such cluster, or an option breaks its rule.
    """

    placement: Placement = "ray"

    def __init__(
        self,
        data_dir: Path,
        *,
        snapshot_store: SnapshotPlace = "folder",
        die_with_parent: bool = False,
        orphan_timeout_s: float = 900.0,
        placement_timeout_s: float = 300.0,
    ) -> None:
        if snapshot_store not in get_args(SnapshotPlace):
            raise ConfigError(f"snapshot_store must be 'folder' or 'ray', got {snapshot_store!r}")
        if not placement_timeout_s > 0:
            raise ConfigError(f"placement_timeout_s must be > 0, got {placement_timeout_s}")
        root = data_dir.expanduser().resolve()
        root.mkdir(parents=True, exist_ok=True)
        self._workers_dir = root / "workers"
        self._bucket_root = root / "buckets"
        self._is_detached = not die_with_parent
        self._orphan_timeout_s = orphan_timeout_s if self._is_detached else None
        self._placement_timeout_s = placement_timeout_s
        self._namespace = (
            _namespace(root) if self._is_detached else f"hearth-{secrets.token_hex(6)}"
        )
        self._is_ours = connect(self._namespace)
        self._probe = write_probe(root) if snapshot_store == "folder" else None
        self._snapshot_actor = self._found_snapshot_actor() if snapshot_store == "ray" else None
        self._workers: dict[str, RayWorker] = {}
        self._lock = threading.Lock()
        self._is_closed = False
        self._leaves = threading.Event()

    def start(self, spec: WorkerSpec, watcher: Watcher) -> RayWorker:
        """Begin to start a worker, and return at once.

        Raises:
            ConfigError: it runs already.
            ClosedError: the launcher was closed.
        """
        worker = RayWorker.new(spec)
        self._look_after(worker, watcher)
        return worker

    def adopt(self, record: dict[str, Any], watcher: Watcher) -> RayWorker | ExitReport:
        """The worker that an earlier launcher started, if it still runs; else how it ended.

        Its watcher hears ``ready`` again when it answers, or has answered before.
        """
        if "actor" not in record:
            return ExitReport(reason="ran outside the cluster, in a process that has ended")
        spec = cast("WorkerSpec", spec_from_dict(record["spec"]))
        worker = RayWorker(spec, record["actor"], record["token"])
        try:
            worker.actor = ray.get_actor(worker.name, namespace=self._namespace)
        except ValueError:
            folder = self._workers_dir / spec.worker_id
            return WorkerFolder(folder).report("was gone when the control plane came back")
        with contextlib.suppress(ValueError):
            worker.group = ray.util.get_placement_group(worker.name)
        self._look_after(worker, watcher)
        return worker

    def export(self, spec: ExportSpec) -> None:
        """Write a snapshot as a model folder, in a process of its own on this node; blocks.

        Raises:
            NotFoundError: the bucket has no such snapshot.
            EngineError: it cannot be read or written.
        """
        arguments = {**asdict(spec), "buckets": str(self._bucket_root)}
        entry = ENTRIES[ExportSpec][0]
        try:
            failure = call_on(
                own_node_id(),
                run_export,
                entry,
                arguments,
                self._snapshot_actor,
                hearth_variables(),
                str(Path.cwd()),
                timeout_s=None,
            )
        except RayError as error:
            raise EngineError(
                f"export of {spec.identity!r} must end well, got: {death_of(error, None)}"
            ) from None
        if failure is not None:
            kind = NotFoundError if failure["code"] == NotFoundError.code else EngineError
            raise kind(failure["message"])

    def snapshots(self, bucket: str) -> list[SnapshotRecord]:
        """What a bucket holds, oldest first."""
        if self._snapshot_actor is None:
            return read_bucket(self._bucket_root / bucket)
        try:
            found = ray.get(self._snapshot_actor.facts.remote(bucket), timeout=_ASK_TIMEOUT_S)
        except RayError as error:
            raise EngineError(f"snapshots must be listed, got: {death_of(error, None)}") from None
        return [SnapshotRecord(**one) for one in found]

    def log_path(self, worker_id: str) -> Path:
        """The file of a worker's log.

        Where nodes share no folder it is a copy of its end, made now.
        """
        path = WorkerFolder(self._workers_dir / worker_id).log
        worker = self._workers.get(worker_id)
        facts = worker.facts if worker is not None else None
        if self._probe is None and facts is not None and facts.node_id != own_node_id():
            with contextlib.suppress(RayError):
                lines = call_on(facts.node_id, last_lines, path, timeout_s=_ASK_TIMEOUT_S)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return path

    def close(self) -> None:
        """Stop every worker, the newest first, and leave the cluster."""
        if (workers := self._shut()) is None:
            return
        for worker in reversed(workers):
            worker.stop()
        if self._snapshot_actor is not None:
            ray.kill(self._snapshot_actor)
        self._disconnect()

    def release(self) -> None:
        """Let the workers run on; a launcher that is made later on the same folder adopts them."""
        if (workers := self._shut()) is None:
            return
        self._leaves.set()
        for worker in workers:
            worker.has_ended.wait()
        self._disconnect()

    def _shut(self) -> list[RayWorker] | None:
        """Take no more workers; those that there are, the first time."""
        with self._lock:
            before, self._is_closed = self._is_closed, True
            return None if before else list(self._workers.values())

    def _disconnect(self) -> None:
        if self._is_ours:
            ray.shutdown()

    def _look_after(self, worker: RayWorker, watcher: Watcher) -> None:
        worker_id = worker.spec.worker_id
        with self._lock:
            if self._is_closed:
                raise ClosedError("launcher must be open, got a call after close")
            if worker_id in self._workers:
                raise ConfigError(f"worker_id must be new, got {worker_id!r}: it is running")
            self._workers[worker_id] = worker
        worker.thread = threading.Thread(
            target=self._life,
            args=(worker, watcher),
            name=f"hearth-launch {worker_id}",
            daemon=True,
        )
        worker.thread.start()

    def _life(self, worker: RayWorker, watcher: Watcher) -> None:
        """Follow a worker from its start to its end; runs on a thread of its own."""
        report = None
        try:
            report = self._follow(worker, watcher)
        except _Left:
            pass
        except HearthError as error:
            report = ExitReport(reason=f"could not start: {error}")
        except Exception as error:  # noqa: BLE001 - the boundary: its watcher must hear of it
            report = self._death(worker, error)
        if not self._leaves.is_set():
            _clear(worker)
        with self._lock:
            self._workers.pop(worker.spec.worker_id, None)
        is_asked = worker.is_stopping
        worker.has_ended.set()
        if report is not None and not is_asked:
            logger.warning("worker %s %s", worker.spec.worker_id, report.describe())
            _tell(lambda: watcher.failed(worker, report))

    def _follow(self, worker: RayWorker, watcher: Watcher) -> ExitReport:
        """How the worker ended.

        Raises:
            _Left: it was stopped, or this launcher leaves before.
            EngineError: there is no room for it.
            RayError: its actor died.
        """
        start_s = time.monotonic()
        if worker.actor is None:
            self._end_strays(worker.spec.worker_id)
            self._place(worker)
            failure = self._asked(worker, "begin", budget_s=self._placement_timeout_s)
            if failure is not None:
                return ExitReport(reason=failure)
        worker.facts = facts = self._asked(worker, "facts")
        has_ended, failure = False, None
        while worker.url is None and not has_ended:
            worker.url = self._asked(worker, "wait_ready", _WAIT_S)
            has_ended, failure = self._asked(worker, "wait_end", 0.0)
        if worker.url is not None and not worker.is_stopping:
            logger.info(
                "worker %s answers on %s, %.2f s after it was asked for",
                worker.spec.worker_id,
                facts.address,
                time.monotonic() - start_s,
            )
            _tell(lambda: watcher.ready(worker))
        while not has_ended:
            has_ended, failure = self._asked(worker, "wait_end", _WAIT_S)
        return self._report(worker, failure or "ended because nobody had asked it anything")

    def _place(self, worker: RayWorker) -> None:
        """Reserve a worker's places, and make its actor there.

        Raises:
            EngineError: there is no room for it; the message says which resource is short.
        """
        places = places_of(worker.spec, has_gpus=has_gpus())
        lifetime = "detached" if self._is_detached else None
        worker.group = placement_group(
            [place.bundle() for place in places], name=worker.name, lifetime=lifetime
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
                lifetime=lifetime,
                num_cpus=places[0].cpus,
                num_gpus=places[0].gpus,
                max_concurrency=8,
                scheduling_strategy=strategy,
            )
            .remote(self._plan(worker, places))
        )

    def _plan(self, worker: RayWorker, places: Sequence[Place]) -> WorkerPlan:
        spec = worker.spec
        entry, health_path = ENTRIES[type(spec)]
        arguments = asdict(spec)
        del arguments["worker_id"]
        task = Task(
            worker_id=spec.worker_id,
            entry=entry,
            health_path=health_path,
            threads=arguments.pop("threads"),
            arguments={**arguments, "buckets": str(self._bucket_root)},
            working_dir=str(Path.cwd()),
            orphan_timeout_s=self._orphan_timeout_s,
        )
        return WorkerPlan(
            task=task,
            places=tuple(places),
            folder=str(self._folder(worker).path),
            token=worker.token,
            probe=self._probe,
            snapshot_actor=self._snapshot_actor,
            keep_snapshots=arguments.get("keep_snapshots"),
            is_detached=self._is_detached,
            scratch=self._namespace,
            environment=hearth_variables(),
        )

    def _asked(
        self, worker: RayWorker, method: str, *arguments: Any, budget_s: float = math.inf
    ) -> Any:
        """What a method of the worker's actor returns.

        An actor that cannot be reached may come back: only Ray knows whether it died.

        Raises:
            _Left: the worker was stopped and its time is over, or this launcher leaves.
            EngineError: there is no answer within ``budget_s``.
            RayError: it died, or was out of reach for too long.
        """
        begun_s, lost_s = time.monotonic(), None
        asked = getattr(worker.actor, method).remote(*arguments)
        while True:
            try:
                if ray.wait([asked], timeout=_LOOK_S)[0]:
                    return ray.get(asked)
            except ActorUnavailableError:
                lost_s = lost_s or time.monotonic()
                if time.monotonic() - lost_s > _UNREACHABLE_S:
                    raise
                time.sleep(_LOOK_S)
                asked = getattr(worker.actor, method).remote(*arguments)
            self._check_stays(worker)
            if time.monotonic() - begun_s > budget_s:
                raise EngineError(f"its actor must answer within {budget_s:g} s, got nothing")

    def _check_stays(self, worker: RayWorker) -> None:
        is_over = worker.ends_by_s is not None and time.monotonic() > worker.ends_by_s
        # What holds nothing yet is not waited for.
        if self._leaves.is_set() or is_over or (worker.is_stopping and worker.url is None):
            raise _Left

    def _death(self, worker: RayWorker, error: Exception) -> ExitReport:
        """What is known of a worker whose following ended with an error."""
        if not isinstance(error, RayError):
            logger.error("worker %s could not be followed", worker.spec.worker_id, exc_info=error)
            return ExitReport(reason=f"could not start: {error}")
        lost = None
        if worker.facts is not None and not _is_alive(worker.facts.node_id):
            lost = f"node {worker.facts.node_id[:8]} ({worker.facts.address})"
        return self._report(worker, death_of(error, lost))

    def _report(self, worker: RayWorker, reason: str) -> ExitReport:
        """How a worker ended, from its folder, wherever that is."""
        folder, facts = self._folder(worker), worker.facts
        if self._probe is not None or facts is None or facts.node_id == own_node_id():
            return folder.report(reason)
        with contextlib.suppress(RayError):
            found = (report_of, str(folder.path), reason)
            return call_on(facts.node_id, *found, timeout_s=_ASK_TIMEOUT_S)
        return ExitReport(reason=reason)

    def _folder(self, worker: RayWorker) -> WorkerFolder:
        return WorkerFolder(self._workers_dir / worker.spec.worker_id)

    def _end_strays(self, worker_id: str) -> None:
        """End what an earlier launcher has started under that id and nobody has adopted."""
        if not self._is_detached:
            return
        known: list[Any] = ray.util.list_named_actors(all_namespaces=True)
        for one in known:
            name = one["name"]
            if one["namespace"] != self._namespace or not name.startswith(f"{worker_id}#"):
                continue
            logger.warning("worker %s of an earlier launcher is ended", worker_id)
            with contextlib.suppress(ValueError):
                ray.kill(ray.get_actor(name, namespace=self._namespace))
            with contextlib.suppress(ValueError):
                remove_placement_group(ray.util.get_placement_group(name))

    def _found_snapshot_actor(self) -> Any:
        return (
            ray.remote(SnapshotActor)
            .options(
                name=_SNAPSHOT_ACTOR,
                namespace=self._namespace,
                get_if_exists=True,
                num_cpus=0,
                lifetime="detached" if self._is_detached else None,
                scheduling_strategy=NodeAffinitySchedulingStrategy(own_node_id(), soft=True),
            )
            .remote()
        )


class _Left(Exception):  # noqa: N818 - no error
    """Nobody waits for the worker any more."""


def _clear(worker: RayWorker) -> None:
    """End a worker's actor, if it still runs, and free what was reserved for it."""
    # A cluster that is gone has nothing to clear up.
    with contextlib.suppress(Exception):
        if worker.actor is not None:
            ray.kill(worker.actor)
        if worker.group is not None:
            remove_placement_group(worker.group)


def _is_alive(node_id: str) -> bool:
    return any(node.node_id == node_id for node in living_nodes())


def _namespace(root: Path) -> str:
    """The platform's own name in the cluster; the same for every launcher of a data folder."""
    path = root / "ray-namespace"
    if not path.exists():
        path.write_text(f"hearth-{secrets.token_hex(6)}", encoding="ascii")
    return path.read_text(encoding="ascii")


def _tell(news: Callable[[], None]) -> None:
    try:
        news()
    except Exception:  # the boundary: a watcher's failure must not end the watching
        logger.exception("a watcher failed")
