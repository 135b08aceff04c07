"""Runs one program in the sandbox, from its start until nothing of it is left."""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from training.sandbox.isolation import (
    ENVIRONMENT,
    Isolation,
    NoSandboxError,
    SandboxError,
    Start,
    build_command,
    explain_missing,
    pick_user,
)
from training.sandbox.limits import Limits
from training.sandbox.system_calls import build_filter

Ended = Literal["exited", "timeout", "memory", "output"]

_TICK_S = 0.1
"""Seconds between two looks at the memory of all processes of a program."""
_PAGE = os.sysconf("SC_PAGE_SIZE")
_PROBE = "import socket; print(*[name for _, name in socket.if_nameindex()])"
_works: set[Isolation] = set()


@dataclass(frozen=True)
class CodeResult:
    """How a program ended."""

    ended: Ended
    """``exited`` by itself or by a signal, or ended for its ``timeout`` (of either kind), its
    ``memory`` or its ``output``. One that asks for too much memory at once gets an error instead,
    as one does that asks for too many processes, files or connections."""
    exit_code: int | None
    """As a shell has it, 128 and the signal's number for a signal; None where it was ended."""
    stdout: str
    stderr: str
    seconds: float
    isolation: Isolation
    """What set it apart."""

    @property
    def is_success(self) -> bool:
        """Whether it exited with 0."""
        return self.exit_code == 0


def run_code(
    program: str,
    stdin: str = "",
    *,
    limits: Limits | None = None,
    isolation: Isolation | None = None,
) -> CodeResult:
    """Run a Python program that nobody trusts, with the standard library and nothing else.

    It sees no process, network, environment variable or file of ours, but the system's programs and
    libraries, which it can only read. It has an empty folder, and nothing that it leaves or starts
    outlives it. As root it runs as a user of its own.

    Raises:
        ConfigError: this machine cannot do that, or not by the ``isolation`` that is given;
            ``isolation="rlimits"`` does without what hides files, network and other processes.
        SandboxError: the sandbox did not start this time.
    """
    limits = limits or Limits()
    if isolation is None:
        isolation = find_isolation()
    elif isolation not in _works:
        _try_isolation(isolation)
    return _run(program, stdin, limits, isolation)


def find_isolation() -> Isolation:
    """What sets programs apart on this machine: bubblewrap where it works, else namespaces.

    Raises:
        ConfigError: neither works.
    """
    reasons: list[str] = []
    names: tuple[Isolation, ...] = ("bubblewrap", "namespaces")
    for isolation in names:
        if isolation in _works:
            return isolation
        try:
            _try_isolation(isolation)
        except SandboxError as error:
            reasons.append(str(error))
        else:
            return isolation
    raise NoSandboxError(
        f"a sandbox must keep programs off files and network, got {'; '.join(reasons)}: install "
        "bubblewrap, allow user namespaces, or, where there is nothing to lose, give "
        "isolation='rlimits'"
    )


def _try_isolation(isolation: Isolation) -> None:
    """Run a program that says which networks it sees.

    Raises:
        NoSandboxError: it does not start, or sees one.
    """
    reason = explain_missing(isolation)
    if reason is None:
        try:
            result = _run(_PROBE, "", Limits(), isolation)
        except SandboxError as error:
            reason = str(error)
        else:
            seen = result.stdout.split()
            if not result.is_success:
                reason = f"its first program ended with {result.exit_code}: {result.stderr[-300:]}"
            elif isolation != "rlimits" and seen not in ([], ["lo"]):
                reason = f"a program sees the networks {seen}"
    if reason is not None:
        raise NoSandboxError(f"isolation must work here, got {isolation!r}: {reason}")
    _works.add(isolation)


def _run(program: str, stdin: str, limits: Limits, isolation: Isolation) -> CodeResult:
    text = program.encode(errors="replace")
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        start, report = _prepare(stack, text, limits, isolation)
        given = stack.enter_context(os.fdopen(os.memfd_create("stdin"), "w+b"))
        given.write(text + stdin.encode(errors="replace"))
        given.seek(0)
        folder = _make_folder(stack, start.uid) if isolation == "rlimits" else "/"
        process = stack.enter_context(_start(start, given, folder))
        reader = _Reader(process, limits.output_kb << 10)
        try:
            ended = _wait(process, reader, limits)
        finally:
            _end(process, start)
        has_started = _read(report) == b"."
    stdout, stderr = reader.texts()
    code = process.returncode
    code = code if code >= 0 else 128 - code
    if not has_started:
        raise SandboxError(
            f"the sandbox must start, got exit code {code} by {isolation}: {stderr[-1000:].strip()}"
        )
    if ended == "exited" and code == 128 + signal.SIGXCPU:
        ended = "timeout"
    exit_code = code if ended == "exited" else None
    return CodeResult(ended, exit_code, stdout, stderr, time.monotonic() - began, isolation)


