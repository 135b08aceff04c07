"""Snapshots in an object store, for trainers and deployments that share no folder."""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
import threading
import weakref
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from hearth.errors import EngineError, HearthError
from hearth.objects import SERVED, ObjectFolder
from hearth.sync.folders import remove_folder, write_draft
from hearth.sync.manifest import (
    MANIFEST_FILE,
    TensorEntry,
    check_name,
    parse_manifest,
    render_manifest,
)
from hearth.sync.snapshot import Snapshot
from hearth.sync.store import (
    Buckets,
    FolderBuckets,
    FolderSnapshotStore,
    SnapshotStore,
    name_taken,
    not_kept,
)

logger = logging.getLogger(__name__)


class ObjectSnapshotStore(FolderSnapshotStore):
    """Snapshots as objects ``IDENTITY/manifest.json`` and ``IDENTITY/*.safetensors`` of a bucket.

    The manifest is uploaded last, and removed first: without it there is no snapshot. What is read
    is downloaded into a folder of this machine's temporary files, which has the last snapshot and
    those that it builds on.
    """

    def __init__(self, objects: ObjectFolder, bucket: str, keep: int | None = None) -> None:
        mirror = tempfile.mkdtemp(prefix="hearth-snapshots-")
        super().__init__(Path(mirror), keep)
        weakref.finalize(self, shutil.rmtree, mirror, ignore_errors=True)
        self._objects = objects
        self._bucket = bucket
        self._manifests: dict[str, tuple[str, dict[str, Any]]] = {}
        self._mirror_lock = threading.RLock()

    def has(self, identity: str) -> bool:
        """Whether there is a snapshot of that name, damaged or not."""
        return identity in self._list_manifests()

    @contextlib.contextmanager
    def write(self, identity: str) -> Generator[str, None, None]:
        """As a folder's; what is uploaded is no snapshot before ``finish``."""
        if self.has(check_name(identity, "identity")):
            raise name_taken(identity)
        place = f"{self._bucket}/{identity}"
        # A writer that was killed may have left files.
        self._objects.remove(place)
        try:
            yield place
        except BaseException:
            with contextlib.suppress(HearthError):
                self._objects.remove(place)
            raise
        self._remove_old()

    def write_file(
        self, place: str, name: str, tensors: Mapping[str, Tensor]
    ) -> dict[str, TensorEntry]:
        """Upload a file of tensors; returns their entries.

        Raises:
            StorageError: the store refused, or this machine's disk.
        """
        with tempfile.TemporaryDirectory(prefix="upload-", dir=self._root) as folder:
            entries = super().write_file(folder, name, tensors)
            file = f"{name}.safetensors"
            self._objects.upload(Path(folder) / file, f"{place}/{file}")
        return entries

    def finish(
        self,
        place: str,
        snapshot: Snapshot,
        files: Mapping[str, Mapping[str, TensorEntry]],
        sender: Mapping[str, Any] | None = None,
    ) -> None:
        """Upload the manifest, with which the snapshot is there."""
        numbers = [_number_of(manifest) for manifest in self._list_manifests().values()]
        manifest = self._make_manifest(snapshot, sender)
        content = render_manifest(manifest, 1 + max(numbers, default=0), files)
        self._objects.write(f"{place}/{MANIFEST_FILE}", content)

    def names(self) -> list[str]:
        """Identities, oldest first."""
        manifests = self._list_manifests()
        return sorted(manifests, key=lambda name: (_number_of(manifests[name]), name))

    def folder(self, identity: str) -> Path:
        """A copy of a snapshot's files on this machine, downloaded if it is not there.

        Raises:
            NotFoundError: it is not kept.
            StorageError: the store refused, or this machine's disk.
        """
        content = self._read_object(identity)
        folder = self._root / identity
        with self._mirror_lock:
            if folder.is_dir():
                if (folder / MANIFEST_FILE).read_bytes() == content:
                    return folder
                remove_folder(folder)
            with write_draft(folder) as draft:
                for name in parse_manifest(identity, content)["files"]:
                    file = f"{name}.safetensors"
                    with contextlib.suppress(FileNotFoundError):  # its reader names it
                        path = f"{self._bucket}/{identity}/{file}"
                        self._objects.download(path, draft / file)
                (draft / MANIFEST_FILE).write_bytes(content)
            self._forget_others(identity)
        return folder

    def _forget_others(self, identity: str) -> None:
        """Remove what the downloaded snapshot does not build on."""
        needed: set[str] = set()
        link: str | None = identity
        while link is not None and link not in needed:
            needed.add(link)
            link = self._read_parent(link)
        for path in self._root.glob(f"*/{MANIFEST_FILE}"):
            if path.parent.name not in needed:
                remove_folder(path.parent)

    def _list_manifests(self) -> dict[str, dict[str, Any]]:
        """The manifest of every snapshot; one that cannot be read is empty."""
        found: dict[str, dict[str, Any]] = {}
        for path, facts in self._objects.list(self._bucket).items():
            _, identity, *rest = path.split("/")
            if rest != [MANIFEST_FILE]:
                continue
            tag, manifest = self._manifests.get(identity, ("", {}))
            if tag != facts.tag:
                manifest = {}
                with contextlib.suppress(EngineError, FileNotFoundError):
                    manifest = parse_manifest(identity, self._objects.read(path))
                self._manifests[identity] = facts.tag, manifest
            found[identity] = manifest
        return found

    def _load_manifest(self, identity: str) -> dict[str, Any]:
        return parse_manifest(identity, self._read_object(identity))

    def _read_object(self, identity: str) -> bytes:
        """The content of a snapshot's manifest.

        Raises:
            NotFoundError: there is none.
        """
        check_name(identity, "identity")
        try:
            return self._objects.read(f"{self._bucket}/{identity}/{MANIFEST_FILE}")
        except FileNotFoundError:
            raise not_kept(identity, self.names()) from None

    def _remove(self, identity: str) -> None:
        self._objects.remove(f"{self._bucket}/{identity}/{MANIFEST_FILE}")
        self._objects.remove(f"{self._bucket}/{identity}")


