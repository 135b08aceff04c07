"""A snapshot of weights, and the interface of stores that keep snapshots."""

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
    """Weights at one moment. The tensors are read-only: a deployment may serve from them.

    ``base`` holds all weights under the model's own names (``models.loading.base_tensors``);
    ``delta`` holds their differences from snapshot ``parent`` (``sync.delta`` has the format);
    ``lora`` holds an adapter under PEFT's names, and ``metadata["lora"]`` its options.
    """

    identity: str
    kind: SnapshotKind
    base_model: str
    """Name of the model of these weights or of this adapter."""
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, Any] = field(default_factory=lambda: {})
    """JSON values only."""
    parent: str | None = None
    """Of a delta: the identity of the snapshot that it changes."""
    created_s: float = field(default_factory=time.time)
    """Seconds since the epoch."""
    whole: Mapping[str, Tensor] | None = None
    """Of a delta: the whole weights after it, if available; no folder keeps them."""
    entries: Mapping[str, TensorEntry] | None = None
    """``manifest.fingerprints`` of the whole weights, if read from a manifest."""
    parent_digest: str | None = None
    """``manifest.digest`` of the parent's entries, if read from a manifest."""
    source: SnapshotStore | None = None
    """Of a delta from a folder: the store that has the rest of its chain."""

    @classmethod
    def capture(
        cls,
        identity: str,
        kind: SnapshotKind,
        base_model: str,
        tensors: Mapping[str, Tensor],
        metadata: Mapping[str, Any] | None = None,
    ) -> Snapshot:
        """A snapshot with copies of the tensors, on their device."""
        copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        return cls(identity, kind, base_model, copies, dict(metadata or {}))

    @property
    def weights(self) -> Mapping[str, Tensor] | None:
        """All tensors of the weights; None for a delta that is not resolved."""
        return self.whole if self.kind == "delta" else self.tensors


class SnapshotStore(Protocol):
    """Snapshots by identity: memory, folders, Ray. Safe to use from several threads."""

    @property
    def shares_tensors(self) -> bool:
        """Whether ``get`` returns the tensors of ``put``, which must then never change."""
        ...

    def put(self, snapshot: Snapshot) -> None:
        """Store a snapshot; does nothing if the identity has the same weights already.

        Raises:
            RequestError: the identity is no valid name, or is taken by other weights.
            EngineError: it is a delta, and its parent is not kept.
        """
        ...

    def get(self, identity: str) -> Snapshot:
        """The snapshot of an identity; ``sync.chain.resolve`` resolves a delta.

        Raises:
            NotFoundError: it is not kept; the message lists the kept ones.
            EngineError: its data are damaged.
        """
        ...

    def names(self) -> list[str]:
        """Identities, oldest first."""
        ...
