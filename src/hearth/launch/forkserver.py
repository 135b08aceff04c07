"""A process that has imported everything a worker needs, and forks one for whoever asks.

Importing takes seconds and a fork a millisecond, so a worker starts as fast as its model loads. The
forkserver has one thread, computes nothing and touches no GPU: only then is a forked copy sound. It
answers at a Unix socket. Each connection brings one line of JSON, a ``Task``, and is answered with
one, ``{"error": null}`` once the worker's process.json is written. SIGTERM ends it and its workers;
after SIGUSR1 it ends with its last worker.

As the workers' parent it sees how they end, and writes it into their folders.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import logging
import os
import secrets
import selectors
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from hearth.errors import ConfigError, EngineError, HearthError
from hearth.launch.child import Task, run_task
from hearth.launch.records import (
    ProcessFacts,
    ProcessId,
    WorkerFolder,
    read_json,
    remove_socket,
    write_json,
)
from hearth.telemetry import setup_logging

# Run as a program its own name is another.
logger = logging.getLogger("hearth.launch.forkserver")

SOCKET_NAME = "forkserver"
_REQUEST_TIMEOUT_S = 5.0
_GRACE_S = 5.0
"""How long children may take to end."""


class _Forked(BaseException):
    """Takes a child out of the forkserver's frames, to where it calls what it is given."""

    def __init__(self, go_on: Callable[[], NoReturn]) -> None:
        self.go_on = go_on