class ObjectBuckets(Buckets[ObjectSnapshotStore]):
    """Buckets under a URL (``hearth.objects``), each with the newest ``keep`` snapshots."""

    def __init__(self, url: str, keep: int | None = None) -> None:
        super().__init__()
        self._objects = ObjectFolder(url)
        self._keep = keep

    def read_served(self, file: Path) -> bytes | None:
        """What ``write_served`` has written, from whichever machine; None where nothing was."""
        try:
            return self._objects.read(_served_path(file))
        except FileNotFoundError:
            return None

    def write_served(self, file: Path, content: bytes) -> None:
        """Write down which snapshot a deployment serves; it may start again on another machine.

        Raises:
            StorageError: the store refused.
        """
        self._objects.write(_served_path(file), content)

    def _make_store(self, bucket_id: str) -> ObjectSnapshotStore:
        return ObjectSnapshotStore(self._objects, bucket_id, self._keep)


def open_buckets(
    where: str | Buckets[SnapshotStore], keep: int | None = None
) -> Buckets[SnapshotStore]:
    """The buckets of a folder or a URL, with the newest ``keep`` snapshots each.

    ``Buckets`` are returned as they are.

    Raises:
        ConfigError: it is a URL of another kind than ``s3://``, or s3fs is not installed.
    """
    if not isinstance(where, str):
        return where
    return ObjectBuckets(where, keep) if "://" in where else FolderBuckets(Path(where), keep)


def _served_path(file: Path) -> str:
    return f"{SERVED}/{file.parent.name}/{file.name}"


def _number_of(manifest: Mapping[str, Any]) -> int:
    number = manifest.get("number")
    return number if isinstance(number, int) else 0
