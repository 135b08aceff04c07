"""The launcher's side of the forkserver: start one, and have it fork."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from hearth.errors import ConfigError, EngineError
from hearth.launch.child import Task
from hearth.launch.forkserver import read_line
from hearth.launch.heartbeat import is_stopped
from hearth.launch.records import last_lines, remove_socket_folder
from hearth.settings import KEYS_VARIABLE

logger = logging.getLogger(__name__)

_LONGEST_SOCKET_FOLDER = 107 - len("/") - 8
"""Bytes that a socket's path may have, less those of a worker's name in it."""
_ANSWER_TIMEOUT_S = 300.0
_LOOK_EVERY_S = 1.0
"""How often a forkserver that has not answered is looked at."""
_ENDING_S = 1.0
"""How long a forkserver that does not answer may take until it counts as hung, not as ended."""
_END_GRACE_S = 10.0
"""It gives its workers a grace period of its own."""

ENVIRONMENT = {
    # A worker's idle threads must not take the cores from its neighbours.
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "0",
    # numpy's BLAS would start its threads on import, and a fork has only one thread.
    "OPENBLAS_NUM_THREADS": "1",
    # Asked through the driver, "is there a GPU" would start CUDA, which no fork survives.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}


class ForkserverLostError(EngineError):
    """The forkserver ended before it answered; the next request has another."""


class ForkserverClient:
    """This process's forkserver, made when it is first needed and again when it has died.

    With ``die_with_parent`` its workers end with this process. Otherwise the forkserver outlives
    this process for as long as it has workers. Safe to use from several threads.
    """

    def __init__(self, data_dir: Path, *, preload: Sequence[str], die_with_parent: bool) -> None:
        self._workers_dir = data_dir / "workers"
        self._log = data_dir / "forkserver.log"
        self._preload = tuple(preload)
        self._die_with_parent = die_with_parent
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._folder: Path | None = None
        """Of its workers' sockets."""

    @property
    def pid(self) -> int | None:
        """The forkserver's process; None before there is one."""
        return None if self._process is None else self._process.pid

    def warm(self) -> None:
        """See that a forkserver lives. One that was just started still imports.

        Raises:
            ConfigError: the folder for its sockets has too long a path.
        """
        with self._lock:
            self._find_or_start()

    def fork(self, task: Task) -> None:
        """Have a child forked for ``task``; its folder says which process it is.

        Raises:
            EngineError: the forkserver refuses.
            ForkserverLostError: it ended before it answered.
        """
        with self._lock:
            channel = self._find_or_start()
            try:
                channel.sendall(json.dumps(task.as_dict()).encode() + b"\n")
                self._await_answer(channel)
                answer = read_line(channel)
            except OSError as error:
                if self._process is not None:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self._process.wait(_ENDING_S)
                self._let_go()
                raise ForkserverLostError(
                    f"the forkserver must answer, got {error}; its log ends with: "
                    f"{' | '.join(last_lines(self._log)[-3:])}"
                ) from None
        if answer["error"] is not None:
            raise EngineError(f"the forkserver must fork, got a refusal: {answer['error']}")

    def end(self) -> None:
        """End the forkserver, and whatever it still has running."""
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                self._process.terminate()
                self._process.send_signal(signal.SIGCONT)  # stopped, it would not hear of it
                try:
                    self._process.wait(_END_GRACE_S)
                except subprocess.TimeoutExpired:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(self._process.pid, signal.SIGKILL)
                    self._process.wait()
            self._let_go()

    def release(self) -> None:
        """Let it end with its last worker."""
        with self._lock:
            self._let_go()

    def _await_answer(self, channel: socket.socket) -> None:
        """Wait for an answer; a forkserver that somebody stopped is continued.

        Raises:
            TimeoutError: there is none.
        """
        assert self._process is not None, "it was asked"
        end_s = time.monotonic() + _ANSWER_TIMEOUT_S
        while not select.select([channel], [], [], _LOOK_EVERY_S)[0]:
            if time.monotonic() > end_s:
                raise TimeoutError(f"nothing within {_ANSWER_TIMEOUT_S:.0f} s")
            if is_stopped(self._process.pid):
                logger.warning("forkserver %d was stopped, and is continued", self._process.pid)
                self._process.send_signal(signal.SIGCONT)

    def _find_or_start(self) -> socket.socket:
        """The way to a forkserver that lives."""
        if self._channel is not None and self._process is not None:
            if self._process.poll() is None:
                return self._channel
            self._let_go()
        self._folder = _make_socket_folder()
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._channel, theirs = socket.socketpair()
        self._channel.settimeout(_ANSWER_TIMEOUT_S)
        command = [sys.executable, "-m", "hearth.launch.forkserver"]
        command += ["--channel", str(theirs.fileno()), "--owner", str(os.getpid())]
        command += ["--folder", str(self._folder), "--workers-dir", str(self._workers_dir)]
        command += ["--end-with-owner"] if self._die_with_parent else []
        with theirs, self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "--preload", *self._preload],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=[theirs.fileno()],
                env=_environment(),
            )
        logger.info("forkserver %d starts", self._process.pid)
        return self._channel

    def _let_go(self) -> None:
        if self._channel is not None:
            self._channel.close()
        if self._process is not None:
            if self._process.poll() is None:
                # Not waited for any more, and not warned of: it is nobody's child from now on.
                self._process.returncode = 0
            elif self._folder is not None:
                remove_socket_folder(self._folder, self._workers_dir)
        self._process = self._channel = self._folder = None


def _environment() -> dict[str, str]:
    """This process's, without the keys that only it checks."""
    own = {name: value for name, value in os.environ.items() if name != KEYS_VARIABLE}
    return {**own, **ENVIRONMENT}


def _make_socket_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="hearth-"))
    if len(str(folder)) > _LONGEST_SOCKET_FOLDER:
        shutil.rmtree(folder)
        raise ConfigError(
            f"TMPDIR must be short, got {str(folder.parent)!r}: a folder of sockets in it has "
            f"{_LONGEST_SOCKET_FOLDER} bytes at most"
        )
    return folder
