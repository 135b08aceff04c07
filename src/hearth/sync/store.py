"""Snapshots of weights, and where they are kept between a trainer and a deployment."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import Tensor

from hearth.errors import ConfigError, EngineError, NotFoundError, RequestError
from hearth.sync.manifest import (
    check_name,
    folder_names,
    read_manifest,
    read_tensors,
    write_folder,
)

SnapshotKind = Literal["base", "lora"]
_FORMAT = "hearth-snapshot-1"
_DATA = "weights"


@dataclass(frozen=True, eq=False)
class Snapshot:
    """Weights at one moment. Nobody writes to the tensors: a deployment may serve from them.

    ``base`` holds all weights under the model's own names (``models.loading.base_tensors``);
    ``lora`` holds an adapter under PEFT's names, and ``metadata["lora"]`` its options.
    """

    identity: str
    kind: SnapshotKind
    base_model: str
    """Name of the model that these weights belong to, or that the adapter adapts."""
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, Any] = field(default_factory=lambda: {})
    """JSON values only."""

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


class SnapshotStore(Protocol):
    """Keeps snapshots by identity. Safe to use from several threads."""

    def put(self, snapshot: Snapshot) -> None:
        """Keep a snapshot.

        Raises:
            RequestError: the identity is no valid name, or is taken.
        """
        ...

    def get(self, identity: str) -> Snapshot:
        """The snapshot of an identity.

        Raises:
            NotFoundError: it is not kept; the message lists what is.
            EngineError: its data are damaged.
        """
        ...

    def names(self) -> list[str]:
        """Identities that are kept, oldest first."""
        ...


class MemorySnapshotStore:
    """The newest ``keep`` snapshots, in this process; ``put`` and ``get`` copy nothing.

    Raises:
        ConfigError: ``keep`` is below 1.
    """

    def __init__(self, keep: int = 4) -> None:
        if keep < 1:
            raise ConfigError(f"keep must be >= 1, got {keep}: the newest snapshot always stays")
        self._keep = keep
        self._snapshots: dict[str, Snapshot] = {}
        self._lock = threading.Lock()

    def put(self, snapshot: Snapshot) -> None:
        """Keep a snapshot and let the oldest beyond ``keep`` go."""
        check_name(snapshot.identity, "identity")
        with self._lock:
            if snapshot.identity in self._snapshots:
                raise RequestError(f"identity must be new, got {snapshot.identity!r}: it is taken")
            self._snapshots[snapshot.identity] = snapshot
            for identity in list(self._snapshots)[: -self._keep]:
                del self._snapshots[identity]

    def get(self, identity: str) -> Snapshot:
        """The very object that was put."""
        with self._lock:
            if identity in self._snapshots:
                return self._snapshots[identity]
            raise _unknown(identity, list(self._snapshots))

    def names(self) -> list[str]:
        """Identities, oldest first."""
        with self._lock:
            return list(self._snapshots)


class FolderSnapshotStore:
    """One folder per snapshot under ``root``: ``manifest.json`` and ``weights.safetensors``."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def put(self, snapshot: Snapshot) -> None:
        """Write the snapshot's folder; it appears complete or not at all."""
        manifest = {
            "format": _FORMAT,
            "identity": snapshot.identity,
            "kind": snapshot.kind,
            "base_model": snapshot.base_model,
            "metadata": dict(snapshot.metadata),
        }
        folder = self._root / check_name(snapshot.identity, "identity")
        write_folder(folder, manifest, {_DATA: snapshot.tensors})

    def get(self, identity: str) -> Snapshot:
        """The snapshot on the CPU, every tensor checked against its checksum."""
        folder = self._root / check_name(identity, "identity")
        if not folder.is_dir():
            raise _unknown(identity, self.names())
        manifest = read_manifest(folder)
        if manifest.get("format") != _FORMAT:
            raise EngineError(
                f"{identity!r} must be a sampler snapshot ({_FORMAT}), got "
                f"{manifest.get('format')!r}"
            )
        tensors = read_tensors(folder, manifest, _DATA)
        return Snapshot(
            identity, manifest["kind"], manifest["base_model"], tensors, manifest["metadata"]
        )

    def names(self) -> list[str]:
        """Identities, oldest first."""
        return folder_names(self._root)


def _unknown(identity: str, known: list[str]) -> NotFoundError:
    return NotFoundError(
        f"snapshot must be one of {known}, got {identity!r}: it was never saved here, or newer "
        "ones have taken its place"
    )
