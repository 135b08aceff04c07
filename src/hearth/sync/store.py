"""Stores of weight snapshots between a trainer and a deployment: in memory or in folders."""

from __future__ import annotations

import contextlib
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, TypeVar, get_args

from torch import Tensor

from hearth.errors import ConfigError, EngineError, NotFoundError, RequestError
from hearth.files import explain_refusals, fsync
from hearth.sync import delta
from hearth.sync.direct import receive
from hearth.sync.folders import remove_folder, write_draft
from hearth.sync.manifest import (
    MANIFEST_FILE,
    TensorEntry,
    check_name,
    digest,
    fingerprints,
    folder_names,
    next_number,
    read_manifest,
    read_tensors,
    render_manifest,
    write_tensors,
)
from hearth.sync.pieces import place_pieces
from hearth.sync.snapshot import Snapshot, SnapshotKind, SnapshotStore

__all__ = [
    "Buckets",
    "FolderBuckets",
    "FolderSnapshotStore",
    "MemoryBuckets",
    "MemorySnapshotStore",
    "Snapshot",
    "SnapshotKind",
    "SnapshotStore",
]

logger = logging.getLogger(__name__)

_FORMAT = "hearth-snapshot-3"
_FORMATS = ("hearth-snapshot-2", _FORMAT)
"""Version 2 had whole tensors in one file, which version 3 reads as well."""
_DATA = "weights"

S = TypeVar("S", bound=SnapshotStore, covariant=True)


class MemorySnapshotStore:
    """The newest ``keep`` snapshots, in this process; ``put`` and ``get`` copy nothing.

    A delta from this process's trainer comes with its whole weights, which share every unchanged
    tensor with its parent's. It therefore needs no parent, ``keep`` may drop any snapshot, and a
    deployment serves from the trainer's own copy. ``put`` resolves a delta that comes without whole
    weights: the changed tensors are copied once.

    Raises:
        ConfigError: ``keep`` is below 1.
    """

    shares_tensors = True

    def __init__(self, keep: int = 4) -> None:
        if keep < 1:
            raise ConfigError(f"keep must be >= 1, got {keep}: the newest snapshot always stays")
        self._keep = keep
        self._snapshots: dict[str, Snapshot] = {}
        self._lock = threading.Lock()

    def put(self, snapshot: Snapshot) -> None:
        """Store a snapshot and drop the oldest beyond ``keep``."""
        identity = check_name(snapshot.identity, "identity")
        with self._lock:
            snapshot = self._with_weights(snapshot)
            kept = self._snapshots.get(identity)
            if kept is not None:
                if not _is_same(kept, snapshot):
                    raise name_taken(identity)
                return
            self._snapshots[identity] = snapshot
            for old in list(self._snapshots)[: -self._keep]:
                del self._snapshots[old]

    def get(self, identity: str) -> Snapshot:
        """The very object that was put; a delta with its whole weights."""
        with self._lock:
            if identity in self._snapshots:
                return self._snapshots[identity]
            raise not_kept(identity, list(self._snapshots))

    def names(self) -> list[str]:
        """Identities, oldest first."""
        with self._lock:
            return list(self._snapshots)

    def snapshots(self) -> list[Snapshot]:
        """All snapshots, oldest first."""
        with self._lock:
            return list(self._snapshots.values())

    def _with_weights(self, snapshot: Snapshot) -> Snapshot:
        if snapshot.weights is not None:
            return snapshot
        parent = self._snapshots.get(snapshot.parent or "")
        if parent is None or parent.weights is None:
            raise missing_parent(snapshot, list(self._snapshots))
        whole = {**parent.weights, **delta.apply(snapshot.tensors, parent.weights)}
        return replace(snapshot, whole=whole)


