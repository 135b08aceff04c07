"""Small disks that a test may fill or make read-only; mounting them takes root."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

_LIBC = ctypes.CDLL(None)
_READ_ONLY, _REMOUNT, _DETACH = 1, 32, 2  # of mount(2) and umount2(2)


@contextlib.contextmanager
def mounted(folder: Path, size: int) -> Iterator[None]:
    """A disk of ``size`` bytes at ``folder``."""
    folder.mkdir()
    if _mount(folder, 0, f"size={size},mode=700"):
        pytest.skip("mounting a small disk must be allowed (root), got a refusal")
    try:
        yield
    finally:
        # Detached: a run that failed may have a file open.
        assert _LIBC.umount2(os.fsencode(folder), _DETACH) == 0


def fill(folder: Path, free: int = 0) -> Path:
    """Leave so many free pages on a disk; returns the file that takes the others."""
    filler = folder / "filler"
    filler.unlink(missing_ok=True)
    usage = os.statvfs(folder)
    filler.write_bytes(bytes((usage.f_bavail - free) * usage.f_frsize))
    return filler


def set_read_only(folder: Path, *, is_read_only: bool = True) -> None:
    """Have a disk refuse every write, or take them again. No file may be open for writing."""
    flags = _REMOUNT | (_READ_ONLY if is_read_only else 0)
    assert _mount(folder, flags, "") == 0, "a file is open for writing"


def _mount(folder: Path, flags: int, options: str) -> int:
    """0 where the system has done it."""
    return _LIBC.mount(
        b"tmpfs", os.fsencode(folder), b"tmpfs", ctypes.c_ulong(flags), options.encode()
    )