def _start(start: Start, given: BinaryIO, folder: str) -> subprocess.Popen[bytes]:
    """Start the program.

    Raises:
        SandboxError: the machine cannot run what starts it.
    """
    try:
        return subprocess.Popen(
            build_command(start),
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            env=ENVIRONMENT,
            pass_fds=(start.report, start.calls),
            start_new_session=True,
        )
    except OSError as error:
        raise SandboxError(f"the sandbox must start, got {error} by {start.isolation}") from None


def _prepare(
    stack: contextlib.ExitStack, text: bytes, limits: Limits, isolation: Isolation
) -> tuple[Start, int]:
    """What the program is started with, and the descriptor that says whether it was limited."""
    report, says = os.pipe()
    stack.callback(os.close, report)
    stack.callback(os.close, says)
    os.set_blocking(report, False)
    calls, filters = os.pipe()
    stack.callback(os.close, calls)
    os.write(filters, build_filter())
    os.close(filters)
    start = Start(isolation, limits, len(text), says, calls, pick_user())
    return start, report


def _make_folder(stack: contextlib.ExitStack, uid: int) -> str:
    folder = tempfile.mkdtemp(prefix="sandbox-")
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    if uid:
        os.chown(folder, uid, uid)
    return folder


class _Reader:
    """What a program writes to standard output and standard error, up to ``most`` bytes of both."""

    def __init__(self, process: subprocess.Popen[bytes], most: int) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        self._most = most
        self._written = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
        self.descriptors = list(self._written)
        for descriptor in self.descriptors:
            os.set_blocking(descriptor, False)

    @property
    def is_full(self) -> bool:
        """Whether it wrote more than it may."""
        return sum(map(len, self._written.values())) > self._most

    def read(self, descriptor: int) -> bool:
        """Read some of a descriptor; whether there was any."""
        data = _read(descriptor)
        self._written[descriptor] += data or b""
        return bool(data)

    def texts(self) -> tuple[str, str]:
        """Standard output and standard error."""
        first, second = (bytes(data[: self._most]) for data in self._written.values())
        return first.decode(errors="replace"), second.decode(errors="replace")


def _read(descriptor: int) -> bytes | None:
    """Some of a descriptor: nothing at its end, None where nothing is there yet."""
    try:
        return os.read(descriptor, 1 << 16)
    except BlockingIOError:
        return None


def _wait(process: subprocess.Popen[bytes], reader: _Reader, limits: Limits) -> Ended:
    """How a program ended, or what it has used too much of."""
    deadline = time.monotonic() + limits.wall_s
    look = time.monotonic() + _TICK_S
    with contextlib.ExitStack() as stack:
        exit_fd = os.pidfd_open(process.pid)
        stack.callback(os.close, exit_fd)
        selector = stack.enter_context(selectors.DefaultSelector())
        for descriptor in (exit_fd, *reader.descriptors):
            selector.register(descriptor, selectors.EVENT_READ)
        while (now := time.monotonic()) < deadline:
            if now >= look:
                look = now + _TICK_S
                if _resident(process.pid) > limits.memory_mb << 20:
                    return "memory"
            ready = {key.fd for key, _ in selector.select(min(look, deadline) - now)}
            if exit_fd in ready:
                # What it wrote last may still stand in the pipes.
                while any(reader.read(fd) for fd in reader.descriptors) and not reader.is_full:
                    pass
                return "output" if reader.is_full else "exited"
            for descriptor in ready:
                if not reader.read(descriptor):
                    selector.unregister(descriptor)
            if reader.is_full:
                return "output"
    return "timeout"


def _end(process: subprocess.Popen[bytes], start: Start) -> None:
    """End the program and all that it started."""
    if start.isolation != "rlimits" and (first := _children(process.pid)):
        # The first process of the namespace ends when the kernel has ended all others of it.
        for pid in first:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    while start.isolation == "rlimits" and start.uid and _kill_all(start.uid):
        time.sleep(0.001)


def _kill_all(uid: int) -> bool:
    """Kill each process of a user that lives; whether there was one."""
    found = False
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and entry.stat().st_uid == uid:
                os.kill(int(entry.name), signal.SIGKILL)
                found |= (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return found


def _resident(pid: int) -> int:
    """Bytes of resident memory of a process and of all below it."""
    total = 0
    for process in _tree(pid):
        with contextlib.suppress(OSError):
            total += int(Path(f"/proc/{process}/statm").read_text().split()[1]) * _PAGE
    return total


def _tree(pid: int) -> Iterator[int]:
    yield pid
    for child in _children(pid):
        yield from _tree(child)


def _children(pid: int) -> list[int]:
    """The children of a process; none where it has ended."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found += map(int, (task / "children").read_text().split())
    return found
