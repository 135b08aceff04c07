"""Which tensors an update loads: those of a snapshot folder, proved before anything is changed.

Needs torch and safetensors, and nothing of vLLM, so that it can be tested without.
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
    """Tensors to load, by their checkpoint names, and what is served once they are."""

    tensors: Mapping[str, Tensor]
    identity: str
    entries: Mapping[str, TensorEntry] | None
    whole: Mapping[str, Tensor] | None
    """All weights, where the next delta is to be applied to them."""


class SnapshotSource:
    """Reads snapshots for one model, and remembers which was loaded last.

    With the first delta it begins to hold a copy of the weights in CPU memory, because vLLM lays
    its own out anew; a deployment that only ever loads bases holds none.
    """

    def __init__(self) -> None:
        self._identity: str | None = None
        self._entries: Mapping[str, TensorEntry] | None = None
        self._whole: Mapping[str, Tensor] | None = None
        self._holds = False

    def read(self, root: Path, identity: str) -> Update:
        """The update to a snapshot under ``root``; changes nothing that is served.

        Of a delta on what was loaded last, the tensors of the blocks that it changes; of anything
        else all tensors.

        Raises:
            NotFoundError: the snapshot is not there.
            EngineError: it is damaged, or its weights are not those that its manifest promises.
        """
        store = FolderSnapshotStore(root)
        snapshot = store.get(identity)
        if snapshot.kind != "delta":
            whole = snapshot.tensors if self._holds else None
            return Update(snapshot.tensors, identity, snapshot.entries, whole)
        self._holds = True
        if self._whole is None or snapshot.parent != self._identity:
            resolved = resolve(store, identity)
            return Update(resolved.tensors, identity, snapshot.entries, resolved.tensors)
        fresh = apply_verified(snapshot, self._whole, self._entries)
        whole = {**self._whole, **fresh}
        return Update(of_blocks(whole, fresh), identity, snapshot.entries, whole)

    def loaded(self, update: Update) -> None:
        """Note that an update is served."""
        self._identity, self._entries = update.identity, update.entries
        self._whole = update.whole

    def forget(self) -> None:
        """Note that nobody knows what is served."""
        self._identity = self._entries = self._whole = None


def of_blocks(whole: Mapping[str, Tensor], changed: Iterable[str]) -> dict[str, Tensor]:
    """The tensors of ``whole`` that stand in a block with a changed one.

    vLLM fuses several tensors of a block into one and packs that, so a block is loaded together:
    all under ``model.layers.3``, or a module that is in no list.
    """
    blocks = {block_of(name) for name in changed}
    return {name: one for name, one in whole.items() if block_of(name) in blocks}


def block_of(name: str) -> str:
    """The block that a tensor belongs to."""
    found = _BLOCK.match(name)
    return found[1] if found else name.rpartition(".")[0]
