"""Snapshots in Ray's object store, kept by an actor, so that they outlive the trainer.

It lives on the control plane's node and copies what it is given into that node's store: any other
node may die. It reads manifests and never a tensor. It also keeps the files that say which snapshot
a deployment serves, in the control plane's data folder: a deployment may start again anywhere.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import ray

from hearth.files import read_file, write_with_folder
from hearth.launch.spec import SnapshotRecord

MANIFEST = "manifest.json"
KEEP = 4
"""Snapshots of a bucket where nobody says how many."""

Files = Mapping[str, Any]
"""A snapshot's folder: file names to one-dimensional ``uint8`` arrays."""


@dataclass
class _StoredSnapshot:
    facts: SnapshotRecord
    parent: str | None
    files: Any = field(repr=False)
    """The reference of its files."""


class SnapshotActor:
    """The actor. A call at a time. Files without a whole path are below ``root``."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._buckets: dict[str, dict[str, _StoredSnapshot]] = {}

    def put(self, bucket: str, identity: str, files: Files, keep: int | None) -> None:
        """Keep a snapshot, and with it the newest ``keep`` and what they are made on."""
        manifest = json.loads(bytes(files[MANIFEST]))
        facts = SnapshotRecord(
            identity=identity,
            kind=manifest["kind"],
            base_model=manifest["base_model"],
            created_s=float(manifest.get("created_s", 0.0)),
            num_bytes=sum(file.nbytes for file in files.values()),
        )
        # Put anew: what a trainer has put goes with the trainer.
        kept = _StoredSnapshot(facts, manifest.get("parent"), ray.put(dict(files)))
        snapshots = self._buckets.setdefault(bucket, {})
        snapshots[identity] = kept
        _drop_old(snapshots, keep or KEEP)

    def get(self, bucket: str, identity: str) -> list[Any] | None:
        """A list with the reference of its files; None where it is not kept."""
        kept = self._buckets.get(bucket, {}).get(identity)
        # In a list, since Ray would give the files themselves in a reference's place.
        return None if kept is None else [kept.files]

    def facts(self, bucket: str) -> list[dict[str, Any]]:
        """What a bucket holds, oldest first."""
        return [asdict(snapshot.facts) for snapshot in self._buckets.get(bucket, {}).values()]

    def read_served(self, file: Path) -> bytes | None:
        """What was written about a deployment's snapshot; None where nothing was."""
        return read_file(self._root / file)

    def write_served(self, file: Path, content: bytes) -> None:
        """Write down what a deployment serves; raises as ``write_file`` does."""
        write_with_folder(self._root / file, content)


def buckets_through(snapshot_actor: Any, mirror: Path, keep: int | None) -> Any:
    """Buckets (``hearth.sync.store.Buckets``) of a snapshot actor, for another process.

    ``mirror`` is a folder of its own.
    """
    # By name: it brings torch, which a process that only launches workers does without.
    store = importlib.import_module("hearth.launch.ray.store")
    return store.RayBuckets(snapshot_actor, mirror, keep)


def _drop_old(snapshots: dict[str, _StoredSnapshot], keep: int) -> None:
    needed: set[str] = set()
    for name in list(snapshots)[-keep:]:
        link: str | None = name
        while link is not None and link not in needed and link in snapshots:
            needed.add(link)
            link = snapshots[link].parent
    for name in snapshots.keys() - needed:
        del snapshots[name]
