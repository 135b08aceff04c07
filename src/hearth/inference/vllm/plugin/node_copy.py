"""Copies of a deployment's weights in a machine's memory, one for all workers of its servers there.

A copy is an anonymous file in memory: the first worker that needs it makes it, and the others map
it. It is gone once the last of them has released it or has ended, however that was.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import mmap
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hearth.sync.manifest import TensorEntry, digest

_ALIGNMENT = 64
_INDEX = "copies.json"
_LOCK = "lock"


@dataclass(frozen=True, eq=False)
class NodeCopy:
    """Whole weights in shared memory, which are not to be changed."""

    digest: str
    """``manifest.digest`` of the entries, by which workers find it."""
    entries: Mapping[str, TensorEntry]
    tensors: Mapping[str, Tensor]


class NodeCopies:
    """The copies of snapshots under ``root`` on this machine. For one thread at a time.

    Workers meet at a folder of the machine's own temporary files, which has a lock and the places
    of the copies. Those that cannot share memory, as in separate containers, have a copy each.
    """

    def __init__(self, root: Path) -> None:
        name = hashlib.blake2b(os.fsencode(root.resolve()), digest_size=8).hexdigest()
        self._folder = Path(tempfile.gettempdir()) / f"hearth-{os.getuid()}-{name}"

    def find_or_make(
        self, entries: Mapping[str, TensorEntry], fill: Callable[[Mapping[str, Tensor]], None]
    ) -> NodeCopy:
        """The copy of weights; ``fill`` writes their tensors if nobody has made it yet.

        While another worker makes one this waits. Errors are those of ``fill``.
        """
        with self._hold_lock():
            found = self.find(entries)
            if found is not None:
                return found
            file = os.memfd_create("hearth-weights")
            try:
                os.truncate(file, _layout(entries)[1])
                copy = _map(file, entries)
                fill(copy.tensors)
            except BaseException:
                os.close(file)
                raise
            weakref.finalize(copy, os.close, file)
            self._publish(copy.digest, file)
            return copy

    def find(self, entries: Mapping[str, TensorEntry]) -> NodeCopy | None:
        """The copy of weights, if a living worker has made one; ``fill`` may call this."""
        place = self._read_index().get(digest(entries))
        file = None if place is None else _open(place)
        if file is None:
            return None
        copy = _map(file, entries)
        weakref.finalize(copy, os.close, file)
        return copy

    def remove(self) -> None:
        """Remove the folder at which workers meet, once they have ended."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _publish(self, name: str, file: int) -> None:
        facts = os.fstat(file)
        places = {key: place for key, place in self._read_index().items() if _is_held(place)}
        places[name] = {
            "path": f"/proc/{os.getpid()}/fd/{file}",
            "device": facts.st_dev,
            "inode": facts.st_ino,
        }
        draft = self._folder / f"{_INDEX}.draft"
        draft.write_text(json.dumps(places), encoding="utf-8")
        draft.rename(self._folder / _INDEX)

    def _read_index(self) -> dict[str, dict[str, Any]]:
        try:
            return json.loads((self._folder / _INDEX).read_bytes())
        except (OSError, ValueError):
            return {}

    @contextlib.contextmanager
    def _hold_lock(self) -> Generator[None, None, None]:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        if self._folder.stat().st_uid != os.getuid():
            raise PermissionError(f"{self._folder} must be this user's own, got another's")
        with (self._folder / _LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _layout(entries: Mapping[str, TensorEntry]) -> tuple[dict[str, int], int]:
    """Where each tensor begins, in bytes, and the size of all."""
    places: dict[str, int] = {}
    end = 0
    for name in sorted(entries):
        places[name] = end
        size = math.prod(entries[name]["shape"]) * _dtype(entries[name]).itemsize
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    return places, max(end, _ALIGNMENT)


def _map(file: int, entries: Mapping[str, TensorEntry]) -> NodeCopy:
    places, size = _layout(entries)
    # The tensors keep the mapping, and nothing else does.
    memory = mmap.mmap(file, size)
    tensors: dict[str, Tensor] = {}
    for name, entry in entries.items():
        shape, dtype = entry["shape"], _dtype(entry)
        count = math.prod(shape)
        flat = (
            torch.frombuffer(memory, dtype=dtype, count=count, offset=places[name])
            if count
            else torch.empty(0, dtype=dtype)
        )
        tensors[name] = flat.view(shape)
    return NodeCopy(digest(entries), entries, tensors)


def _open(place: Mapping[str, Any]) -> int | None:
    """A descriptor of a copy; None where its worker has released it or has ended."""
    try:
        file = os.open(place["path"], os.O_RDWR)
    except OSError:
        return None
    if _is_same(os.fstat(file), place):
        return file
    os.close(file)
    return None


def _is_held(place: Mapping[str, Any]) -> bool:
    try:
        return _is_same(Path(place["path"]).stat(), place)
    except OSError:
        return False


def _is_same(facts: os.stat_result, place: Mapping[str, Any]) -> bool:
    # The number of a process or a descriptor may be another one's by now.
    return (facts.st_dev, facts.st_ino) == (place["device"], place["inode"])


def _dtype(entry: TensorEntry) -> torch.dtype:
    return getattr(torch, entry["dtype"])
