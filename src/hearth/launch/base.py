"""What launchers of workers outside this process share: a thread follows each worker to its end."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic, TypeVar

from hearth.errors import (
    ClosedError,
    ConfigError,
    EngineError,
    HearthError,
    NotFoundError,
    StorageError,
)
from hearth.launch.child import Task
from hearth.launch.spec import (
    DeploymentSpec,
    ExitReport,
    ExportSpec,
    SnapshotRecord,
    TrainerSpec,
    Watcher,
    Worker,
    WorkerSpec,
)
from hearth.objects import SCHEME, SERVED, ObjectFolder

logger = logging.getLogger(__name__)

ENTRIES: dict[type, tuple[str, str | None]] = {
    TrainerSpec: ("hearth.trainer.worker:build", "/api/v1/healthz"),
    DeploymentSpec: ("hearth.inference.worker:build", "/healthz"),
    ExportSpec: ("hearth.trainer.worker:export", None),
}
"""What each kind of worker runs, and where its app says that it is well."""
_MOST_EXPORTS = 3
_TELL_AGAIN_S = 0.5


class BaseWorker(Worker):
    """A worker outside this process, as its launcher has it.

    ``stop`` ends it with SIGKILL where that takes longer than ``grace_s``.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.is_stopping = False
        self.has_ended = threading.Event()
        """Set when it has no process any more, and nobody reads its folder."""
        self.thread: threading.Thread | None = None
        """Follows it and calls its watcher."""

    def wait_for_end(self) -> None:
        """Wait until it has ended, except on the thread that follows it: a watcher may stop it."""
        if threading.current_thread() is not self.thread:
            self.has_ended.wait()


W = TypeVar("W", bound=BaseWorker)


class BaseLauncher(ABC, Generic[W]):
    """Workers outside this process, with their folders under ``data_dir``.

    With ``die_with_parent`` every worker ends with this process. Otherwise workers run on after
    this process has died, for a later launcher with the same ``data_dir`` to adopt, and end
    themselves when they have answered no request for ``orphan_timeout_s``. Snapshots are in
    ``data_dir`` as well, or where ``snapshot_store`` is a URL.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        die_with_parent: bool,
        orphan_timeout_s: float,
        snapshot_store: str = "folder",
    ) -> None:
        if not orphan_timeout_s > 0:
            raise ConfigError(f"orphan_timeout_s must be > 0, got {orphan_timeout_s}")
        self._root = data_dir.expanduser().resolve()
        self._workers_dir = self._root / "workers"
        self._bucket_root = str(self._root / "buckets")
        self._objects: ObjectFolder | None = None
        if snapshot_store.startswith(SCHEME):
            self._bucket_root = snapshot_store
            self._objects = ObjectFolder(snapshot_store)
            self._objects.check()
        self._die_with_parent = die_with_parent
        self._orphan_timeout_s = None if die_with_parent else orphan_timeout_s
        self._workers: dict[str, W] = {}
        self._lock = threading.Lock()
        self._is_closed = False
        self._leaves = threading.Event()
        """Set when workers are no longer to be followed, but run on."""

    def snapshots(self, bucket: str) -> list[SnapshotRecord]:
        """What a bucket holds, oldest first; a folder without a readable manifest is none."""
        if self._objects is not None:
            records = read_objects(self._objects, bucket)
        else:
            records = [
                record
                for path in Path(self._bucket_root, bucket).glob("*/manifest.json")
                # Drafts and what is being removed begin with a dot.
                if not path.parent.name.startswith(".")
                and (record := _read_folder(path)) is not None
            ]
        return sorted(
            records, key=lambda record: (record.number, record.created_s, record.identity)
        )

    def forget_served(self, deployment_id: str) -> None:
        """As ``Launcher.forget_served``."""
        if self._objects is not None:
            self._objects.remove(f"{SERVED}/{deployment_id}")

    def export(self, spec: ExportSpec) -> None:
        """Write a snapshot as a model folder, in a process of its own; as ``Launcher.export``.

        A process that is killed is replaced, twice at most: its folder is complete or not there.
        """
        for left in reversed(range(_MOST_EXPORTS)):
            death = self._export_once(spec)
            # How a process ended is unknown where its forkserver was killed, too.
            if death is None or Path(spec.folder).exists():
                return
            if not left or self._is_closed:
                raise EngineError(f"export of {spec.identity!r} must end well, got: {death}")
            logger.warning("snapshot %s is exported again: %s", spec.identity, death)

    def close(self) -> None:
        """Stop every worker, the newest first, and then what they were started with."""
        if (workers := self._shut()) is None:
            return
        for worker in reversed(workers):
            worker.stop()
        self._disconnect()

    def release(self) -> None:
        """Let the workers run on; a launcher that is made later on the same folder adopts them."""
        if (workers := self._shut()) is None:
            return
        self._leaves.set()
        for worker in workers:
            worker.has_ended.wait()
        self._disconnect()

    @abstractmethod
    def _export_once(self, spec: ExportSpec) -> str | None:
        """Export in one process; returns what killed it, None where it ended well.

        Raises:
            NotFoundError: there is no such snapshot any more.
            EngineError: it cannot be read or written.
        """

    @abstractmethod
    def _follow(self, worker: W, watcher: Watcher) -> ExitReport | None:
        """Start a worker that has no process yet, and wait for its end.

        Returns how it ended; None where this launcher leaves before. May raise.
        """

    @abstractmethod
    def _disconnect(self) -> None:
        """Give up what workers are started with; it may run on where the launcher ``_leaves``."""

    def _report_error(self, worker: W, error: Exception) -> ExitReport | None:
        """How a worker ended that ``_follow`` raised for."""
        if not isinstance(error, HearthError):
            logger.error("worker %s could not be followed", worker.spec.worker_id, exc_info=error)
        return ExitReport(reason=f"could not start: {error}")

    def _clean_up(self, worker: W) -> None:
        """Free what was reserved for a worker that has ended."""

    def _shut(self) -> list[W] | None:
        """Take no more workers; returns those that there are, the first time."""
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
            return None if was_closed else list(self._workers.values())

    def _look_after(self, worker: W, watcher: Watcher) -> None:
        """Follow a worker on a thread of its own.

        Raises:
            ClosedError: the launcher was closed.
            ConfigError: a worker of that id runs.
        """
        worker_id = worker.spec.worker_id
        with self._lock:
            if self._is_closed:
                raise ClosedError("launcher must be open, got a call after close")
            if worker_id in self._workers:
                raise ConfigError(f"worker_id must be new, got {worker_id!r}: it is running")
            self._workers[worker_id] = worker
        worker.thread = threading.Thread(
            target=self._follow_to_end,
            args=(worker, watcher),
            name=f"hearth-launch {worker_id}",
            daemon=True,
        )
        worker.thread.start()

    def _follow_to_end(self, worker: W, watcher: Watcher) -> None:
        """Follow a worker and tell its watcher; runs on a thread of its own."""
        try:
            report = self._follow(worker, watcher)
        except Exception as error:  # noqa: BLE001 - the boundary: its watcher must hear of it
            report = self._report_error(worker, error)
        self._clean_up(worker)
        with self._lock:
            self._workers.pop(worker.spec.worker_id, None)
        was_stopped = worker.is_stopping
        worker.has_ended.set()
        if report is not None and not was_stopped:
            logger.warning("worker %s %s", worker.spec.worker_id, report.describe())
            tell_watcher(lambda: watcher.failed(worker, report), lambda: self._is_closed)

    def _report_ready(self, worker: W, watcher: Watcher, start_s: float) -> None:
        """Log and tell that a worker answers, which was started at ``start_s``."""
        took_s = time.monotonic() - start_s
        logger.info("worker %s answers, %.2f s after its start", worker.spec.worker_id, took_s)
        if not worker.is_stopping:
            tell_watcher(
                lambda: watcher.ready(worker), lambda: worker.is_stopping or self._is_closed
            )

    def _make_task(self, worker_id: str, spec: WorkerSpec | ExportSpec, **options: Any) -> Task:
        """What a worker's process is to do."""
        entry, health_path = ENTRIES[type(spec)]
        arguments: dict[str, Any] = asdict(spec) | {"buckets": self._bucket_root}
        arguments.pop("worker_id", None)
        threads = arguments.pop("threads", None)
        return Task(
            worker_id=worker_id,
            entry=entry,
            arguments=arguments,
            health_path=health_path,
            working_dir=str(Path.cwd()),
            threads=threads,
            orphan_timeout_s=self._orphan_timeout_s,
            **options,
        )


