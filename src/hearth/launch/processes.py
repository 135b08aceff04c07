"""The ``process`` placement: each trainer and each deployment a process of its own.

    launcher --asks--> forkserver --forks--> worker --answers at--> its Unix socket

The launcher watches every worker itself, through a descriptor of its process. It notices an end
within milliseconds, whether or not the forkserver is still alive. Whatever it has to know again
after a restart is in the workers' folders (``hearth.launch.records``). It imports no torch.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import secrets
import shutil
import signal
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from hearth.errors import ClosedError, ConfigError, EngineError
from hearth.launch.base import ENTRIES, BaseLauncher, BaseWorker, raise_failure
from hearth.launch.forkserver_client import ForkserverClient, ForkserverLostError
from hearth.launch.gpus import device_of
from hearth.launch.heartbeat import HangDetector
from hearth.launch.records import (
    ProcessFacts,
    ProcessHandle,
    WorkerFolder,
    read_json,
    remove_socket_folder,
    write_json,
)
from hearth.launch.spec import (
    Endpoint,
    ExitReport,
    ExportSpec,
    Placement,
    SnapshotRecord,
    TrainerSpec,
    Watcher,
    WorkerSpec,
    spec_as_dict,
    spec_from_dict,
)

logger = logging.getLogger(__name__)

# By name: a launcher does not import what it launches. peft is imported where it is
# used, and here once for all processes that are forked.
WORKER_MODULES = ("hearth.trainer.worker", "hearth.inference.worker", "hearth.models.peft_import")
_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]{0,160}")
_POLL_S = 0.01
"""How often a starting worker's folder is looked at."""
_RELEASE_POLL_S = 0.2
"""How soon ``release`` is noticed by what follows a worker; an end is noticed at once."""
_STRAY_GRACE_S = 2.0
_MOST_FORKS = 3
_STACKS_S = 1.0
"""How long a worker that hangs may take to write where its threads are."""
_KILLED_S = 10.0
"""How long a killed process may take to end; after it a driver or a disk holds it in the kernel."""
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
    """End a process; False when it had to be killed, or cannot end at all."""
    handle.send(signal.SIGTERM)
    if handle.wait(grace_s):
        return True
    _kill(handle)
    return False


def _kill(handle: ProcessHandle) -> bool:
    """Kill a process and what it started; False where the kernel does not let it end."""
    handle.kill_group()
    has_ended = handle.wait(_KILLED_S)
    if not has_ended:
        logger.error(
            "process %d must end when it is killed, but a driver or a disk holds it: its memory "
            "and its GPU are free only after that, or after a restart of the machine",
            handle.identity.pid,
        )
    return has_ended


