"""Files that are written whole or not at all, and JSON with a checksum of its own."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

from hearth.errors import HearthError, StorageError

CHECKSUM = "checksum"
"""The key of a sealed object's checksum."""
SERVING_FILE = "serving.json"
"""In a deployment's folder: the snapshot that it serves."""

_REMEDIES = {
    errno.ENOSPC: "free space on its disk",
    errno.EDQUOT: "free space, or have the quota raised",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
    errno.EROFS: "its disk is read-only: mount it writable, or choose another folder",
    errno.EACCES: "give this user the right to write there, or choose another folder",
}


def write_file(file: Path, content: bytes, *, durable: bool = True) -> None:
    """Replace a file's content at once; whatever happens, it has the old or the new content.

    ``durable`` makes that hold for a power cut too.

    Raises:
        StorageError: the disk refused; the old content stays.
    """
    draft = file.with_name(f".{file.name}-{secrets.token_hex(4)}")
    with explain_refusals(file):
        try:
            draft.write_bytes(content)
            if durable:
                fsync(draft)
            draft.replace(file)
        except OSError:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
            raise
        if durable:
            fsync(file.parent)


def write_with_folder(file: Path, content: bytes) -> None:
    """As ``write_file``, in a folder that is made if it is missing."""
    with explain_refusals(file):
        file.parent.mkdir(parents=True, exist_ok=True)
    write_file(file, content)


def read_file(file: Path) -> bytes | None:
    """A file's content; None where there is none."""
    try:
        return file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None


@contextlib.contextmanager
def explain_refusals(path: Path) -> Generator[None, None, None]:
    """Raise what the disk refuses while ``path`` is written as one error that names it.

    Raises:
        StorageError: an ``OSError`` came.
    """
    try:
        yield
    except HearthError:
        raise
    except OSError as error:
        raise StorageError(
            f"{path} must be writable, got {error.strerror or error}: "
            f"{_REMEDIES.get(error.errno or 0, 'look at its disk')}; what was there before stays"
        ) from error


def fsync(path: Path) -> None:
    """Have the disk hold a file's content, or a folder's names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def seal(content: Mapping[str, Any]) -> dict[str, Any]:
    """``content`` as a reader parses it (JSON has lists and texts), and its ``checksum``."""
    plain = json.loads(json.dumps(content))
    return {**plain, CHECKSUM: compute_checksum(plain)}


def is_intact(content: Mapping[str, Any]) -> bool:
    """Whether an object is as it was sealed; one without a checksum counts as such.

    Files that were written before there were checksums have none.
    """
    plain = {name: value for name, value in content.items() if name != CHECKSUM}
    return CHECKSUM not in content or content[CHECKSUM] == compute_checksum(plain)


def compute_checksum(content: Mapping[str, Any]) -> str:
    """The blake2b of an object's JSON with sorted keys, as ``blake2b:9f...``."""
    text = json.dumps(content, sort_keys=True)
    return f"blake2b:{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"
