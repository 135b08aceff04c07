"""Folders that change at once: written as a draft beside their name, then put in its place.

Whoever writes a draft holds a lock on it (``flock``), and the lock ends with its process, however
that ends. So a draft that can be locked belongs to nobody, and the next writer sweeps it.
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

_DRAFT = ".draft-"
_ASIDE = ".old-"
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_CANNOT_EXCHANGE = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}


@contextlib.contextmanager
def drafted(folder: Path, *, overwrite: bool = False) -> Generator[Path, None, None]:
    """An empty draft, which is ``folder`` once the ``with`` ends and never before.

    Its files are on the disk by then. An overwritten folder is the old one up to that moment and
    the new one from then on; after an error there is no trace of the draft. What killed writers
    left under the same parent is swept first.

    Raises:
        RequestError: the folder exists and ``overwrite`` is False.
    """
    root = folder.parent
    root.mkdir(parents=True, exist_ok=True)
    sweep(root)
    if folder.exists() and not overwrite:
        raise _taken(folder)
    draft, lock = _new_draft(root, folder.name)
    try:
        yield draft
        for path in (*draft.rglob("*"), draft):
            _fsync(path)
        put_in_place(draft, folder, overwrite=overwrite)
        _fsync(root)
    finally:
        # After an exchange the draft's name has the old version.
        shutil.rmtree(draft, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def sweep(root: Path) -> None:
    """Finish what killed writers left: a folder that had stepped aside returns, drafts go."""
    for aside in root.glob(f"{_ASIDE}*"):
        folder = root / aside.name.removeprefix(_ASIDE).rpartition("-")[0]
        # Waits for a living writer, which is between its two renames.
        with _locked(aside) as is_locked:
            if not is_locked or not aside.exists():
                continue
            if folder.exists():
                shutil.rmtree(aside, ignore_errors=True)
            else:
                aside.rename(folder)
    for draft in root.glob(f"{_DRAFT}*"):
        with _locked(draft, wait=False) as is_locked:
            if is_locked:
                shutil.rmtree(draft, ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """Remove a folder; it is complete or gone, however this ends."""
    gone = folder.parent / f"{_DRAFT}{folder.name}-{secrets.token_hex(4)}"
    folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def put_in_place(draft: Path, folder: Path, *, overwrite: bool, can_exchange: bool = True) -> None:
    """Give the draft its folder's name. An old version has the draft's name afterwards, or is gone.

    ``can_exchange`` False takes the way of systems that cannot swap two names in one step: the old
    version steps aside, and ``sweep`` brings it back if nothing took its place.

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
        raise _taken(folder)
    if can_exchange and _exchange(draft, folder):
        return
    aside = folder.parent / f"{_ASIDE}{folder.name}-{secrets.token_hex(4)}"
    with _locked(folder):
        folder.rename(aside)
        draft.rename(folder)
    shutil.rmtree(aside, ignore_errors=True)


def write_file(file: Path, content: bytes) -> None:
    """Replace a file's content on the disk; it is the old or the new one however this ends."""
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_name(f".{file.name}.draft")
    draft.write_bytes(content)
    _fsync(draft)
    draft.replace(file)
    _fsync(file.parent)


def _taken(folder: Path) -> RequestError:
    return RequestError(f"name must be new, got {folder.name!r}: it exists already")


def _new_draft(root: Path, name: str) -> tuple[Path, int | None]:
    while True:
        draft = root / f"{_DRAFT}{name}-{secrets.token_hex(4)}"
        draft.mkdir()
        # Another writer's sweep may come between the two, and has removed it then.
        lock = _lock(draft, wait=True)
        if draft.exists():
            return draft, lock
        if lock is not None:
            os.close(lock)


@contextlib.contextmanager
def _locked(folder: Path, *, wait: bool = True) -> Generator[bool, None, None]:
    """Whether the ``with`` holds the folder's lock."""
    lock = _lock(folder, wait=wait)
    try:
        yield lock is not None
    finally:
        if lock is not None:
            os.close(lock)


def _lock(folder: Path, *, wait: bool) -> int | None:
    """A descriptor that holds the lock; None where it is held, the folder gone, or no locks are."""
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


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step; False where the system or the file system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    names = os.fsencode(one), os.fsencode(other)
    if rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _CANNOT_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), str(other))


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
