"""The launcher's side of the forkserver: find a living one or start one, and ask it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import hearth
from hearth.errors import ConfigError, EngineError
from hearth.launch.child import Task
from hearth.launch.forkserver import SOCKET_NAME, read_line
from hearth.launch.records import Living, ProcessId, last_lines, read_json, write_json

logger = logging.getLogger(__name__)

_LONGEST_SOCKET_PATH = 107
_ANSWER_TIMEOUT_S = 300.0
_END_GRACE_S = 5.0

ENVIRONMENT = {
    # A worker's idle threads must not take the cores from its neighbours.
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "0",
    # numpy's BLAS would start its threads on import, and a fork has only one thread.
    "OPENBLAS_NUM_THREADS": "1",
    # Asked through the driver, "is there a GPU" would start CUDA, which no fork survives.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}


class ForkserverClient:
    """One forkserver for a data folder, made when it is first needed and again when it has died.

    With ``die_with_parent`` it is this process's own and ends with it. Otherwise it outlives this
    process together with its workers, and the next one goes on with it.
    """

    def __init__(
        self, data_dir: Path, *, preload: Sequence[str], die_with_parent: bool, idle_s: float
    ) -> None:
        self.workers_dir = data_dir / "workers"
        self._facts = data_dir / "forkserver.json"
        self._log = data_dir / "forkserver.log"
        self._preload = tuple(preload)
        self._die_with_parent = die_with_parent
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._process: ProcessId | None = None
        self._folder: Path | None = None
        self._popen: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The forkserver's process; None before there is one."""
        return None if self._process is None else self._process.pid

    def warm(self) -> Path:
        """See that a forkserver lives; returns its folder. One that was just started still imports.

        Raises:
            ConfigError: the folder for its sockets has too long a path.
        """
        with self._lock:
            if self._process is not None and self._folder is not None and self._process.is_alive():
                return self._folder
            self._forget()
            return self._find() or self._begin()

    def fork(self, task: Task) -> None:
        """Have a child forked for ``task``; its folder says which process it is.

        Raises:
            EngineError: the forkserver refuses, or ended before it answered.
        """
        with self._connect() as connection:
            try:
                connection.sendall(json.dumps(task.as_dict()).encode() + b"\n")
                answer = read_line(connection)
            except OSError as error:
                raise self._unanswered(error) from None
        if answer["error"] is not None:
            raise EngineError(f"the forkserver must fork, got a refusal: {answer['error']}")

    def _connect(self) -> socket.socket:
        """A connection; to a new forkserver, where the one that there was is just ending."""
        try:
            return self._connection()
        except OSError:
            if (process := self._process) is not None:
                Living(process).wait(_END_GRACE_S)
        try:
            return self._connection()
        except OSError as error:
            raise self._unanswered(error) from None

    def _connection(self) -> socket.socket:
        path = self.warm() / SOCKET_NAME
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(_ANSWER_TIMEOUT_S)
        try:
            connection.connect(str(path))
        except OSError:
            connection.close()
            raise
        return connection

    def _unanswered(self, error: OSError) -> EngineError:
        end = " | ".join(last_lines(self._log)[-3:])
        return EngineError(f"the forkserver must answer, got {error}; its log ends with: {end}")

    def end(self) -> None:
        """End the forkserver, and whatever it still has running."""
        with self._lock:
            if self._process is None and not self._die_with_parent:
                self._find()
            process = self._process
        if process is not None and process.is_alive():
            living = Living(process)
            living.send(signal.SIGTERM)
            # It gives its workers a grace period of its own.
            if not living.wait(2 * _END_GRACE_S):
                living.kill_group()
                living.wait(None)
        with self._lock:
            self._forget()
            if not self._die_with_parent:
                self._facts.unlink(missing_ok=True)

    def release(self) -> None:
        """Let it live on."""
        with self._lock:
            # Not waited for any more, and not warned of: it is nobody's child from now on.
            if self._popen is not None:
                self._popen.returncode = self._popen.poll() or 0

    def _find(self) -> Path | None:
        """The folder of the forkserver that an earlier launcher left, if it is of use."""
        if self._die_with_parent:
            return None
        known = read_json(self._facts)
        if known is None:
            return None
        process, folder = ProcessId(known["pid"], known["started"]), Path(known["folder"])
        if not process.is_alive():
            _clear(folder)
            return None
        if known["code"] != _code_mark():
            logger.info("forkserver %d has older code and retires", process.pid)
            Living(process).send(signal.SIGUSR1)
            return None
        self._process, self._folder = process, folder
        return folder

    def _begin(self) -> Path:
        folder = _socket_folder()
        self.workers_dir.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable,
            "-m",
            "hearth.launch.forkserver",
            "--folder",
            str(folder),
            "--workers-dir",
            str(self.workers_dir),
            "--idle-s",
            str(self._idle_s),
            *(["--owner", str(os.getpid())] if self._die_with_parent else []),
            "--preload",
            *self._preload,
        ]
        with self._log.open("wb") as log:
            self._popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **ENVIRONMENT},
            )
        process = ProcessId.of(self._popen.pid)
        self._await_listening(folder)
        self._process, self._folder = process, folder
        if process is not None and not self._die_with_parent:
            facts = {"pid": process.pid, "started": process.started, "folder": str(folder)}
            write_json(self._facts, facts | {"code": _code_mark()})
        logger.info("forkserver %d starts", self._popen.pid)
        return folder

    def _await_listening(self, folder: Path) -> None:
        assert self._popen is not None, "it was just started"
        while not (folder / SOCKET_NAME).exists():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(0.01)
                _clear(folder)
                raise EngineError(
                    "the forkserver must start, got an early end; its log ends with: "
                    f"{' | '.join(last_lines(self._log)[-3:])}"
                )

    def _forget(self) -> None:
        if self._popen is not None:
            self._popen.poll()
        if self._folder is not None:
            _clear(self._folder)
        self._process = self._folder = self._popen = None


def _socket_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="hearth-"))
    longest = len(str(folder)) + 1 + len(SOCKET_NAME)
    if longest > _LONGEST_SOCKET_PATH:
        shutil.rmtree(folder)
        raise ConfigError(
            f"TMPDIR must be short, got {str(folder.parent)!r}: a socket's path has "
            f"{_LONGEST_SOCKET_PATH} bytes at most"
        )
    return folder


def _clear(folder: Path) -> None:
    """Remove a dead forkserver's socket, and the folder when no worker's socket is in it."""
    with contextlib.suppress(OSError):
        (folder / SOCKET_NAME).unlink()
    with contextlib.suppress(OSError):
        folder.rmdir()


def _code_mark() -> str:
    """Differs when Hearth's code does: an old forkserver must not fork old code."""
    root = Path(hearth.__file__).parent
    newest = max(path.stat().st_mtime_ns for path in root.rglob("*.py"))
    return f"{root} {newest}"