class Forkserver:
    """Answers at ``folder/forkserver`` until it is shut down or of no more use to anybody.

    Of use is it while a worker lives or the process that asked last, and for ``idle_s`` after it
    was asked. With ``owner`` it ends, and ends its workers, as soon as that process does.
    """

    def __init__(
        self, folder: Path, workers_dir: Path, *, idle_s: float, owner: ProcessId | None = None
    ) -> None:
        self._folder = folder
        self._workers_dir = workers_dir
        self._idle_s = idle_s
        self._children: dict[int, tuple[str, Path]] = {}
        self._last_s = time.monotonic()
        self._client = ProcessId.of(os.getppid())
        self._is_ending = self._is_retiring = False
        self._listener = socket.socket(socket.AF_UNIX)
        draft = folder / f".{SOCKET_NAME}"
        self._listener.bind(str(draft))
        self._listener.listen(128)
        # Under its name it is not seen before it can be connected to.
        draft.rename(folder / SOCKET_NAME)
        self._listener.setblocking(False)
        self._wake_in, self._wake_out = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._owner = None if owner is None else owner.open()
        self._owner_is_gone = owner is not None and self._owner is None

    def run(self) -> None:
        """Serve until the end."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._end)
        signal.signal(signal.SIGUSR1, self._retire)
        signal.set_wakeup_fd(self._wake_out, warn_on_full_buffer=False)
        self._last_s = time.monotonic()
        while not (self._is_ending or self._owner_is_gone or self._is_useless()):
            self._turn(timeout_s=max(0.1, min(60.0, self._idle_s / 10)))
        self._end_children()
        remove_socket(self._folder / SOCKET_NAME)

    def _turn(self, timeout_s: float) -> None:
        with selectors.PollSelector() as selector:
            selector.register(self._wake_in, selectors.EVENT_READ)
            selector.register(self._listener, selectors.EVENT_READ)
            if self._owner is not None:
                selector.register(self._owner, selectors.EVENT_READ)
            ready = {key.fd for key, _ in selector.select(timeout_s)}
        if self._wake_in in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_in, 4096)
        self._reap()
        self._owner_is_gone = self._owner in ready
        if self._listener.fileno() in ready and not self._owner_is_gone:
            with contextlib.suppress(BlockingIOError):
                connection, _ = self._listener.accept()
                with connection:
                    self._converse(connection)

    def _converse(self, connection: socket.socket) -> None:
        """Read one request and answer it."""
        connection.settimeout(_REQUEST_TIMEOUT_S)
        self._last_s = time.monotonic()
        self._client = _peer(connection)
        try:
            request = read_line(connection)
            connection.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                if connection.recv(1) == b"":
                    return  # Whoever asked is gone, so nobody would look after what is started.
            error = self._start(request)
            connection.settimeout(_REQUEST_TIMEOUT_S)
            connection.sendall(json.dumps({"error": error}).encode() + b"\n")
        except (OSError, ValueError) as error:
            logger.warning("forkserver: a request was not answered: %s", error)

    def _start(self, request: dict[str, Any]) -> str | None:
        """Fork for a request; returns why it cannot be done."""
        try:
            self._fork(Task(**request))
        except HearthError as error:
            return str(error)
        except (TypeError, OSError) as error:
            return f"{type(error).__name__}: {error}"
        return None

    def _fork(self, task: Task) -> None:
        if any(worker_id == task.worker_id for worker_id, _ in self._children.values()):
            raise ConfigError(f"worker_id must be new, got {task.worker_id!r}: it is running")
        if threading.active_count() != 1:
            raise EngineError(
                f"the forkserver must have one thread to fork, got {threading.enumerate()}: a "
                "preloaded module has started one"
            )
        if len(os.listdir("/proc/self/task")) != 1:  # noqa: PTH208 - names only, no paths
            logger.warning("a library started threads before the fork: workers will not have them")
        folder = WorkerFolder(self._workers_dir / task.worker_id)
        path = self._folder / secrets.token_hex(4)
        inherited = [
            self._listener.fileno(),
            self._wake_in,
            self._wake_out,
            *([] if self._owner is None else [self._owner]),
        ]
        forkserver = ProcessId.of(os.getpid())
        assert forkserver is not None, "this process runs"
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        pid = os.fork()
        if pid == 0:
            raise _Forked(lambda: run_task(task, folder, path, inherited, forkserver.pid))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        self._children[pid] = (task.worker_id, path)
        # A child that is dead already has a start time all the same: it was not reaped yet.
        process = ProcessId.of(pid) or ProcessId(pid, 0)
        folder.write_process(ProcessFacts(process, str(path), forkserver))

    def _reap(self) -> None:
        """Write down how children ended; what they had started ends with them."""
        while self._children:
            # Not reaped yet, a child keeps its number, so that its group is no other's.
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(ended.si_pid, signal.SIGKILL)
            pid, status, usage = os.wait4(ended.si_pid, 0)
            worker_id, path = self._children.pop(pid)
            number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
            content = {
                "pid": pid,
                "code": os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
                "signal": None if number is None else signal.Signals(number).name,
                "peak_rss_mb": usage.ru_maxrss / 1024,
                "ended_s": time.time(),
            }
            with contextlib.suppress(OSError):
                path.unlink()
            with contextlib.suppress(FileNotFoundError):
                write_json(WorkerFolder(self._workers_dir / worker_id).exit, content)

    def _end_children(self) -> None:
        """End all children, with SIGKILL those that are still there after a while."""
        for pid in reversed(self._children):
            os.kill(pid, signal.SIGTERM)
        end_s = time.monotonic() + _GRACE_S
        while self._children and time.monotonic() < end_s:
            self._reap()
            time.sleep(0.01)
        for pid in self._children:
            # Its group, or the process alone when it has not come as far as to have one.
            for kill in (os.killpg, os.kill):
                with contextlib.suppress(ProcessLookupError):
                    kill(pid, signal.SIGKILL)
        while self._children:
            self._reap()
            time.sleep(0.01)

    def _is_useless(self) -> bool:
        if self._children:
            return False
        is_wanted = self._client is not None and self._client.is_alive()
        is_idle = not is_wanted and time.monotonic() - self._last_s > self._idle_s
        return self._is_retiring or is_idle

    def _end(self, *_: object) -> None:
        self._is_ending = True

    def _retire(self, *_: object) -> None:
        self._is_retiring = True


def _peer(connection: socket.socket) -> ProcessId | None:
    size = struct.calcsize("3i")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return ProcessId.of(struct.unpack("3i", credentials)[0])


def read_line(connection: socket.socket) -> dict[str, Any]:
    """The JSON object that comes in on one line.

    Raises:
        ConnectionError: the line does not end.
        ValueError: it is no JSON object.
    """
    parts = bytearray()
    while not parts.endswith(b"\n"):
        more = connection.recv(65536)
        if not more:
            raise ConnectionError("the connection ended early")
        parts += more
    content = json.loads(parts)
    if not isinstance(content, dict):
        raise ValueError(f"a request must be a JSON object, got {type(content).__name__}")
    return content


def main(arguments: Sequence[str] | None = None) -> None:
    """Listen, import, and serve."""
    parser = argparse.ArgumentParser(
        description="Fork workers from a process that is ready for them."
    )
    parser.add_argument("--folder", type=Path, required=True, help="private folder for sockets")
    parser.add_argument("--workers-dir", type=Path, required=True)
    parser.add_argument("--idle-s", type=float, required=True)
    parser.add_argument("--owner", type=int, default=None, help="end when this process does")
    parser.add_argument("--preload", nargs="*", default=[])
    given = parser.parse_args(arguments)
    setup_logging()
    owner = None
    if given.owner is not None:
        owner = ProcessId.of(given.owner)
        if owner is None or os.getppid() != given.owner:
            return
    # It listens before it imports: whoever asks meanwhile waits, instead of trying again.
    forkserver = Forkserver(given.folder, given.workers_dir, idle_s=given.idle_s, owner=owner)
    start_s = time.perf_counter()
    try:
        for name in given.preload:
            importlib.import_module(name)
    except BaseException:
        remove_socket(given.folder / SOCKET_NAME)
        raise
    # What is here now stays for good; a collection in a child would copy every page of it.
    gc.collect()
    gc.freeze()
    logger.info("forkserver %d ready after %.1f s", os.getpid(), time.perf_counter() - start_s)
    child = None
    try:
        forkserver.run()
    except _Forked as forked:
        child = forked.go_on
    if child is not None:
        child()
    pid_file = given.workers_dir.parent / "forkserver.json"
    if (read_json(pid_file) or {}).get("pid") == os.getpid():
        pid_file.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
