"""The first and the last that a forked process does: leave its parent behind, build, serve, report.

Runs in a copy of the forkserver, which has imported what the work needs and has one thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import io
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from hearth.errors import EngineError, HearthError
from hearth.launch.app_server import serve_app
from hearth.launch.gpus import GpuBoard, WorkerGpus, own_gpu, visible_gpus
from hearth.launch.phase import PhaseFile
from hearth.launch.records import WorkerFolder, write_json
from hearth.launch.sidecars import LocalSidecars
from hearth.telemetry import setup_logging
from hearth.threads import ThreadBudget

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1


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
    """Where the app says that it is well; None: there is no app."""
    working_dir: str
    threads: int | None = None
    """CPU threads, always; None: a share of all, by the ``thread_board``."""
    thread_board: str | None = None
    gpu_board: str | None = None
    """Where a platform's processes say which GPU they use; None: somebody else assigns them."""
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
        _work(task, folder, socket)
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
    log = os.open(folder.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # What was printed before a SIGKILL is in the log, too.
        sys.stdout.reconfigure(line_buffering=True)
    faulthandler.enable()
    os.chdir(task.working_dir)


def _work(task: Task, folder: WorkerFolder, socket: Path) -> None:
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    setup_logging()
    phase = PhaseFile(folder.phase)
    phase("starting")
    note = use_threads(task)

    def on_phase(name: str) -> None:
        phase(name)
        note(name)

    sidecars: LocalSidecars | None = None
    try:
        sidecars = LocalSidecars(folder.path / "sidecars", gpus=_gpus_of(task))
        also = {} if task.health_path is None else {"sidecars": sidecars}
        module, _, name = task.entry.partition(":")
        entry: Callable[..., Any] = getattr(importlib.import_module(module), name)
        made = entry(**task.arguments, on_phase=on_phase, **also)
    except Exception as error:
        if sidecars is not None:
            sidecars.close()
        write_json(folder.failure, failure_of(error))
        raise
    if task.health_path is None:
        return
    app, close = made
    # Of a trainer there is none.
    failed: Future[EngineError] | None = getattr(app.state, "failed", None)
    if failed is not None:
        failed.add_done_callback(lambda _: os.kill(os.getpid(), signal.SIGTERM))

    def ready() -> None:
        logger.info("worker %s answers", task.worker_id)
        folder.ready.touch()

    try:
        serve_app(
            app,
            socket,
            health_path=task.health_path,
            orphan_timeout_s=task.orphan_timeout_s,
            on_ready=ready,
        )
    finally:
        logger.info("worker %s closes", task.worker_id)
        close()
        sidecars.close()
    if failed is not None and failed.done():
        raise failed.result()


def _gpus_of(task: Task) -> WorkerGpus | None:
    """What this worker and its sidecars compute on; from now on it sees no other worker's."""
    if task.gpu_board is None:
        return None
    # Before anything asks CUDA, and before this process sees less than the machine has.
    board = GpuBoard(Path(task.gpu_board), visible_gpus())
    own = own_gpu(board, task.device, alone=True)
    if own:
        logger.info("worker %s: GPU %s of %s", task.worker_id, own[0], ", ".join(board.gpus))
    return WorkerGpus(board, own)


def use_threads(task: Task) -> Callable[[str], None]:
    """Set how many threads an operation may use; returns who wants to be told of each phase."""
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


def failure_of(error: Exception) -> dict[str, Any]:
    """What a worker's ``failure.json`` says of the error that kept it from starting."""
    text = " ".join(str(error).split())
    if not isinstance(error, HearthError):
        text = f"{type(error).__name__}: {text}"
    code = error.code if isinstance(error, HearthError) else HearthError.code
    return {"code": code, "message": text, "reason": f"could not start: {text}"}
