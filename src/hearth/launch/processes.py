"""The ``process`` placement: each trainer and each deployment a process of its own.

    launcher --asks--> forkserver --forks--> worker --answers at--> its Unix socket

The launcher watches every worker itself, through a descriptor of its process. It notices an end
within milliseconds, whether or not the forkserver is still alive. Whatever it has to know again
after a restart is in the workers' folders (``hearth.launch.records``). It imports no torch.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import select
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from hearth.errors import ClosedError, ConfigError, EngineError, HearthError, NotFoundError
from hearth.launch.buckets import read_bucket
from hearth.launch.child import Task
from hearth.launch.forkserver_client import ForkserverClient
from hearth.launch.gpus import device_of
from hearth.launch.records import Living, WorkerFolder, read_json, remove_socket
from hearth.launch.spec import (
    DeploymentSpec,
    ExitReport,
    ExportSpec,
    Placement,
    SnapshotRecord,
    TrainerSpec,
    Watcher,
    WorkerSpec,
    spec_from_dict,
)
from hearth.launch.workers import ProcessWorker, end, ping

logger = logging.getLogger(__name__)

# By name: a launcher does not import what it launches. peft is imported where it is
# used, and here once for all processes that are forked.
WORKER_MODULES = ("hearth.trainer.worker", "hearth.inference.worker", "peft")
ENTRIES: dict[type, tuple[str, str | None]] = {
    TrainerSpec: ("hearth.trainer.worker:build", "/api/v1/healthz"),
    DeploymentSpec: ("hearth.inference.worker:build", "/healthz"),
    ExportSpec: ("hearth.trainer.worker:export", None),
}
"""What each kind of worker runs, and where its app says that it is well."""
_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]{0,160}")
_LOOK_S = 0.01
"""How often a starting worker's folder is looked at."""
_STRAY_GRACE_S = 2.0


