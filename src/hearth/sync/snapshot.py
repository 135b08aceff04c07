"""What a snapshot of weights is, and what is asked of whoever keeps snapshots."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torch import Tensor

from hearth.sync.manifest import TensorEntry

SnapshotKind = Literal["base", "delta", "lora"]


@dataclass(frozen=True, eq=False)
class Snapshot:
    """Weights at one moment. Nobody writes to the tensors: a deployment may serve from them.

    ``base`` holds all weights under the model's own names (``models.loading.base_tensors``);
    ``delta`` holds what of them differs from snapshot ``parent`` (``sync.delta`` has the format);
    ``lora`` holds an adapter under PEFT's names, and ``metadata["lora"]`` its options.
    """

    identity: str
    kind: SnapshotKind
    base_model: str
    """Name of the model that these weights belong to, or that the adapter adapts."""
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, Any] = field(default_factory=lambda: {})
    """JSON values only."""
    parent: str | None = None
    """Of a delta: the identity that it goes on top of."""
    created_s: float = field(default_factory=time.time)
    """Seconds since the epoch."""
    whole: Mapping[str, Tensor] | None = None
    """Of a delta: all weights that it leads to, where they are at hand; no folder keeps them."""
    entries: Mapping[str, TensorEntry] | None = None
    """``manifest.fingerprints`` of the whole weights, as a manifest states them; None before."""
    parent_digest: str | None = None
    """``manifest.digest`` of the parent's entries, as the manifest states it."""
    source: SnapshotStore | None = None
    """Of a delta that was read: the store that has the rest of its chain."""

    @classmethod
    def capture(
        cls,
        identity: str,
        kind: SnapshotKind,
        base_model: str,
        tensors: Mapping[str, Tensor],
        metadata: Mapping[str, Any] | None = None,
    ) -> Snapshot:
        """A snapshot of live tensors: they are copied, on their device."""
        copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        return cls(identity, kind, base_model, copies, dict(metadata or {}))

    @property
    def weights(self) -> Mapping[str, Tensor] | None:
        """All tensors of the weights; None for a delta that must be resolved first."""
        return self.whole if self.kind == "delta" else self.tensors


@dataclass(frozen=True, kw_only=True)
class SnapshotFacts:
    """What a listing tells of a snapshot."""

    identity: str
    kind: SnapshotKind
    created_s: float
    """Seconds since the epoch."""
    base_model: str
    num_bytes: int
    """Of the files, or in memory of the snapshot's own tensors."""


class SnapshotStore(Protocol):
    """Keeps snapshots by identity. Safe to use from several threads."""

    @property
    def shares_tensors(self) -> bool:
        """Whether ``get`` gives the very tensors that were put: who put them may never write."""
        ...

    def put(self, snapshot: Snapshot) -> None:
        """Keep a snapshot; nothing happens when the identity has the same weights already.

        Raises:
            RequestError: the identity is no valid name, or is taken by other weights.
            EngineError: it is a delta, and its parent is not kept.
        """
        ...

    def get(self, identity: str) -> Snapshot:
        """The snapshot of an identity; a delta as it is (``sync.chain.resolve`` makes it whole).

        Raises:
            NotFoundError: it is not kept; the message lists what is.
            EngineError: its data are damaged.
        """
        ...

    def names(self) -> list[str]:
        """Identities that are kept, oldest first."""
        ...

    def facts(self) -> list[SnapshotFacts]:
        """What is kept, oldest first; snapshots that cannot be read are left out."""
        ...
