"""Reads the tensors of an update from a snapshot folder, and verifies them before any is loaded.

Needs torch and safetensors, but not vLLM, so that it can be tested without it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from hearth.sync.chain import apply_verified, resolve
from hearth.sync.manifest import TensorEntry
from hearth.sync.store import FolderSnapshotStore

_BLOCK = re.compile(r"(.*?\.\d+)\.")


@dataclass(frozen=True, eq=False)
class Update:
    """Tensors to load, by their checkpoint names, and what is served afterwards."""

    tensors: Mapping[str, Tensor]
    identity: str
    entries: Mapping[str, TensorEntry] | None
    whole: Mapping[str, Tensor] | None
    """All weights, if the next delta will be applied to them."""


class SnapshotSource:
    """Reads snapshots for one model, and remembers which was loaded last.

    From the first delta on it keeps a copy of the weights in CPU memory, because vLLM stores its
    own in another layout. A deployment that loads only bases keeps none.
    """

    def __init__(self) -> None:
        self._identity: str | None = None
        self._entries: Mapping[str, TensorEntry] | None = None
        self._whole: Mapping[str, Tensor] | None = None
        self._keeps_copy = False

    def read(self, root: Path, identity: str) -> Update:
        """The update to a snapshot under ``root``; changes nothing that is served.

        Of a delta whose parent was loaded last it has the tensors of the changed blocks; otherwise
        all tensors.

        Raises:
            NotFoundError: the snapshot is not there.
            EngineError: it is damaged, or its weights are not those that its manifest promises.
        """
        store = FolderSnapshotStore(root)
        snapshot = store.get(identity)
        if snapshot.kind != "delta":
            whole = snapshot.tensors if self._keeps_copy else None
            return Update(snapshot.tensors, identity, snapshot.entries, whole)
        self._keeps_copy = True
        if self._whole is None or snapshot.parent != self._identity:
            resolved = resolve(store, identity)
            return Update(resolved.tensors, identity, snapshot.entries, resolved.tensors)
        fresh = apply_verified(snapshot, self._whole, self._entries)
        whole = {**self._whole, **fresh}
        return Update(select_blocks(whole, fresh), identity, snapshot.entries, whole)

    def note_loaded(self, update: Update) -> None:
        """Note that an update is served."""
        self._identity, self._entries = update.identity, update.entries
        self._whole = update.whole

    def forget(self) -> None:
        """Note that it is unknown what is served."""
        self._identity = self._entries = self._whole = None


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
