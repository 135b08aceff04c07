"""The ways to set a program apart, and the commands that start it so."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hearth.errors import ConfigError, HearthError
from training.sandbox.limits import Limits
from training.sandbox.system_calls import has_filter

Isolation = Literal["bubblewrap", "namespaces", "rlimits"]
"""What sets a program apart: bubblewrap; the same by the kernel's namespaces alone; or nothing but
limits, with which it reaches the network, and every file that its user may read."""

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/ld.so.cache")
_WORK = "/tmp"  # noqa: S108 - of the sandbox, where it is empty
_CHILD = Path(__file__).with_name("child.py")
ENVIRONMENT = {
    "HOME": _WORK,
    "LANG": "C.UTF-8",
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "PYTHONDONTWRITEBYTECODE": "1",
    # Sets and dictionaries of texts then have the same order each time, and so do rewards.
    "PYTHONHASHSEED": "0",
}
"""All variables that a program sees."""


class SandboxError(HearthError, RuntimeError):
    """The sandbox failed, and not the program: nothing is known of that."""


class NoSandboxError(ConfigError, SandboxError):
    """This machine has no way to set a program apart."""


@dataclass(frozen=True)
class Start:
    """What a program in the sandbox is started with."""

    isolation: Isolation
    limits: Limits
    size: int
    """Bytes of the program at the beginning of its standard input."""
    report: int
    """The descriptor at which it says that it is limited."""
    calls: int
    """The descriptor with the filter of system calls."""
    uid: int
    """The user that it becomes; 0 where it stays the one that started it."""


def pick_user() -> int:
    """The user that a program of root's becomes: one that nobody is, or nobody; 0 for no other.

    The kernel counts no processes of root. A container may know few users, or one.
    """
    if os.geteuid() != 0:
        return 0
    lines = Path("/proc/self/uid_map").read_text().splitlines()
    ranges = [(int(first), int(count)) for first, _, count in map(str.split, lines)]
    for uid in (2**30 + secrets.randbelow(2**29), 65534):
        if any(first <= uid < first + count for first, count in ranges):
            return uid
    return 0


def build_command(start: Start) -> list[str]:
    """The command that starts a program."""
    limits = start.limits
    numbers = [
        start.uid,
        start.size,
        start.report,
        start.calls,
        limits.cpu_s,
        limits.memory_mb << 20,
        limits.processes + _count_others(start),
        limits.disk_mb << 20,
    ]
    folders = list(_find_folders())
    child = [
        _find_python(),
        "-s",
        "-S",
        "-c",
        _CHILD.read_text(),
        start.isolation,
        ",".join(map(str, numbers)),
    ]
    if start.isolation == "bubblewrap":
        return [*_bubblewrap(start, folders), "--", *child]
    return [*child, *folders] if start.isolation == "namespaces" else child


def _bubblewrap(start: Start, folders: list[str]) -> list[str]:
    size = str(start.limits.disk_mb << 20)
    empty = ("--perms", "1777", "--size", size, "--tmpfs")
    # With the rights to become another user, which end as it becomes that.
    rights = ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    command = [
        "bwrap",
        *("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"),
        *(rights if start.uid else ["--unshare-user"]),
        *("--die-with-parent", "--new-session", "--seccomp", str(start.calls)),
    ]
    for path in map(Path, folders):
        for parent in reversed(path.parents[:-1]):
            command += ["--perms", "0755", "--dir", str(parent)]
        shown = ("--symlink", path.readlink()) if path.is_symlink() else ("--ro-bind", path)
        command += [*map(str, shown), str(path)]
    return [
        *command,
        *("--dev", "/dev", *empty, "/dev/shm", "--remount-ro", "/dev"),  # noqa: S108
        *(*empty, _WORK, "--remount-ro", "/"),
    ]


def explain_missing(isolation: Isolation) -> str | None:
    """Why an isolation cannot even be tried here; None where it can."""
    if isolation == "bubblewrap" and shutil.which("bwrap", path=ENVIRONMENT["PATH"]) is None:
        return "it is not installed"
    if sys.platform != "linux":
        return "it needs Linux"
    if not has_filter():
        return "it has no filter of system calls for this processor"
    python = Path(_find_python())
    if isolation == "rlimits" and pick_user() and not all(map(_is_open, (python, *python.parents))):
        return f"as root it runs programs as another user, who cannot read {python}"
    return None


def _is_open(path: Path) -> bool:
    """Whether every user may run a program, or pass through a folder."""
    return bool(path.stat().st_mode & 0o001)


def _find_folders() -> Iterator[str]:
    """What of this machine a program sees: the system's programs and libraries, and Python's."""
    for path in _SYSTEM:
        if os.path.lexists(path):
            yield path
    prefix = os.path.realpath(sys.base_prefix)
    if not prefix.startswith("/usr/") and prefix != "/usr":
        yield prefix


def _find_python() -> str:
    """The interpreter below every environment, by a path without links."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    path = Path(sys.base_prefix, "bin", version)
    return os.path.realpath(path if path.exists() else sys.executable)


def _count_others(start: Start) -> int:
    """Processes that count against the kernel's limit, but are not the program's."""
    if start.isolation != "rlimits":
        return 2  # the first of the namespace, and who waits for it
    return 0 if start.uid else _count_threads(os.getuid())


def _count_threads(uid: int) -> int:
    count = 0
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and process.stat().st_uid == uid:
                count += len(os.listdir(process / "task"))  # noqa: PTH208 - a third of the time
        except OSError:  # it has ended
            continue
    return count
