"""Reads the tensors of an update from a snapshot folder, and verifies them before any is loaded.

Needs torch and safetensors, but not vLLM, so that it can be tested without it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from hearth.inference.vllm.plugin.node_copy import NodeCopies, NodeCopy
from hearth.sync.chain import apply_verified, resolve
from hearth.sync.delta import list_changed
from hearth.sync.snapshot import Snapshot
from hearth.sync.store import FolderSnapshotStore

_BLOCK = re.compile(r"(.*?\.\d+)\.")


@dataclass(frozen=True, eq=False)
class Update:
    """Tensors to load, by their checkpoint names, and the weights that are served afterwards."""

    tensors: Mapping[str, Tensor]
    snapshot: Snapshot
    copy: NodeCopy


@dataclass(frozen=True, eq=False)
class _Read:
    """A snapshot that was read and verified."""

    snapshot: Snapshot
    copy: NodeCopy


class SnapshotSource:
    """Reads snapshots for one model, and remembers which was loaded last.

    A snapshot is read into memory that all workers of this machine share (``node_copy``), by one of
    them. From the first delta on what is served stays there, because vLLM stores its own weights in
    another layout. A deployment that loads only bases keeps nothing.
    """

    def __init__(self) -> None:
        self._identity: str | None = None
        self._copy: NodeCopy | None = None
        self._keeps_copy = False
        self._reading: tuple[Path, str, Future[_Read]] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hearth-snapshots")

    def prepare(self, root: Path, identity: str) -> bool:
        """Whether a snapshot was read; the first call has it read on another thread.

        Raises:
            NotFoundError: the snapshot is not there.
            EngineError: it is damaged, or its weights are not those that its manifest promises.
        """
        if self._reading is None or self._reading[:2] != (root, identity):
            self._reading = (root, identity, self._thread.submit(self._read, root, identity))
        reading = self._reading[2]
        if not reading.done():
            return False
        if reading.exception() is not None:
            self._reading = None
        reading.result()
        return True

    def take(self, root: Path, identity: str) -> Update:
        """The update to a snapshot under ``root``, prepared or not; changes nothing that is served.

        Of a delta whose parent was loaded last it has the tensors of the changed blocks; otherwise
        all tensors. Errors are those of ``prepare``.
        """
        reading, self._reading = self._reading, None
        if reading is not None and reading[:2] == (root, identity):
            read = reading[2].result()
        else:
            # On that thread as well: the one before may still read.
            read = self._thread.submit(self._read, root, identity).result()
        snapshot, tensors = read.snapshot, read.copy.tensors
        if snapshot.kind == "delta" and snapshot.parent == self._identity:
            tensors = select_blocks(tensors, list_changed(snapshot.tensors))
        return Update(tensors, snapshot, read.copy)

    def note_loaded(self, update: Update) -> None:
        """Note that an update is served."""
        self._keeps_copy |= update.snapshot.kind == "delta"
        self._identity = update.snapshot.identity
        self._copy = update.copy if self._keeps_copy else None

    def forget(self) -> None:
        """Note that it is unknown what is served."""
        self._identity = self._copy = None

    def _read(self, root: Path, identity: str) -> _Read:
        store = FolderSnapshotStore(root)
        snapshot = store.open(identity)
        assert snapshot.entries is not None, "it is a folder's"
        copies = NodeCopies(root)

        def fill(targets: Mapping[str, Tensor]) -> None:
            if snapshot.kind != "delta":
                store.read_into(identity, targets)
                return
            served = self._find_parent(snapshot, copies, store)
            if served is None:
                for name, tensor in resolve(store, identity).tensors.items():
                    targets[name].copy_(tensor)
                return
            changed = list_changed(snapshot.tensors)
            for name, tensor in served.tensors.items():
                if name not in changed:
                    targets[name].copy_(tensor)
            apply_verified(snapshot, served.tensors, served.entries, targets)

        return _Read(snapshot, copies.find_or_make(snapshot.entries, fill))

    def _find_parent(
        self, snapshot: Snapshot, copies: NodeCopies, store: FolderSnapshotStore
    ) -> NodeCopy | None:
        """The weights that a delta changes, if this machine has a copy of them."""
        if self._copy is not None and self._copy.digest == snapshot.parent_digest:
            return self._copy
        if snapshot.parent not in store.names():
            return None
        entries = store.open(snapshot.parent).entries
        return None if entries is None else copies.find(entries)


def select_blocks(whole: Mapping[str, Tensor], changed: Iterable[str]) -> dict[str, Tensor]:
    """The tensors of ``whole`` that are in a block with a changed one.

    vLLM fuses several tensors of a block into one and packs it, so a block is loaded as a whole:
    all under ``model.layers.3``, or a module that is in no list.
    """
    blocks = {block_of(name) for name in changed}
    return {name: tensor for name, tensor in whole.items() if block_of(name) in blocks}


def block_of(name: str) -> str:
    """The block that a tensor belongs to."""
    match = _BLOCK.match(name)
    return match[1] if match else name.rpartition(".")[0]