class FolderSnapshotStore:
    """One folder per snapshot under ``root``: ``manifest.json`` and ``weights.safetensors``.

    Ranks write a file each, ``weights-RANK.safetensors``, with their pieces of the tensors.

    With ``keep`` a put removes snapshots that are neither among the newest ``keep`` nor a base or
    link of one of those. Several processes may use one root.

    Raises:
        ConfigError: ``keep`` is below 1.
    """

    shares_tensors = False

    def __init__(self, root: Path, keep: int | None = None) -> None:
        if keep is not None and keep < 1:
            raise ConfigError(f"keep must be >= 1, got {keep}: the newest snapshot always stays")
        self._root = root
        self._keep = keep
        self._lock = threading.Lock()

    def put(self, snapshot: Snapshot) -> None:
        """Write the snapshot's folder; it appears complete or not at all."""
        check_name(snapshot.identity, "identity")
        with self._lock:
            if self.has(snapshot.identity):
                self.require_same(snapshot)
                return
            with self.write(snapshot.identity) as place:
                files = {_DATA: self.write_file(place, _DATA, snapshot.tensors)}
                self.finish(place, snapshot, files)

    def has(self, identity: str) -> bool:
        """Whether there is a snapshot of that name, damaged or not."""
        return (self._root / identity).is_dir()

    @contextlib.contextmanager
    def write(self, identity: str) -> Generator[str, None, None]:
        """Begin a snapshot; the ``with`` has the place where its files are written.

        Processes that share the store write files of their own there (``write_file``), and one of
        them calls ``finish`` before the ``with`` ends. It appears complete or not at all.

        Raises:
            RequestError: the identity is no valid name, or is taken.
        """
        with write_draft(self._root / check_name(identity, "identity")) as draft:
            yield str(draft)
        self._remove_old()

    def write_file(
        self, place: str, name: str, tensors: Mapping[str, Tensor]
    ) -> dict[str, TensorEntry]:
        """Write a file of tensors, whole ones or pieces; returns their entries.

        Raises:
            StorageError: the disk refused.
        """
        with explain_refusals(Path(place)):
            entries = write_tensors(Path(place), name, tensors)
            # Here, since another machine can wait for its own writes only.
            fsync(Path(place) / f"{name}.safetensors")
        return entries

    def finish(
        self,
        place: str,
        snapshot: Snapshot,
        files: Mapping[str, Mapping[str, TensorEntry]],
        sender: Mapping[str, Any] | None = None,
    ) -> None:
        """Write the manifest; ``files`` has the entries of each file's tensors.

        Without files ``sender`` says who sends the tensors (``sync.direct``).

        Raises:
            EngineError: it is a delta, and its parent is not kept.
        """
        content = self._make_manifest(snapshot, sender)
        manifest = render_manifest(content, next_number(self._root), files)
        with explain_refusals(Path(place)):
            (Path(place) / MANIFEST_FILE).write_bytes(manifest)

    def get(self, identity: str) -> Snapshot:
        """The snapshot on the CPU, every tensor of its own checked against its checksum."""
        snapshot = self.open(identity)
        return replace(snapshot, tensors=dict(snapshot.tensors))

    def open(self, identity: str) -> Snapshot:
        """As ``get``, but its tensors are read, and checked, when the first of them is used."""
        manifest = self._read_manifest(identity)
        is_delta = manifest["kind"] == "delta"
        files = manifest["files"].values()
        names = {name: 0 for file in files for name in file} if is_delta else manifest["weights"]
        tensors = _UnreadTensors(names, lambda: _read_files(self.folder(identity), manifest))
        return Snapshot(
            identity,
            manifest["kind"],
            manifest["base_model"],
            tensors,
            manifest["metadata"],
            parent=manifest.get("parent"),
            created_s=manifest.get("created_s", 0.0),
            entries=manifest["weights"],
            parent_digest=manifest.get("parent_digest"),
            source=self,
        )

    def read_into(self, identity: str, targets: Mapping[str, Tensor]) -> None:
        """Read a base's tensors into others of the same layout, checked as by ``get``."""
        _read_files(self.folder(identity), self._read_manifest(identity), targets)

    def folder(self, identity: str) -> Path:
        """Where a snapshot's files are.

        Raises:
            NotFoundError: it is not kept.
        """
        folder = self._root / check_name(identity, "identity")
        if not folder.is_dir():
            raise not_kept(identity, self.names())
        return folder

    def names(self) -> list[str]:
        """Identities, oldest first."""
        return folder_names(self._root)

    def _load_manifest(self, identity: str) -> dict[str, Any]:
        """The manifest, whatever it says; errors are those of ``folder`` and ``read_manifest``."""
        return read_manifest(self.folder(identity))

    def _read_manifest(self, identity: str) -> dict[str, Any]:
        manifest = self._load_manifest(identity)
        is_snapshot = manifest.get("format") in _FORMATS and "weights" in manifest
        if not is_snapshot or manifest.get("kind") not in get_args(SnapshotKind):
            raise EngineError(
                f"{identity!r} must be a sampler snapshot ({_FORMAT}), got "
                f"{manifest.get('format')!r} of kind {manifest.get('kind')!r}"
            )
        return manifest

    def _make_manifest(
        self, snapshot: Snapshot, sender: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        manifest: dict[str, Any] = {
            "format": _FORMAT,
            "identity": snapshot.identity,
            "kind": snapshot.kind,
            "base_model": snapshot.base_model,
            "created_s": snapshot.created_s,
            "metadata": dict(snapshot.metadata),
        }
        if sender is not None:
            manifest["sender"] = dict(sender)
        if snapshot.kind == "delta":
            return manifest | self._delta_fields(snapshot)
        return manifest | {"weights": _entries_of(snapshot)}

    def _delta_fields(self, snapshot: Snapshot) -> dict[str, Any]:
        """A delta's manifest fields: its parent, and the entries of its whole weights."""
        try:
            parent = self._read_manifest(snapshot.parent or "")["weights"]
        except (NotFoundError, RequestError):
            raise missing_parent(snapshot, self.names()) from None
        return {
            "parent": snapshot.parent,
            "parent_digest": snapshot.parent_digest or digest(parent),
            "weights": _entries_of(snapshot, parent),
        }

    def require_same(self, snapshot: Snapshot) -> None:
        """Refuse a snapshot whose name is taken by other weights.

        Raises:
            RequestError: it is.
        """
        kept = self._read_manifest(snapshot.identity)
        if (
            kept["base_model"] != snapshot.base_model
            or (kept["kind"] == "lora") != (snapshot.kind == "lora")
            or kept["metadata"].get("lora") != snapshot.metadata.get("lora")
            or kept["weights"] != _entries_of(snapshot)
        ):
            raise name_taken(snapshot.identity)

    def _remove_old(self) -> None:
        try:
            self._remove_unneeded()
        except (EngineError, OSError) as error:  # the new one is complete
            logger.warning("old snapshots under %s stay: %s", self._root, error)

    def _remove_unneeded(self) -> None:
        names = self.names()
        if self._keep is None or len(names) <= self._keep:
            return
        needed: set[str] = set()
        for name in names[-self._keep :]:
            link: str | None = name
            while link is not None and link not in needed:
                needed.add(link)
                link = self._read_parent(link)
        for name in names:
            if name not in needed:
                self._remove(name)

    def _remove(self, identity: str) -> None:
        remove_folder(self._root / identity)

    def _read_parent(self, identity: str) -> str | None:
        try:
            return self._read_manifest(identity).get("parent")
        except (EngineError, NotFoundError):
            return None


def _read_files(
    folder: Path, manifest: Mapping[str, Any], into: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """The verified tensors of a snapshot's files or sender: whole ones, or the parts of a delta.

    Raises:
        EngineError: a file is missing or does not match the manifest, or the sender is lost.
        NotFoundError: the sender has newer ones only.
    """
    files: Mapping[str, Mapping[str, TensorEntry]] = manifest["files"]
    if (sender := manifest.get("sender")) is not None:
        names = [name for own in sender["pieces"] for name in own]
        whole, pieces = place_pieces(manifest["weights"], names, into)
        receive(sender, manifest["identity"], pieces)
        _check_received(manifest, whole)
        return whole
    if manifest["kind"] == "delta":
        read = [read_tensors(folder, manifest, file) for file in files]
        return {name: part for parts in read for name, part in parts.items()}
    names = [name for file in files.values() for name in file]
    whole, pieces = place_pieces(manifest["weights"], names, into)
    for file, entries in files.items():
        read_tensors(folder, manifest, file, {name: pieces[name] for name in entries})
    return whole


def _check_received(manifest: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    for name, found in fingerprints(tensors).items():
        if found != (expected := manifest["weights"][name]):
            raise EngineError(
                f"tensor {name!r} of {manifest['identity']!r} must arrive as it was sent: expected "
                f"{expected}, found {found}: sync again"
            )


class _UnreadTensors(Mapping[str, Tensor]):
    """The tensors of a file, read when the first is used; their names are known before."""

    def __init__(self, names: Collection[str], read: Callable[[], Mapping[str, Tensor]]) -> None:
        self._names = names
        self._read = read
        self._tensors: Mapping[str, Tensor] | None = None

    def __getitem__(self, name: str) -> Tensor:
        if self._tensors is None:
            self._tensors = self._read()
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class Buckets(ABC, Generic[S]):
    """Stores by bucket id: memory, folders, Ray. Safe to use from several threads."""

    def __init__(self) -> None:
        self._stores: dict[str, S] = {}
        self._lock = threading.Lock()

    def bucket(self, bucket_id: str) -> S:
        """The store of a bucket; it begins empty.

        Raises:
            RequestError: the id is no valid name.
        """
        check_name(bucket_id, "bucket_id")
        with self._lock:
            if bucket_id not in self._stores:
                self._stores[bucket_id] = self._make_store(bucket_id)
            return self._stores[bucket_id]

    @abstractmethod
    def _make_store(self, bucket_id: str) -> S: ...


class MemoryBuckets(Buckets[MemorySnapshotStore]):
    """Buckets of this process, the newest ``keep`` snapshots each."""

    def __init__(self, keep: int = 4) -> None:
        super().__init__()
        self._keep = keep

    def _make_store(self, bucket_id: str) -> MemorySnapshotStore:
        return MemorySnapshotStore(self._keep)


class FolderBuckets(Buckets[FolderSnapshotStore]):
    """A folder per bucket under ``root``, each with the newest ``keep`` snapshots (None: all)."""

    def __init__(self, root: Path, keep: int | None = None) -> None:
        super().__init__()
        self._root = root
        self._keep = keep

    def _make_store(self, bucket_id: str) -> FolderSnapshotStore:
        return FolderSnapshotStore(self._root / bucket_id, self._keep)


def missing_parent(snapshot: Snapshot, known: list[str]) -> EngineError:
    """The error for a delta whose parent is not in the store."""
    return EngineError(
        f"delta {snapshot.identity!r} must follow its parent: expected {snapshot.parent!r}, found "
        f"{known}: send a base"
    )


def _entries_of(
    snapshot: Snapshot, parent: Mapping[str, TensorEntry] | None = None
) -> Mapping[str, TensorEntry]:
    """Entries of a snapshot's whole weights; unchanged tensors of a delta have the parent's."""
    if snapshot.entries is not None:
        return snapshot.entries
    weights = snapshot.weights
    if weights is None:
        raise EngineError(
            f"delta {snapshot.identity!r} must have its whole weights or their entries, got neither"
        )
    fresh = delta.list_changed(snapshot.tensors) if snapshot.kind == "delta" else weights.keys()
    old = {name: entry for name, entry in (parent or {}).items() if name not in fresh}
    new = fingerprints({name: tensor for name, tensor in weights.items() if name not in old})
    return {name: new[name] if name in new else old[name] for name in weights}


def _is_same(kept: Snapshot, given: Snapshot) -> bool:
    assert kept.weights is not None
    assert given.weights is not None
    return (
        kept.base_model == given.base_model
        and (kept.kind == "lora") == (given.kind == "lora")
        and kept.metadata.get("lora") == given.metadata.get("lora")
        and delta.is_same(kept.weights, given.weights)
    )


def name_taken(identity: str) -> RequestError:
    """The error for a snapshot whose name has other weights."""
    return RequestError(f"identity must be new, got {identity!r}: it is taken by other weights")


def not_kept(identity: str, known: list[str]) -> NotFoundError:
    """The error for a snapshot that is not in the store."""
    return NotFoundError(
        f"snapshot must be one of {known}, got {identity!r}: it was never saved here, or newer "
        "ones have replaced it"
    )