def raise_failure(failure: dict[str, Any] | None) -> None:
    """Raise what kept an export from being written, as ``failure.json`` has it."""
    if failure is not None:
        kind = NotFoundError if failure.get("code") == NotFoundError.code else EngineError
        raise kind(str(failure.get("message")))


def tell_watcher(call: Callable[[], None], is_over: Callable[[], bool]) -> None:
    """Tell a watcher some news; again until it could write them down, or nobody asks any more.

    News of an end that got lost would leave a dead worker ready for good.
    """
    is_said = False
    while not is_over():
        try:
            call()
            return
        except StorageError as error:
            if not is_said:
                logger.error("a watcher is told again until it can write: %s", error)
            is_said = True
            time.sleep(_TELL_AGAIN_S)
        except Exception:  # the boundary: a watcher's failure must not end the watching
            logger.exception("a watcher failed")
            return


def _read_folder(manifest: Path) -> SnapshotRecord | None:
    """A snapshot by its manifest, read without torch; None without a readable one."""
    try:
        num_bytes = sum(path.stat().st_size for path in manifest.parent.iterdir())
        return _read_record(manifest.read_bytes(), num_bytes, manifest.stat().st_mtime)
    except OSError:
        return None


def read_objects(objects: ObjectFolder, bucket: str) -> list[SnapshotRecord]:
    """The snapshots of a bucket in an object store."""
    listed = objects.list(bucket)
    sizes: dict[str, int] = {}
    for path, facts in listed.items():
        folder = path.rpartition("/")[0]
        sizes[folder] = sizes.get(folder, 0) + facts.num_bytes
    records: list[SnapshotRecord] = []
    for folder, num_bytes in sizes.items():
        if (path := f"{folder}/manifest.json") not in listed:
            continue  # it is being uploaded or removed
        with contextlib.suppress(FileNotFoundError):
            if (record := _read_record(objects.read(path), num_bytes)) is not None:
                records.append(record)
    return records


def _read_record(manifest: bytes, num_bytes: int, changed_s: float = 0.0) -> SnapshotRecord | None:
    """A snapshot by its manifest; None if that cannot be read."""
    try:
        content = json.loads(manifest)
        if content["kind"] not in ("base", "delta", "lora"):
            return None
        return SnapshotRecord(
            identity=content["identity"],
            kind=content["kind"],
            base_model=content["base_model"],
            created_s=content.get("created_s") or changed_s,
            num_bytes=num_bytes,
            number=int(content.get("number", 0)),
        )
    except (ValueError, KeyError, TypeError):
        return None
