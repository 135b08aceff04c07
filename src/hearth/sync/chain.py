"""Chains of snapshots: a base and the deltas on top of it. Made here, and made whole again here."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from hearth.errors import EngineError, HearthError, NotFoundError, RequestError
from hearth.sync import delta
from hearth.sync.manifest import TensorEntry, digest, fingerprints
from hearth.sync.store import Snapshot, SnapshotStore, no_parent

logger = logging.getLogger(__name__)

_LONGEST = 64
_MOST_BASES = 2


def resolve(store: SnapshotStore, identity: str) -> Snapshot:
    """The snapshot with all its tensors: a delta's base with every delta of the chain applied.

    Of a delta it comes back as a ``base`` under the delta's identity; every tensor was checked
    against the checksum in the delta's manifest.

    Raises:
        NotFoundError: the identity is not kept.
        EngineError: a link is missing, damaged, or not the one that the next was made on; it is
            named with what was expected and what was found.
    """
    links = [store.get(identity)]
    while (last := links[-1]).weights is None:
        links.append(_parent(store, last, [link.identity for link in links]))
    base = links.pop()
    if not links and base.kind != "delta":
        return base
    assert base.weights is not None
    tensors: Mapping[str, Tensor] = base.weights
    for link in reversed(links):
        tensors = {**tensors, **delta.apply(link.tensors, tensors)}
    top = links[0] if links else base
    if links:
        _check(top, fingerprints(tensors))
    return replace(top, kind="base", tensors=tensors, whole=None, parent=None, parent_digest=None)


def check_previous(snapshot: Snapshot, previous: str) -> None:
    """Refuse a delta on another snapshot than ``previous``, which its sender says it is on.

    A trainer may have given a base where a delta was asked for; that goes on top of anything.

    Raises:
        EngineError: it is on another one.
    """
    if snapshot.kind == "delta" and snapshot.parent != previous:
        raise EngineError(
            f"previous_snapshot_identity must be the parent of delta {snapshot.identity!r}: "
            f"expected {snapshot.parent!r}, found {previous!r}"
        )


def apply_verified(
    top: Snapshot, served: Mapping[str, Tensor], entries: Mapping[str, TensorEntry] | None
) -> dict[str, Tensor]:
    """The tensors that a delta changes, made from those that are served (its parent's), verified.

    ``entries`` are the parent's where they are known: what the delta leaves alone is hashed only
    without them.

    Raises:
        EngineError: the result would differ from the delta's manifest.
    """
    if entries is not None:
        _check_parent(top, entries)
    fresh = delta.apply(top.tensors, served)
    left = {name: one for name, one in served.items() if name not in fresh}
    _check(top, {**(entries or fingerprints(left)), **fingerprints(fresh)})
    return fresh


class Published:
    """What one policy has published last, from which its next delta is made.

    It holds one copy of the weights: the snapshot's own tensors where the store shares them, else
    a copy in CPU memory that every delta brings up to date.
    """

    def __init__(self) -> None:
        self._last: _Last | None = None

    def forget(self) -> None:
        """Make the next snapshot a base."""
        self._last = None

    def publish(
        self,
        store: SnapshotStore,
        identity: str,
        base_model: str,
        tensors: Mapping[str, Tensor],
        metadata: Mapping[str, Any],
        *,
        as_delta: bool,
    ) -> None:
        """Put a snapshot of live tensors into the store.

        A delta was asked for and a base made: there is nothing to make it from, the store has
        dropped that, or the chain has grown so long that starting anew is cheaper.

        Raises:
            RequestError: the identity is no valid name or is taken; the next one is a base.
        """
        last = self._last if as_delta else None
        if last is not None and not _can_follow(last, store, identity, tensors):
            last = None
        # After a failure nobody knows what is kept, so that the next one is a base.
        self._last = None
        if last is None:
            self._last = _publish_base(store, identity, base_model, tensors, metadata)
        else:
            self._last = _publish_delta(store, last, identity, base_model, tensors, metadata)
        logger.debug("published %s on top of %s", identity, last and last.identity)


@dataclass
class _Last:
    identity: str
    tensors: dict[str, Tensor]
    base_bytes: int
    links: int = 0
    delta_bytes: int = 0


def _can_follow(
    last: _Last, store: SnapshotStore, identity: str, tensors: Mapping[str, Tensor]
) -> bool:
    return (
        # Saved a second time: the store says whether it is the same.
        last.identity != identity
        and last.identity in store.names()
        and last.links < _LONGEST
        and last.delta_bytes < _MOST_BASES * last.base_bytes
        and delta.is_alike(last.tensors, tensors)
    )


def _publish_base(
    store: SnapshotStore,
    identity: str,
    base_model: str,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, Any],
) -> _Last:
    copies = _copies(tensors, on_cpu=not store.shares_tensors)
    store.put(Snapshot(identity, "base", base_model, copies, dict(metadata)))
    return _Last(identity, copies, base_bytes=_num_bytes(copies))


def _publish_delta(
    store: SnapshotStore,
    last: _Last,
    identity: str,
    base_model: str,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, Any],
) -> _Last:
    # A store that writes them out can do so from the live ones: nothing changes them meanwhile.
    is_shared = store.shares_tensors
    fresh = _copies(tensors, on_cpu=False) if is_shared else _on_cpu(tensors)
    parts = delta.encode(last.tensors, fresh)
    changed = delta.changed_names(parts)
    whole = {name: one if name in changed else last.tensors[name] for name, one in fresh.items()}
    store.put(
        Snapshot(
            identity, "delta", base_model, parts, dict(metadata), parent=last.identity, whole=whole
        )
    )
    if not is_shared:
        for name in changed:
            last.tensors[name].copy_(whole[name])
    return _Last(
        identity,
        whole if is_shared else last.tensors,
        last.base_bytes,
        last.links + 1,
        last.delta_bytes + _num_bytes(parts),
    )


def _parent(store: SnapshotStore, child: Snapshot, seen: list[str]) -> Snapshot:
    """The snapshot that a delta was made on."""
    if child.parent in seen:
        raise EngineError(
            f"the chain of {seen[0]!r} must end in a base, got {child.parent!r} as the parent of "
            f"{child.identity!r} for the second time"
        )
    try:
        parent = store.get(child.parent or "")
    except (NotFoundError, RequestError):
        raise no_parent(child, store.names()) from None
    except HearthError as error:
        raise EngineError(
            f"delta {child.identity!r} must follow its parent {child.parent!r}: {error}"
        ) from None
    if parent.kind == "lora" or parent.base_model != child.base_model:
        raise EngineError(
            f"delta {child.identity!r} must follow whole weights of {child.base_model!r}, got "
            f"{parent.identity!r}: {parent.kind} of {parent.base_model!r}"
        )
    if parent.entries is not None:
        _check_parent(child, parent.entries)
    return parent


def _check_parent(child: Snapshot, entries: Mapping[str, TensorEntry]) -> None:
    if child.parent_digest is not None and child.parent_digest != (found := digest(entries)):
        raise EngineError(
            f"delta {child.identity!r} must go on top of the weights of {child.parent!r}: expected "
            f"{child.parent_digest}, found {found}"
        )


def _check(top: Snapshot, found: Mapping[str, TensorEntry]) -> None:
    """Refuse weights that are not those of a delta's manifest."""
    expected = top.entries or {}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise EngineError(
                f"tensor {name!r} must be that of snapshot {top.identity!r} once {top.parent!r} "
                f"has the delta applied: expected {expected.get(name)}, found {found.get(name)}"
            )


def _copies(tensors: Mapping[str, Tensor], *, on_cpu: bool) -> dict[str, Tensor]:
    return {
        name: one.detach().to("cpu" if on_cpu else one.device, copy=True)
        for name, one in tensors.items()
    }


def _on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: one.detach().cpu() for name, one in tensors.items()}


def _num_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