class ProcessLauncher:
    """A ``Launcher``: workers as processes under ``data_dir``.

    With ``die_with_parent`` every worker ends with this process. Otherwise workers run on after
    this process has died, for a later launcher with the same ``data_dir`` to adopt, and end
    themselves when nobody has asked them anything for ``orphan_timeout_s``. ``preload`` are the
    modules whose import a start does not have to wait for.
    """

    placement: Placement = "process"

    def __init__(
        self,
        data_dir: Path,
        *,
        die_with_parent: bool = False,
        orphan_timeout_s: float = 900.0,
        preload: Sequence[str] = WORKER_MODULES,
    ) -> None:
        if not hasattr(os, "pidfd_open"):
            raise ConfigError(
                "placement must be 'inline' on this system, got 'process': it needs Linux 5.3"
            )
        if not orphan_timeout_s > 0:
            raise ConfigError(f"orphan_timeout_s must be > 0, got {orphan_timeout_s}")
        root = data_dir.expanduser().resolve()
        self._workers_dir = root / "workers"
        self._bucket_root = root / "buckets"
        self._thread_board = root / "threads"
        self._gpu_board = root / "gpus"
        self._die_with_parent = die_with_parent
        self._orphan_timeout_s = None if die_with_parent else orphan_timeout_s
        self._forkserver_client = ForkserverClient(
            root, preload=preload, die_with_parent=die_with_parent, idle_s=orphan_timeout_s
        )
        self._workers: dict[str, ProcessWorker] = {}
        self._lock = threading.Lock()
        self._is_closed = False
        # Written to once, and never read: it wakes all who follow a worker.
        self._leave_in, self._leave_out = os.pipe2(os.O_CLOEXEC)

    @property
    def forkserver_pid(self) -> int | None:
        """The process that forks the workers; None before it is needed."""
        return self._forkserver_client.pid

    def warm(self) -> None:
        """Start the forkserver now, so that the first worker does not wait for it."""
        self._forkserver_client.warm()

    def start(self, spec: WorkerSpec, watcher: Watcher) -> ProcessWorker:
        """Begin to start a worker, and return at once.

        Raises:
            ConfigError: its id is no name, or it runs already.
        """
        folder = WorkerFolder(self._workers_dir / _checked(spec.worker_id, "worker_id"))
        worker = ProcessWorker(spec, folder)
        self._look_after(worker, watcher, self._fork)
        return worker

    def adopt(self, record: dict[str, Any], watcher: Watcher) -> ProcessWorker | ExitReport:
        """The worker that an earlier launcher started, if it still runs; else how it ended.

        Its watcher hears ``ready`` again when it answers, or has answered before.
        """
        if "spec" not in record:
            # Written down by a platform that ran its workers inline.
            return ExitReport(reason="ran inside a process that has ended")
        spec = cast("WorkerSpec", spec_from_dict(record["spec"]))
        folder = WorkerFolder(self._workers_dir / _checked(record["worker_id"], "worker_id"))
        facts = folder.read_process()
        if facts is None or not facts.process.is_alive():
            if facts is not None:
                folder.wait_for_exit(facts.forkserver)
            return folder.report("was gone when the control plane came back")
        worker = ProcessWorker(spec, folder)
        self._look_after(worker, watcher, lambda worker: None)
        worker.has_begun.wait()
        return worker

    def export(self, spec: ExportSpec) -> None:
        """Write a snapshot as a model folder, in a process of its own; blocks.

        Raises:
            NotFoundError: the bucket has no such snapshot.
            EngineError: it cannot be read or written.
        """
        worker_id = f"export-{secrets.token_hex(6)}"
        folder = WorkerFolder(self._workers_dir / worker_id)
        try:
            folder.prepare()
            self._forkserver_client.fork(self._task(worker_id, spec))
            facts = folder.read_process()
            assert facts is not None, "the forkserver writes it before it answers"
            Living(facts.process).wait(None)
            folder.wait_for_exit(facts.forkserver)
            failure = read_json(folder.failure)
            report = folder.report("ended, and nobody saw how")
        finally:
            shutil.rmtree(folder.path, ignore_errors=True)
        if failure is not None:
            kind = NotFoundError if failure["code"] == NotFoundError.code else EngineError
            raise kind(failure["message"])
        if report.code != 0:
            raise EngineError(
                f"export of {spec.identity!r} must end well, got: {report.describe()}"
            )

    def snapshots(self, bucket: str) -> list[SnapshotRecord]:
        """What a bucket holds, oldest first; a folder without a readable manifest is none."""
        return read_bucket(self._bucket(bucket))

    def log_path(self, worker_id: str) -> Path:
        """The file of a worker's log; it appears when the worker first starts."""
        return WorkerFolder(self._workers_dir / _checked(worker_id, "worker_id")).log

    def close(self) -> None:
        """Stop every worker, the newest first, and then the forkserver."""
        if (workers := self._shut()) is None:
            return
        for worker in reversed(workers):
            worker.stop()
        self._forkserver_client.end()
        os.close(self._leave_in)
        os.close(self._leave_out)

    def release(self) -> None:
        """Let the workers run on; a launcher that is made later on the same folder adopts them."""
        if (workers := self._shut()) is None:
            return
        os.write(self._leave_out, b"!")
        for worker in workers:
            worker.has_ended.wait()
        self._forkserver_client.release()
        os.close(self._leave_in)
        os.close(self._leave_out)

    def _shut(self) -> list[ProcessWorker] | None:
        """Take no more workers; those that there are, the first time."""
        with self._lock:
            before, self._is_closed = self._is_closed, True
            return None if before else list(self._workers.values())

    def _look_after(
        self, worker: ProcessWorker, watcher: Watcher, begin: Callable[[ProcessWorker], None]
    ) -> None:
        with self._lock:
            if self._is_closed:
                raise ClosedError("launcher must be open, got a call after close")
            if worker.spec.worker_id in self._workers:
                raise ConfigError(
                    f"worker_id must be new, got {worker.spec.worker_id!r}: it is running"
                )
            self._workers[worker.spec.worker_id] = worker
        worker.thread = threading.Thread(
            target=self._life,
            args=(worker, watcher, begin),
            name=f"hearth-launch {worker.spec.worker_id}",
            daemon=True,
        )
        worker.thread.start()

    def _life(
        self, worker: ProcessWorker, watcher: Watcher, begin: Callable[[ProcessWorker], None]
    ) -> None:
        """Follow a worker from its start to its end; runs on a thread of its own."""
        try:
            report = self._follow(worker, watcher, begin)
        except Exception as error:  # the boundary: its watcher must hear of it
            if not isinstance(error, HearthError):
                logger.exception("worker %s could not be followed", worker.spec.worker_id)
            report = ExitReport(reason=f"could not start: {error}")
        with self._lock:
            self._workers.pop(worker.spec.worker_id, None)
        is_asked = worker.is_stopping
        worker.has_begun.set()
        worker.has_ended.set()
        if report is not None and not is_asked:
            logger.warning("worker %s %s", worker.spec.worker_id, report.describe())
            _tell(lambda: watcher.failed(worker, report))

    def _follow(
        self, worker: ProcessWorker, watcher: Watcher, begin: Callable[[ProcessWorker], None]
    ) -> ExitReport | None:
        """How the worker ended; None when this launcher leaves before."""
        begin(worker)
        worker.facts = worker.folder.read_process()
        if worker.facts is None:
            raise EngineError("the forkserver must write down the process, got nothing")
        worker.living = living = Living(worker.facts.process)
        worker.has_begun.set()
        start_s = time.monotonic()
        while not (has_ended := living.wait(_LOOK_S)) and not self._leaves():
            if worker.folder.ready.exists():
                logger.info(
                    "worker %s answers, %.2f s after its fork",
                    worker.spec.worker_id,
                    time.monotonic() - start_s,
                )
                if not worker.is_stopping:
                    _tell(lambda: watcher.ready(worker))
                has_ended = self._outlive(worker, living)
                break
        if not has_ended:
            return None
        worker.folder.wait_for_exit(worker.facts.forkserver)
        remove_socket(Path(worker.facts.socket))
        return worker.folder.report("ended after its forkserver, so that nobody saw how")

    def _outlive(self, worker: ProcessWorker, living: Living) -> bool:
        """Wait for its end, and let it know until then that it is no orphan; False on leaving."""
        assert worker.facts is not None, "it has a process"
        every_s = self._orphan_timeout_s / 3 if self._orphan_timeout_s is not None else None
        health_path = ENTRIES[type(worker.spec)][1] or "/healthz"
        while not (has_ended := living.wait(every_s, wake=self._leave_in)) and not self._leaves():
            ping(worker.facts.socket, health_path)
        return has_ended

    def _leaves(self) -> bool:
        return bool(select.select([self._leave_in], [], [], 0)[0])

    def _fork(self, worker: ProcessWorker) -> None:
        left = worker.folder.read_process()
        if left is not None and left.process.is_alive():
            logger.warning(
                "worker %s: process %d of an earlier launcher, which nobody has adopted, is ended",
                worker.spec.worker_id,
                left.process.pid,
            )
            end(Living(left.process), _STRAY_GRACE_S)
            worker.folder.wait_for_exit(left.forkserver)
        # How an earlier worker of that id ended is no news of this one.
        worker.folder.prepare()
        if worker.is_stopping:
            raise ClosedError("it was stopped before it began")
        self._forkserver_client.fork(self._task(worker.spec.worker_id, worker.spec))

    def _task(self, worker_id: str, spec: WorkerSpec | ExportSpec) -> Task:
        entry, health_path = ENTRIES[type(spec)]
        arguments = asdict(spec)
        arguments.pop("worker_id", None)
        threads = arguments.pop("threads", None)
        is_worker = not isinstance(spec, ExportSpec)
        return Task(
            worker_id=worker_id,
            entry=entry,
            health_path=health_path,
            arguments={**arguments, "buckets": str(self._bucket_root)},
            threads=threads,
            thread_board=str(self._thread_board) if is_worker else None,
            gpu_board=str(self._gpu_board) if is_worker else None,
            device=device_of(spec) if is_worker else None,
            working_dir=str(Path.cwd()),
            dies_with_parent=self._die_with_parent,
            orphan_timeout_s=self._orphan_timeout_s,
        )

    def _bucket(self, bucket: str) -> Path:
        return self._bucket_root / _checked(bucket, "bucket")


def _tell(news: Callable[[], None]) -> None:
    try:
        news()
    except Exception:  # the boundary: a watcher's failure must not end the watching
        logger.exception("a watcher failed")


def _checked(name: str, field: str) -> str:
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{field} must be letters, digits, '.', '_' and '-', got {name!r}: it names a folder"
        )
    return name
