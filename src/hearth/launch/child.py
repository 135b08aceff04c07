"""What a forked process does: leave its parent behind, build its worker, serve it, report its end.

It is a copy of the forkserver, which has imported what the work needs and has one thread. Actors of
the ``ray`` placement share some of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from hearth.errors import EngineError, HearthError, StorageError
from hearth.launch.app_server import serve_app
from hearth.launch.gpus import GpuBoard, WorkerGpus, own_gpu, visible_gpus
from hearth.launch.heartbeat import Heartbeat
from hearth.launch.records import PhaseFile, WorkerFolder, write_json
from hearth.launch.sidecars import LocalSidecars
from hearth.telemetry import setup_logging
from hearth.threads import RESTING, ThreadBudget

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.0005
_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a child is to do. JSON in both directions."""

    worker_id: str
    entry: str
    """``module:function``. Called with ``arguments`` and ``on_phase``; of a worker also with its
    ``sidecars``, and it returns the app and a function that closes it. Otherwise it does all
    there is to do."""
    arguments: dict[str, Any]
    health_path: str | None
    """Where the app reports its health; None: there is no app."""
    working_dir: str
    threads: int | None = None
    """CPU threads, always; None: a share of all, by the ``thread_board``."""
    thread_board: str | None = None
    gpu_board: str | None = None
    """Where a platform's processes write which GPU they use; None: Ray assigns them."""
    device: str | None = None
    """``cuda`` or ``cuda:N`` where the worker itself computes on a GPU if there is one."""
    dies_with_parent: bool = False
    orphan_timeout_s: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain containers."""
        return asdict(self)


def run_task(
    task: Task, folder: WorkerFolder, socket: Path, inherited: Sequence[int], parent: int
) -> NoReturn:
    """Do a task from the fork on; the process ends here.

    ``inherited`` are the parent's own descriptors, which are closed. SIGTERM is blocked when this
    is called: at the fork it still has the parent's handler.
    """
    code = 1
    try:
        _leave_parent(task, folder, inherited, parent)
        _run_entry(task, folder, socket)
        code = 0
    except HearthError as error:
        logger.error("worker %s ends: %s", task.worker_id, error)
    except BaseException:  # the boundary: whatever it was, the log has it and the code says so
        logger.exception("worker %s ends", task.worker_id)
    finally:
        with contextlib.suppress(BaseException):
            socket.unlink(missing_ok=True)
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
        # Not sys.exit: that would unwind into the forkserver's own frames.
        os._exit(code)


def _leave_parent(task: Task, folder: WorkerFolder, inherited: Sequence[int], parent: int) -> None:
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Until there is a server to stop there is nothing to close or to save.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    if task.dies_with_parent:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)
    for descriptor in inherited:
        os.close(descriptor)
    # A forkserver that dies before it has written this process down leaves it to nobody.
    while (facts := folder.read_process()) is None or facts.process.pid != os.getpid():
        if os.getppid() != parent:
            os._exit(0)
        time.sleep(_POLL_S)
    open_log(folder.log)
    os.chdir(task.working_dir)


def _run_entry(task: Task, folder: WorkerFolder, socket: Path) -> None:
    on_phase = start_phases(task, folder)
    sidecars: LocalSidecars | None = None
    try:
        sidecars = LocalSidecars(folder.path / "sidecars", gpus=_assign_gpus(task))
        options = {} if task.health_path is None else {"sidecars": sidecars}
        result = load_entry(task.entry)(**task.arguments, on_phase=on_phase, **options)
    except Exception as error:
        if sidecars is not None:
            sidecars.close()
        write_json(folder.failure, describe_failure(error))
        raise
    if task.health_path is None:
        return
    app, close = result

    def report_ready() -> None:
        logger.info("worker %s answers", task.worker_id)
        folder.ready.touch()

    try:
        serve_app(
            app,
            socket,
            health_path=task.health_path,
            orphan_timeout_s=task.orphan_timeout_s,
            on_ready=report_ready,
        )
    except EngineError as error:
        with contextlib.suppress(StorageError):  # its disk may be what it ends of
            write_json(folder.failure, describe_failure(error, "ended"))
        raise
    finally:
        logger.info("worker %s closes", task.worker_id)
        close()
        sidecars.close()


def _assign_gpus(task: Task) -> WorkerGpus | None:
    """What this worker and its sidecars compute on; from now on it sees no other worker's."""
    if task.gpu_board is None:
        return None
    # Before anything asks CUDA, and before this process sees less than the machine has.
    board = GpuBoard(Path(task.gpu_board), visible_gpus())
    own = own_gpu(board, task.device, alone=True)
    if own:
        logger.info("worker %s: GPU %s of %s", task.worker_id, own[0], ", ".join(board.gpus))
    return WorkerGpus(board, own)


def open_log(log: Path) -> None:
    """Make ``log`` the output of this process, and log into it."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for number in (1, 2):
        os.dup2(descriptor, number)
    os.close(descriptor)
    # In the place of Ray's; line by line, so that a SIGKILL loses nothing that was printed.
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable()
    logging.basicConfig(level=logging.WARNING, format=_LOG_FORMAT, force=True)
    setup_logging()


def load_entry(entry: str) -> Callable[..., Any]:
    """The function of a task's ``entry``."""
    module, _, name = entry.partition(":")
    return getattr(importlib.import_module(module), name)


def start_phases(task: Task, folder: WorkerFolder) -> Callable[[str], None]:
    """Divide the machine's threads; returns what is to be called with the name of each phase."""
    phase_file, heartbeat = PhaseFile(folder.phase), Heartbeat(folder.heartbeat, RESTING)
    phase_file("starting")
    set_share = _use_threads(task)

    def on_phase(name: str) -> None:
        phase_file(name)
        heartbeat.note_phase(name)
        set_share(name)

    return on_phase


def _use_threads(task: Task) -> Callable[[str], None]:
    """Set how many threads an operation may use; returns what changes it with each phase."""
    # The forkserver has imported it; a process that only launches workers never does.
    import torch

    name, pid = task.worker_id, os.getpid()
    if task.threads is None and task.thread_board is not None:
        budget = ThreadBudget(board=Path(task.thread_board))
        logger.info("worker %s: process %d, its share of %d threads", name, pid, budget.total)
        return budget.add_member().note
    if task.threads is not None:
        # For the processes that the worker itself may start.
        os.environ["OMP_NUM_THREADS"] = str(task.threads)
        torch.set_num_threads(task.threads)
    logger.info("worker %s: process %d, %d threads", name, pid, torch.get_num_threads())
    return lambda name: None


def describe_failure(error: Exception, what: str = "could not start") -> dict[str, Any]:
    """The ``failure.json`` of an error that kept a worker from starting, or from going on."""
    text = " ".join(str(error).split())
    if not isinstance(error, HearthError):
        text = f"{type(error).__name__}: {text}"
    code = error.code if isinstance(error, HearthError) else HearthError.code
    return {"code": code, "message": text, "reason": f"{what}: {text}"}