def ping(path: str, health_path: str) -> None:
    """Request a worker's health, so that it does not count as an orphan; ignores the answer."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_PING_TIMEOUT_S)
        connection.connect(path)
        request = f"GET {health_path} HTTP/1.1\r\nhost: worker\r\nconnection: close\r\n\r\n"
        connection.sendall(request.encode())
        connection.recv(1024)


class ProcessLauncher(BaseLauncher[ProcessWorker]):
    """A ``Launcher``: workers as processes.

    ``preload`` are the modules whose import a start does not have to wait for.
    """

    placement: Placement = "process"

    def __init__(
        self,
        data_dir: Path,
        *,
        die_with_parent: bool = False,
        orphan_timeout_s: float = 900.0,
        snapshot_store: str = "folder",
        preload: Sequence[str] = WORKER_MODULES,
    ) -> None:
        if not hasattr(os, "pidfd_open"):
            raise ConfigError(
                "placement must be 'inline' on this system, got 'process': it needs Linux 5.3"
            )
        super().__init__(
            data_dir,
            die_with_parent=die_with_parent,
            orphan_timeout_s=orphan_timeout_s,
            snapshot_store=snapshot_store,
        )
        self._forkserver_client = ForkserverClient(
            self._root, preload=preload, die_with_parent=die_with_parent
        )

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
        worker = ProcessWorker(spec, self._folder(spec.worker_id))
        self._look_after(worker, watcher)
        return worker

    def adopt(self, record: dict[str, Any], watcher: Watcher) -> ProcessWorker | ExitReport:
        """As ``Launcher.adopt``; ``ready`` is called again, also where it has answered before."""
        if "spec" not in record:
            # Written down by a platform that ran its workers inline.
            return ExitReport(reason="ran inside a process that has ended")
        spec = cast("WorkerSpec", spec_from_dict(record["spec"]))
        worker = ProcessWorker(spec, self._folder(record["worker_id"]))
        facts = worker.folder.read_process()
        if facts is None or not facts.process.is_alive():
            if facts is not None:
                worker.folder.wait_for_exit(facts.forkserver)
            return worker.folder.report("was gone when the control plane came back")
        worker.attach(facts)
        self._look_after(worker, watcher)
        return worker

    def snapshots(self, bucket: str) -> list[SnapshotRecord]:
        """What a bucket holds, oldest first; a folder without a readable manifest is none."""
        return super().snapshots(_check_name(bucket, "bucket"))

    def log_path(self, worker_id: str) -> Path:
        """The file of a worker's log; it appears when the worker first starts."""
        return self._folder(worker_id).log

    def _export_once(self, spec: ExportSpec) -> str | None:
        worker_id = f"export-{secrets.token_hex(6)}"
        folder = self._folder(worker_id)
        try:
            facts = self._fork(worker_id, spec)
            ProcessHandle(facts.process).wait(None)
            folder.wait_for_exit(facts.forkserver)
            failure = read_json(folder.failure)
            report = folder.report("ended, and its exit status was not recorded")
        finally:
            shutil.rmtree(folder.path, ignore_errors=True)
        raise_failure(failure)
        return None if report.code == 0 else report.describe()

    def _disconnect(self) -> None:
        if self._leaves.is_set():
            self._forkserver_client.release()
        else:
            self._forkserver_client.end()

    def _follow(self, worker: ProcessWorker, watcher: Watcher) -> ExitReport | None:
        start_s = time.monotonic()
        try:
            if worker.facts is None:
                if worker.is_stopping:
                    raise ClosedError("it was stopped before it began")
                worker.attach(self._fork(worker.spec.worker_id, worker.spec))
        finally:
            worker.has_begun.set()
        facts, handle = worker.facts, worker.handle
        assert facts is not None, "it was attached to its process"
        assert handle is not None, "like its facts"
        detector = HangDetector(worker.folder.heartbeat, facts.process, watches_work=False)
        while not (has_ended := handle.wait(_POLL_S)) and not self._leaves.is_set():
            if worker.folder.ready.exists():
                self._report_ready(worker, watcher, start_s)
                has_ended = self._wait_and_ping(worker, handle, facts.socket)
                break
            if has_ended := self._end_if_hung(worker, handle, detector):
                break
        if not has_ended:
            return None
        worker.folder.wait_for_exit(facts.forkserver)
        path = Path(facts.socket)
        path.unlink(missing_ok=True)
        if not facts.forkserver.is_alive():
            remove_socket_folder(path.parent, self._workers_dir)
        return worker.folder.report("ended after its forkserver, which records how workers end")

    def _wait_and_ping(self, worker: ProcessWorker, handle: ProcessHandle, socket: str) -> bool:
        """Wait for a worker's end, and keep it from being an orphan; False on leaving."""
        every_s = math.inf if self._orphan_timeout_s is None else self._orphan_timeout_s / 3
        health_path = ENTRIES[type(worker.spec)][1] or "/healthz"
        last_s = time.monotonic()
        detector = HangDetector(
            worker.folder.heartbeat, handle.identity, watches_work=_works_alone(worker.spec)
        )
        while not handle.wait(min(_RELEASE_POLL_S, every_s)):
            if self._leaves.is_set():
                return False
            if self._end_if_hung(worker, handle, detector):
                return True
            if time.monotonic() - last_s >= every_s:
                ping(socket, health_path)
                last_s = time.monotonic()
        return True

    def _end_if_hung(
        self, worker: ProcessWorker, handle: ProcessHandle, detector: HangDetector
    ) -> bool:
        """Kill a worker that hangs, and say whether it did.

        What it leaves behind is what a death leaves. One that the kernel does not let end counts
        as dead all the same.
        """
        hang = detector.find_hang()
        if hang is None:
            return False
        reason = f"hung, and was killed: {hang}"
        failure = {"code": EngineError.code, "message": reason, "reason": reason}
        with contextlib.suppress(OSError):  # a full disk must not keep it alive
            write_json(worker.folder.failure, failure)
        # The handler of a process that can still run one writes all stacks into its log.
        handle.send(signal.SIGABRT)
        handle.wait(_STACKS_S)
        _kill(handle)
        return True

    def _fork(self, worker_id: str, spec: WorkerSpec | ExportSpec) -> ProcessFacts:
        """Start a process. A forkserver that ends meanwhile is replaced, twice at most."""
        options: dict[str, Any] = {"dies_with_parent": self._die_with_parent}
        if not isinstance(spec, ExportSpec):
            options |= {
                "thread_board": str(self._root / "threads"),
                "gpu_board": str(self._root / "gpus"),
                "device": device_of(spec),
            }
        task = self._make_task(worker_id, spec, **options)
        folder = self._folder(worker_id)
        for left in reversed(range(_MOST_FORKS)):
            _end_stray(folder)
            # How an earlier worker of that id ended is no news of this one.
            folder.prepare()
            try:
                self._forkserver_client.fork(task)
                break
            except ForkserverLostError as error:
                if not left:
                    raise
                logger.warning("worker %s is forked again: %s", worker_id, error)
        facts = folder.read_process()
        if facts is None:
            raise EngineError("the forkserver must write down the process, got nothing")
        return facts

    def _folder(self, worker_id: str) -> WorkerFolder:
        return WorkerFolder(self._workers_dir / _check_name(worker_id, "worker_id"))


def _end_stray(folder: WorkerFolder) -> None:
    """End a process of a worker's folder that nobody follows."""
    stray = folder.read_process()
    if stray is not None and stray.process.is_alive():
        logger.warning("process %d in %s had no watcher", stray.process.pid, folder.path)
        end_process(ProcessHandle(stray.process), _STRAY_GRACE_S)
        if stray.process.is_alive():
            raise EngineError(
                f"worker's earlier process must end, got process {stray.process.pid}, which the "
                "kernel holds although it was killed: free its driver or disk, or restart the "
                "machine"
            )
        folder.wait_for_exit(stray.forkserver)


def _works_alone(spec: WorkerSpec) -> bool:
    """Whether what a worker computes is computed by its own process."""
    return spec.ranks == 1 if isinstance(spec, TrainerSpec) else spec.engine != "vllm"


def _check_name(name: str, field: str) -> str:
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{field} must be letters, digits, '.', '_' and '-', got {name!r}: it names a folder"
        )
    return name
