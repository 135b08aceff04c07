"""The folder from which a deployment's servers load snapshots.

A bucket may drop a snapshot while it is served, and other processes cannot read one that is in
memory. This folder keeps what is served, so that a replaced server can load it. Where possible its
files are hard links to a bucket's files, which need no space.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from hearth.models.lora import LoraOptions
from hearth.sync.folders import remove_folder, write_draft
from hearth.sync.manifest import folder_names, read_manifest, save_file
from hearth.sync.store import FolderSnapshotStore, Snapshot


@dataclass(frozen=True)
class CachedSnapshot:
    """A snapshot in the cache."""

    identity: str
    adapter: Path | None
    """The folder of an adapter, in PEFT's format; None for weights."""


class SnapshotCache:
    """Snapshots under ``folder``. For one thread at a time."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "snapshots"
        self._adapters = folder / "adapters"
        self._store = FolderSnapshotStore(self.root)

    def add(self, snapshot: Snapshot) -> CachedSnapshot:
        """Cache a snapshot, and of a delta its whole chain.

        Raises:
            EngineError: a snapshot of its chain is missing or damaged.
        """
        if snapshot.kind == "lora":
            return CachedSnapshot(snapshot.identity, self._write_adapter(snapshot))
        if isinstance(snapshot.source, FolderSnapshotStore):
            self._link(snapshot.source, snapshot.identity)
        elif snapshot.kind == "delta" and snapshot.parent not in self._store.names():
            # Its parent was never served here.
            whole = replace(snapshot, kind="base", tensors=snapshot.weights or {}, whole=None)
            self._store.put(replace(whole, parent=None, parent_digest=None))
        else:
            self._store.put(snapshot)
        return CachedSnapshot(snapshot.identity, None)

    def keep(self, identities: Collection[str]) -> None:
        """Remove all snapshots except these and their chains."""
        needed: set[str] = set()
        names = folder_names(self.root)
        for name in identities:
            ancestor: str | None = name
            while ancestor in names and ancestor not in needed:
                needed.add(ancestor)
                ancestor = read_manifest(self.root / ancestor).get("parent")
        for name in names:
            if name not in needed:
                remove_folder(self.root / name)
        if self._adapters.is_dir():
            for folder in self._adapters.iterdir():
                if folder.name not in identities:
                    shutil.rmtree(folder, ignore_errors=True)

    def _link(self, source: FolderSnapshotStore, identity: str) -> None:
        ancestor: str | None = identity
        while ancestor is not None and not (self.root / ancestor).is_dir():
            original = source.folder(ancestor)
            with write_draft(self.root / ancestor) as draft:
                for file in original.iterdir():
                    _link_or_copy(file, draft / file.name)
            ancestor = read_manifest(original).get("parent")

    def _write_adapter(self, snapshot: Snapshot) -> Path:
        options = LoraOptions.from_metadata(snapshot.metadata)
        folder = self._adapters / snapshot.identity
        layers = {name.partition(".lora_")[0] for name in snapshot.tensors}
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": snapshot.base_model,
            "r": options.rank,
            "lora_alpha": options.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": sorted({name.rpartition(".")[2] for name in layers}),
        }
        with write_draft(folder, overwrite=True) as draft:
            text = json.dumps(config, indent=2)
            (draft / "adapter_config.json").write_text(text, encoding="utf-8")
            tensors = snapshot.tensors.items()
            arrays = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors}
            save_file(arrays, draft / "adapter_model.safetensors")
        return folder


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)
