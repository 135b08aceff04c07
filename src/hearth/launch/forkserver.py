"""A process that has imported everything a worker needs, and forks workers for one launcher.

Importing takes seconds and a fork a millisecond, so a worker starts as fast as its model loads. The
forkserver has one thread, computes nothing and touches no GPU: only then is a forked copy sound.

Over a socket that it inherits from its owner it reads one line of JSON per worker, a ``Task``, and
answers with one, ``{"error": null}`` once the worker's process.json is written. SIGTERM ends it and
its workers. When its owner closes the socket or dies, it ends with its last worker; with
``--end-with-owner`` it then ends its workers at once.

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
import select
import signal
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hearth.collector import collect_rarely
from hearth.errors import ConfigError, EngineError, HearthError, StorageError
from hearth.launch.child import Task, run_task
from hearth.launch.records import ProcessFacts, ProcessId, WorkerFolder, write_json
from hearth.telemetry import setup_logging

# Run as a program its own name is another.
logger = logging.getLogger("hearth.launch.forkserver")

_GRACE_S = 5.0
"""How long children may take to end."""


class Forkserver:
    """Forks what ``channel`` asks for; the workers' sockets are in ``folder``.

    ``owner`` is a descriptor of the launcher's process.
    """

    def __init__(
        self,
        channel: socket.socket,
        owner: int,
        folder: Path,
        workers_dir: Path,
        *,
        end_with_owner: bool,
    ) -> None:
        self._channel = channel
        self._owner = owner
        self._folder = folder
        self._workers_dir = workers_dir
        self._end_with_owner = end_with_owner
        self._children: dict[int, tuple[str, Path]] = {}
        self._is_ending = self._is_released = False
        self._wake_in, self._wake_out = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def run(self) -> None:
        """Serve until the end."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._end)
        signal.set_wakeup_fd(self._wake_out, warn_on_full_buffer=False)
        while not self._is_ending and (self._children or not self._is_released):
            self._take_turn()
        self._end_children()
        with contextlib.suppress(OSError):  # a worker's socket may still be there
            self._folder.rmdir()

    def _take_turn(self) -> None:
        """Wait for a request, for the owner's end or for a signal, and do what is to be done."""
        owner = () if self._is_released else (self._channel, self._owner)
        ready = select.select([self._wake_in, *owner], [], [])[0]
        if self._wake_in in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_in, 4096)
        self._reap()
        if self._owner in ready:  # nobody would look after what is started now
            self._is_released, self._is_ending = True, self._end_with_owner
        elif self._channel in ready:
            try:
                error = self._start(read_line(self._channel))
                self._channel.sendall(json.dumps({"error": error}).encode() + b"\n")
            except OSError:  # the owner has closed its end
                self._is_released, self._is_ending = True, self._end_with_owner

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
        inherited = [self._channel.fileno(), self._owner, self._wake_in, self._wake_out]
        forkserver = ProcessId.of(os.getpid())
        assert forkserver is not None, "this process runs"
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        pid = os.fork()
        if pid == 0:
            run_task(task, folder, path, inherited, forkserver.pid)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        self._children[pid] = (task.worker_id, path)
        # A child that is dead already has a start time all the same: it was not reaped yet.
        process = ProcessId.of(pid) or ProcessId(pid, 0)
        try:
            folder.write_process(ProcessFacts(process, str(path), forkserver))
        except StorageError:
            os.kill(pid, signal.SIGKILL)  # nobody would find it
            raise

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
            path.unlink(missing_ok=True)
            try:
                write_json(WorkerFolder(self._workers_dir / worker_id).exit, content)
            except StorageError as error:  # also where the worker's folder is gone
                logger.warning("how worker %s ended is not recorded: %s", worker_id, error)

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

    def _end(self, *_: object) -> None:
        self._is_ending = True


def read_line(channel: socket.socket) -> dict[str, Any]:
    """The JSON object that comes in on one line.

    Raises:
        ConnectionError: the line does not end.
    """
    parts = bytearray()
    while not parts.endswith(b"\n"):
        more = channel.recv(65536)
        if not more:
            raise ConnectionError("the connection ended early")
        parts += more
    return json.loads(parts)


def main(arguments: Sequence[str] | None = None) -> None:
    """Import, and serve."""
    parser = argparse.ArgumentParser(
        description="Fork workers from a process that is ready for them."
    )
    parser.add_argument("--channel", type=int, required=True, help="descriptor of a socket")
    parser.add_argument("--owner", type=int, required=True, help="process at its other end")
    parser.add_argument("--end-with-owner", action="store_true", help="end workers with it, too")
    parser.add_argument("--folder", type=Path, required=True, help="private folder for sockets")
    parser.add_argument("--workers-dir", type=Path, required=True)
    parser.add_argument("--preload", nargs="*", default=[])
    given = parser.parse_args(arguments)
    setup_logging()
    owner = ProcessId.of(given.owner)
    descriptor = None if owner is None or os.getppid() != given.owner else owner.open()
    if descriptor is None:
        return
    start_s = time.perf_counter()
    with collect_rarely():
        for name in given.preload:
            importlib.import_module(name)
    # What is here now stays for good; a collection in a child would copy every page of it.
    gc.collect()
    gc.freeze()
    logger.info("forkserver %d ready after %.1f s", os.getpid(), time.perf_counter() - start_s)
    with socket.socket(fileno=given.channel) as channel:
        Forkserver(
            channel,
            descriptor,
            given.folder,
            given.workers_dir,
            end_with_owner=given.end_with_owner,
        ).run()


if __name__ == "__main__":
    main()
