"""Folders that change atomically: written as a draft beside their name, then renamed.

The writer of a draft holds a lock on it (``flock``), which ends with its process. A draft that can
be locked therefore has no writer, and the next writer removes it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Generator
from pathlib import Path

from hearth.errors import RequestError
from hearth.files import explain_refusals, fsync

_DRAFT = ".draft-"
_ASIDE = ".old-"
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_CANNOT_EXCHANGE = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}


@contextlib.contextmanager
def write_draft(folder: Path, *, overwrite: bool = False) -> Generator[Path, None, None]:
    """An empty draft that becomes ``folder`` when the ``with`` ends.

    Its files are on the disk by then. An overwritten folder changes from the old to the new content
    in one step; after an error the draft is gone. First, what killed writers left under the same
    parent is cleaned up.

    Raises:
        RequestError: the folder exists and ``overwrite`` is False.
        StorageError: the disk refused, also what the ``with`` wrote.
    """
    root = folder.parent
    with explain_refusals(folder):
        root.mkdir(parents=True, exist_ok=True)
        sweep(root)
        if folder.exists() and not overwrite:
            raise _name_taken(folder)
        draft, lock = _new_draft(root, folder.name)
        with _remove_at_end(draft, lock):
            yield draft
            for path in (*draft.rglob("*"), draft):
                fsync(path)
            put_in_place(draft, folder, overwrite=overwrite)
            fsync(root)


@contextlib.contextmanager
def _remove_at_end(draft: Path, lock: int | None) -> Generator[None, None, None]:
    try:
        yield
    finally:
        # After an exchange the draft's name has the old version.
        shutil.rmtree(draft, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def sweep(root: Path) -> None:
    """Clean up after killed writers: a folder that was moved aside returns, drafts go."""
    for aside in root.glob(f"{_ASIDE}*"):
        folder = root / aside.name.removeprefix(_ASIDE).rpartition("-")[0]
        # Waits for a living writer between its two renames.
        with _hold_lock(aside) as is_locked:
            if not is_locked or not aside.exists():
                continue
            if folder.exists():
                shutil.rmtree(aside, ignore_errors=True)
            else:
                aside.rename(folder)
    for draft in root.glob(f"{_DRAFT}*"):
        with _hold_lock(draft, wait=False) as is_locked:
            if is_locked:
                shutil.rmtree(draft, ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """Remove a folder; it is complete or gone, even if this process is killed.

    One that another process has removed meanwhile is gone as well.
    """
    draft = folder.parent / f"{_DRAFT}{folder.name}-{secrets.token_hex(4)}"
    with contextlib.suppress(FileNotFoundError):
        folder.rename(draft)
    shutil.rmtree(draft, ignore_errors=True)


def put_in_place(draft: Path, folder: Path, *, overwrite: bool, can_exchange: bool = True) -> None:
    """Rename the draft to its folder. An old version then has the draft's name, or is gone.

    ``can_exchange=False`` does it as on systems that cannot swap two names in one step: the old
    version moves aside, and ``sweep`` moves it back if nothing took its place.

    Raises:
        RequestError: the folder exists and ``overwrite`` is False.
    """
    try:
        draft.rename(folder)
        return
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    if not overwrite:
        raise _name_taken(folder)
    if can_exchange and _exchange(draft, folder):
        return
    aside = folder.parent / f"{_ASIDE}{folder.name}-{secrets.token_hex(4)}"
    with _hold_lock(folder):
        folder.rename(aside)
        draft.rename(folder)
    shutil.rmtree(aside, ignore_errors=True)


def _name_taken(folder: Path) -> RequestError:
    return RequestError(f"name must be new, got {folder.name!r}: it exists already")


def _new_draft(root: Path, name: str) -> tuple[Path, int | None]:
    while True:
        draft = root / f"{_DRAFT}{name}-{secrets.token_hex(4)}"
        draft.mkdir()
        # Another writer's sweep may have removed it between the two calls.
        lock = _lock(draft, wait=True)
        if draft.exists():
            return draft, lock
        if lock is not None:
            os.close(lock)


@contextlib.contextmanager
def _hold_lock(folder: Path, *, wait: bool = True) -> Generator[bool, None, None]:
    """Whether the ``with`` holds the folder's lock."""
    lock = _lock(folder, wait=wait)
    try:
        yield lock is not None
    finally:
        if lock is not None:
            os.close(lock)


def _lock(folder: Path, *, wait: bool) -> int | None:
    """A descriptor that holds the lock; None if it is taken, the folder is gone or cannot lock."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _exchange(path: Path, other: Path) -> bool:
    """Swap two names in one step; False where the system or the file system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    names = os.fsencode(path), os.fsencode(other)
    if rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _CANNOT_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), str(other))
