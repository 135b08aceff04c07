"""Buckets over the snapshot actor (``hearth.sync.store.Buckets``), for a worker's own process.

A worker has a mirror of what it reads and writes, a folder of its node, whose store judges, links
and checks; between nodes go the folder's files as they are.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError, RayTaskError

from hearth.errors import EngineError, HearthError, NotFoundError
from hearth.sync.folders import remove_folder, write_draft
from hearth.sync.manifest import check_name
from hearth.sync.snapshot import Snapshot
from hearth.sync.store import Buckets, FolderSnapshotStore, missing_parent

_TIMEOUT_S = 600.0


class RaySnapshotStore:
    """One bucket of a snapshot actor (``hearth.sync.snapshot.SnapshotStore``)."""

    shares_tensors = False

    def __init__(self, snapshot_actor: Any, bucket: str, mirror: Path, keep: int | None) -> None:
        self._snapshot_actor = snapshot_actor
        self._bucket = bucket
        self._keep = keep
        self._root = mirror
        self._mirror = FolderSnapshotStore(mirror)
        self._lock = threading.Lock()

    def put(self, snapshot: Snapshot) -> None:
        """Write the snapshot into the mirror, and send its files to the snapshot actor."""
        identity = check_name(snapshot.identity, "identity")
        with self._lock:
            kept = self.names()
            if snapshot.kind == "delta" and snapshot.parent not in kept:
                raise missing_parent(snapshot, kept)
            for name in {identity, snapshot.parent or ""} & set(kept):
                self._fetch(name)
            self._mirror.put(snapshot)
            if identity not in kept:
                files = _read(self._root / identity)
                self._call_actor("put", self._bucket, identity, files, self._keep)
            self._clean({*kept, identity})

    def get(self, identity: str) -> Snapshot:
        """The snapshot on the CPU, every tensor checked against its checksum."""
        check_name(identity, "identity")
        with self._lock:
            self._clean({*self.names(), identity})
            self._fetch(identity)
            return replace(self._mirror.get(identity), source=self)

    def names(self) -> list[str]:
        """Identities that the snapshot actor has, oldest first."""
        return [facts["identity"] for facts in self._call_actor("facts", self._bucket)]

    def _fetch(self, identity: str) -> None:
        """Have a snapshot in the mirror."""
        folder = self._root / identity
        if folder.is_dir():
            return
        reference = self._call_actor("get", self._bucket, identity)
        if reference is None:
            raise NotFoundError(
                f"snapshot must be one of {self.names()}, got {identity!r}: it was never saved "
                "here, or newer ones have taken its place"
            )
        files = _fetch_result(reference[0])
        with write_draft(folder) as draft:
            for name, content in files.items():
                (draft / name).write_bytes(content)

    def _clean(self, wanted: set[str]) -> None:
        for name in self._mirror.names():
            if name not in wanted:
                remove_folder(self._root / name)

    def _call_actor(self, method: str, *arguments: Any) -> Any:
        return _fetch_result(getattr(self._snapshot_actor, method).remote(*arguments))


class RayBuckets(Buckets[RaySnapshotStore]):
    """Buckets of a snapshot actor: the newest ``keep`` snapshots of each, mirrored in a folder."""

    def __init__(self, snapshot_actor: Any, mirror: Path, keep: int | None) -> None:
        super().__init__()
        self._snapshot_actor = snapshot_actor
        self._mirror = mirror
        self._keep = keep

    def read_served(self, file: Path) -> bytes | None:
        """What ``write_served`` has written, from whichever machine; None where nothing was."""
        return _fetch_result(self._snapshot_actor.read_served.remote(file))

    def write_served(self, file: Path, content: bytes) -> None:
        """Write down which snapshot a deployment serves, on the control plane's machine.

        Raises:
            StorageError: the disk there refused.
            EngineError: the snapshot actor does not answer.
        """
        _fetch_result(self._snapshot_actor.write_served.remote(file, content))

    def _make_store(self, bucket_id: str) -> RaySnapshotStore:
        return RaySnapshotStore(
            self._snapshot_actor, bucket_id, self._mirror / bucket_id, self._keep
        )


def _fetch_result(reference: Any) -> Any:
    try:
        return ray.get(reference, timeout=_TIMEOUT_S)
    except RayError as error:
        if isinstance(error, RayTaskError) and isinstance(error.cause, HearthError):
            raise error.cause from None
        raise EngineError(
            f"snapshots must be in Ray's object store, got {type(error).__name__}: {error}"
        ) from None


def _read(folder: Path) -> dict[str, Any]:
    return {path.name: np.fromfile(path, np.uint8) for path in folder.iterdir()}
