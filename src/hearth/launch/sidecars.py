"""A worker's sidecars on this machine.

Each is a process under ``hearth.launch.supervisor``, so that nothing of it outlives the worker,
however that ends.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hearth.errors import ClosedError, EngineError
from hearth.launch.gpus import VISIBLE_VARIABLE, WorkerGpus
from hearth.launch.records import last_lines, put_long_log_aside, read_end
from hearth.sidecars import GRACE_S, Command, ExitReport, Sidecar

_SUPERVISOR = Path(__file__).with_name("supervisor.py")
_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{0,80}")


class LocalSidecar:
    """A process on this machine (``Sidecar``), reached at ``host``."""

    def __init__(
        self,
        command: Command,
        folder: Path,
        host: str,
        *,
        kills_children: bool,
        gpus: Sequence[str] = (),
    ) -> None:
        self._name = command.name
        self.host = host
        self.gpus = gpus
        """Those that are visible to it; () leaves it its worker's."""
        self._log = folder / "log"
        self._exit = folder / "exit.json"
        self._held = hold_port(host)
        self.port: int = self._held.getsockname()[1]
        folder.mkdir(parents=True, exist_ok=True)
        self._exit.unlink(missing_ok=True)
        put_long_log_aside(self._log)
        argv = fill_address(command.argv, self.host, self.port)
        program = [sys.executable, "-I", "-S", str(_SUPERVISOR)]
        supervisor = [*program, str(os.getpid()), str(self._exit)]
        if kills_children:
            # The outer supervisor is killed with this process, and then the inner one ends it all.
            outer = [*program, str(os.getpid()), str(self._exit.with_name("outer-exit.json"))]
            supervisor = [*outer, *program, "0", str(self._exit)]
        visible = {VISIBLE_VARIABLE: ",".join(gpus)} if gpus else {}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*supervisor, *argv],
                env={**os.environ, **command.env, **visible},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Its supervisor's process, which leads the group of all that it started."""
        return self._process.pid

    def poll(self) -> ExitReport | None:
        """How it ended; None while it runs."""
        if self._process.poll() is None:
            return None
        self._held.close()
        report = replace(read_end(self._exit), last_lines=self.last_lines())
        if report.code is None and report.signal is None and report.reason is None:
            return replace(report, reason="was killed together with its supervisor")
        return report

    def last_lines(self) -> Sequence[str]:
        """The end of what it has printed."""
        return last_lines(self._log)

    def stop(self, grace_s: float = GRACE_S) -> None:
        """SIGTERM, and SIGKILL to all that it started when that takes longer than ``grace_s``."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._held.close()


class LocalSidecars:
    """Sidecars on this machine, with their logs under ``folder`` (``Sidecars``).

    ``host`` is the address that others reach this machine at. ``kills_children`` says that this
    process kills its direct children when it ends, as a Ray actor's does. ``gpus`` are the worker's
    to give; None leaves the environment as it is.
    """

    def __init__(
        self,
        folder: Path,
        host: str = "127.0.0.1",
        *,
        kills_children: bool = False,
        gpus: WorkerGpus | None = None,
    ) -> None:
        self._folder = folder
        self._host = host
        self._kills_children = kills_children
        self._gpus = gpus
        self._running: dict[str, LocalSidecar] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    def start(self, command: Command) -> LocalSidecar:
        """Start a process, and return when there is one.

        Raises:
            EngineError: its program is not there, one of that name still runs, or the machine has
                too few GPUs.
            ClosedError: the worker ends.
        """
        if not _NAME.fullmatch(command.name):
            raise EngineError(f"sidecar must have a plain name, got {command.name!r}")
        if shutil.which(command.argv[0]) is None:
            raise EngineError(
                f"{command.name} must be a program that is there, got {command.argv[0]!r}"
            )
        with self._lock:
            if self._is_closed:
                raise ClosedError(f"worker must be running, got a start of {command.name} after it")
            namesake = self._running.get(command.name)
            if namesake is not None and namesake.poll() is None:
                raise EngineError(f"sidecar must be new, got {command.name!r}, which runs")
            self._drop_ended()
            started = LocalSidecar(
                command,
                self._folder / command.name,
                self._host,
                kills_children=self._kills_children,
                gpus=self._gpus.take(command) if self._gpus is not None else (),
            )
            self._running[command.name] = started
        return started

    def _drop_ended(self) -> None:
        """Give back the GPUs of those that have ended."""
        for name, sidecar in list(self._running.items()):
            if sidecar.poll() is not None:
                del self._running[name]
                if self._gpus is not None:
                    self._gpus.give_back(sidecar.gpus)

    def close(self) -> None:
        """Stop all that still run, at once."""
        with self._lock:
            self._is_closed = True
            running, self._running = list(self._running.values()), {}
        stop_all(running)
        if self._gpus is not None:
            self._gpus.close()


def stop_all(sidecars: Sequence[Sidecar]) -> None:
    """Stop sidecars, all at once."""
    threads = [threading.Thread(target=sidecar.stop, daemon=True) for sidecar in sidecars]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def fill_address(argv: Sequence[str], host: str, port: int) -> list[str]:
    """``argv`` with its address in the place of ``{host}`` and ``{port}``."""
    return [word.replace("{host}", host).replace("{port}", str(port)) for word in argv]


def hold_port(host: str = "127.0.0.1") -> socket.socket:
    """A socket that keeps a free port of ``host`` reserved until it is closed.

    Only a program that sets ``SO_REUSEADDR``, as servers do, can listen there meanwhile.
    """
    held = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((host, 0))
    return held


def wait_for_end(sidecar: Sidecar, timeout_s: float) -> ExitReport | None:
    """How it ended within ``timeout_s``; None where it still runs."""
    end_s = time.monotonic() + timeout_s
    while (report := sidecar.poll()) is None and time.monotonic() < end_s:
        time.sleep(0.01)
    return report
