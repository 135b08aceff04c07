"""Workers as threads of this process, reached through memory.

Each has its engine, its own thread and its own ASGI app, the very ones that a process of its own
would run. What they exchange (snapshots) stays in memory.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import Any

from starlette.applications import Starlette

import hearth.inference.worker as inference_worker
import hearth.trainer.worker as trainer_worker
from hearth.errors import ClosedError, EngineError, HearthError
from hearth.launch.base import tell_watcher
from hearth.launch.gpus import GpuBoard, WorkerGpus, device_of, own_gpu, visible_gpus
from hearth.launch.sidecars import LocalSidecars
from hearth.launch.spec import (
    Endpoint,
    ExitReport,
    ExportSpec,
    Placement,
    SnapshotRecord,
    TrainerSpec,
    Watcher,
    WorkerSpec,
)
from hearth.sync.store import MemoryBuckets
from hearth.threads import ThreadBudget
from hearth.wire.asgi import App

logger = logging.getLogger(__name__)

_NOT_INLINE = ("worker_id", "threads")
"""What only matters to a process of its own."""


class InlineWorker:
    """One trainer or deployment inside this process (``Worker``)."""

    def __init__(
        self,
        spec: WorkerSpec,
        buckets: MemoryBuckets,
        watcher: Watcher,
        budget: ThreadBudget,
        sidecars: LocalSidecars,
    ) -> None:
        self.spec = spec
        self.pid = None
        self._threads = budget.add_member()
        self._sidecars = sidecars
        self._buckets = buckets
        self._watcher = watcher
        self.phase = "starting"
        """What it does now."""
        self._app: App | None = None
        self._close: Callable[[], None] | None = None
        self._stopping = threading.Event()
        self.has_ended = threading.Event()
        """Set once it holds no engine any more."""
        self._thread = threading.Thread(
            target=self._start, name=f"hearth-start-{spec.worker_id}", daemon=True
        )

    @property
    def endpoint(self) -> Endpoint:
        """The app, once it is ready."""
        return Endpoint(app=self._app)

    def begin(self) -> None:
        """Load the model in a thread of its own, and call the watcher."""
        self._thread.start()

    def record(self) -> dict[str, Any]:
        """Names the worker only: a thread does not outlive its process."""
        return {"worker_id": self.spec.worker_id, "placement": "inline"}

    def stop(self, grace_s: float = 5.0) -> None:
        """Close the engine after the operation that it runs, however long that takes."""
        self._stopping.set()
        with contextlib.suppress(RuntimeError):  # never begun, or called by itself
            self._thread.join()
        # A reference to the worker must not keep its weights in memory.
        close, self._close, self._app = self._close, None, None
        if close is not None:
            close()
        self._sidecars.close()
        self._threads.leave()
        self.has_ended.set()

    def _start(self) -> None:
        try:
            app, self._close = _build(self.spec, self._buckets, self._sidecars, self._set_phase)
            self._app = app
        except Exception as error:  # the boundary: its watcher must hear of it
            if not isinstance(error, HearthError):
                logger.exception("worker %s did not start", self.spec.worker_id)
            self._sidecars.close()
            self._threads.leave()
            self.has_ended.set()
            report = ExitReport(reason=f"could not start: {error}")
            tell_watcher(lambda: self._watcher.failed(self, report), self._stopping.is_set)
            return
        tell_watcher(lambda: self._watcher.ready(self), self._stopping.is_set)
        # A trainer's app has no such future.
        failed: Future[EngineError] | None = getattr(app.state, "failed", None)
        if failed is not None:
            failed.add_done_callback(self._fail)

    def _fail(self, failed: Future[EngineError]) -> None:
        """Report an engine that cannot go on, and close it on a thread of its own."""

        def end() -> None:
            if not self._stopping.is_set():
                self.stop()
                report = ExitReport(reason=f"ended: {failed.result()}")
                tell_watcher(lambda: self._watcher.failed(self, report), lambda: False)

        threading.Thread(target=end, name=f"hearth-end-{self.spec.worker_id}", daemon=True).start()

    def _set_phase(self, phase: str) -> None:
        self.phase = phase
        self._threads.note(phase)


class InlineLauncher:
    """Starts workers inside this process (``Launcher``).

    What they start themselves writes its logs under ``data_dir``.
    """

    placement: Placement = "inline"

    def __init__(self, data_dir: Path) -> None:
        self._workers_dir = data_dir / "workers"
        self._buckets = MemoryBuckets()
        self._budget = ThreadBudget()
        self._gpus = GpuBoard(data_dir / "gpus", visible_gpus())
        self._workers: list[InlineWorker] = []
        self._lock = threading.Lock()
        self._is_closed = False

    def start(self, spec: WorkerSpec, watcher: Watcher) -> InlineWorker:
        """Begin to load a worker's model.

        Raises:
            ClosedError: the launcher was closed.
            ConfigError: there is no GPU of the number that its device has.
        """
        gpus = WorkerGpus(self._gpus, own_gpu(self._gpus, device_of(spec), alone=False))
        sidecars = LocalSidecars(self._workers_dir / spec.worker_id / "sidecars", gpus=gpus)
        worker = InlineWorker(spec, self._buckets, watcher, self._budget, sidecars)
        with self._lock:
            if self._is_closed:
                raise ClosedError("launcher must be open, got a call after close")
            running = [worker for worker in self._workers if not worker.has_ended.is_set()]
            self._workers = [*running, worker]
        worker.begin()
        return worker

    def adopt(self, record: dict[str, Any], watcher: Watcher) -> ExitReport:
        """An inline worker never outlives the process that it ran in."""
        return ExitReport(reason="it ran inside a process that has ended")

    def export(self, spec: ExportSpec) -> None:
        """Write a snapshot as a model folder.

        Raises:
            NotFoundError: there is no such snapshot any more.
            EngineError: it cannot be read or written.
        """
        trainer_worker.export(**asdict(spec), buckets=self._buckets, on_phase=logger.debug)

    def snapshots(self, bucket: str) -> list[SnapshotRecord]:
        """What a bucket holds, oldest first."""
        return [
            SnapshotRecord(
                identity=snapshot.identity,
                kind=snapshot.kind,
                created_s=snapshot.created_s,
                base_model=snapshot.base_model,
                num_bytes=sum(tensor.nbytes for tensor in snapshot.tensors.values()),
            )
            for snapshot in self._buckets.bucket(bucket).snapshots()
        ]

    def forget_served(self, deployment_id: str) -> None:
        """Inline deployments write down nothing."""

    def log_path(self, worker_id: str) -> None:
        """Inline workers write into the log of their process."""

    def close(self) -> None:
        """Stop every worker, the newest first."""
        with self._lock:
            self._is_closed = True
            workers, self._workers = self._workers, []
        for worker in reversed(workers):
            worker.stop()


def _build(
    spec: WorkerSpec,
    buckets: MemoryBuckets,
    sidecars: LocalSidecars,
    on_phase: Callable[[str], None],
) -> tuple[Starlette, Callable[[], None]]:
    fields = {name: value for name, value in asdict(spec).items() if name not in _NOT_INLINE}
    if isinstance(spec, TrainerSpec):
        return trainer_worker.build(**fields, buckets=buckets, sidecars=sidecars, on_phase=on_phase)
    # What a thread served dies with its process, so that there is nothing to remember.
    return inference_worker.build(
        **{**fields, "state_dir": None}, buckets=buckets, sidecars=sidecars, on_phase=on_phase
    )
