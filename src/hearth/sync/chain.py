"""Chains of snapshots, a base and the deltas on top of it: published and resolved."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from hearth.errors import EngineError, HearthError, NotFoundError, RequestError
from hearth.sync import delta
from hearth.sync.manifest import TensorEntry, digest, fingerprints
from hearth.sync.store import Snapshot, SnapshotStore, missing_parent

logger = logging.getLogger(__name__)

_MOST_LINKS = 64
_MOST_DELTA_SHARE = 2  # of the base's bytes, all deltas together


def resolve(store: SnapshotStore, identity: str) -> Snapshot:
    """The snapshot with all its tensors: a delta's base with every delta of the chain applied.

    A delta becomes a ``base`` under the delta's identity; every tensor is checked against the
    checksum in the delta's manifest.

    Raises:
        NotFoundError: the identity is not kept.
        EngineError: a link is missing, damaged, or not the parent of the next one; the message
            names it, with expected and found value.
    """
    links = [store.get(identity)]
    while (last := links[-1]).weights is None:
        links.append(_get_parent(store, last, [link.identity for link in links]))
    base = links.pop()
    if not links and base.kind != "delta":
        return base
    assert base.weights is not None
    tensors: Mapping[str, Tensor] = base.weights
    for link in reversed(links):
        tensors = {**tensors, **delta.apply(link.tensors, tensors)}
    top = links[0] if links else base
    if links:
        _check_entries(top, fingerprints(tensors))
    return replace(top, kind="base", tensors=tensors, whole=None, parent=None, parent_digest=None)


def check_previous(snapshot: Snapshot, previous: str) -> None:
    """Refuse a delta whose parent is not ``previous``, the parent that the request names.

    A base passes: a trainer may publish one although a delta was requested.

    Raises:
        EngineError: the parent is another snapshot.
    """
    if snapshot.kind == "delta" and snapshot.parent != previous:
        raise EngineError(
            f"previous_snapshot_identity must be the parent of delta {snapshot.identity!r}: "
            f"expected {snapshot.parent!r}, found {previous!r}"
        )


def apply_verified(
    top: Snapshot,
    served: Mapping[str, Tensor],
    entries: Mapping[str, TensorEntry] | None,
    into: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """The tensors that a delta changes, computed from the served ones (its parent's) and verified.

    ``entries`` are the parent's, if known: without them unchanged tensors are hashed too. ``into``
    is that of ``delta.apply``.

    Raises:
        EngineError: the result differs from the delta's manifest.
    """
    if entries is not None:
        _check_parent(top, entries)
    fresh = delta.apply(top.tensors, served, into)
    unchanged = {name: tensor for name, tensor in served.items() if name not in fresh}
    _check_entries(top, {**(entries or fingerprints(unchanged)), **fingerprints(fresh)})
    return fresh


class Published:
    """The last snapshot of one policy, from which its next delta is made.

    It holds one copy of the weights: the snapshot's own tensors if the store shares them, else a
    copy in CPU memory that every delta updates.
    """

    def __init__(self) -> None:
        self._last: _Last | None = None

    def forget(self) -> None:
        """Make the next snapshot a base."""
        self._last = None

    def can_follow(
        self, store: SnapshotStore, identity: str, tensors: Mapping[str, Tensor]
    ) -> bool:
        """Whether ``publish`` would make a delta of these tensors."""
        return self._last is not None and _can_follow(self._last, store, identity, tensors)

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
        """Put a snapshot of the tensors into the store, a base or, ``as_delta``, a delta.

        Instead of a delta it publishes a base if there is no last snapshot, if the store has
        dropped it, or if the chain is so long that a base is cheaper.

        Raises:
            RequestError: the identity is no valid name or is taken; the next one is a base.
        """
        last = self._last if as_delta else None
        if last is not None and not _can_follow(last, store, identity, tensors):
            last = None
        # After a failure the store's content is unknown, so the next snapshot is a base.
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
        # The same identity again: the store compares the weights.
        last.identity != identity
        and last.identity in store.names()
        and last.links < _MOST_LINKS
        and last.delta_bytes < _MOST_DELTA_SHARE * last.base_bytes
        and delta.has_same_layout(last.tensors, tensors)
    )


def _publish_base(
    store: SnapshotStore,
    identity: str,
    base_model: str,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, Any],
) -> _Last:
    copies = _copy(tensors, on_cpu=not store.shares_tensors)
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
    # A store that writes files may read the policy's own tensors: nothing changes them meanwhile.
    is_shared = store.shares_tensors
    fresh = _copy(tensors, on_cpu=False) if is_shared else _on_cpu(tensors)
    parts = delta.encode(last.tensors, fresh)
    changed = delta.list_encoded(parts)
    whole = {
        name: tensor if name in changed else last.tensors[name] for name, tensor in fresh.items()
    }
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


def _get_parent(store: SnapshotStore, child: Snapshot, seen: list[str]) -> Snapshot:
    """The parent of a delta."""
    if child.parent in seen:
        raise EngineError(
            f"the chain of {seen[0]!r} must end in a base, got {child.parent!r} as the parent of "
            f"{child.identity!r} for the second time"
        )
    try:
        parent = store.get(child.parent or "")
    except (NotFoundError, RequestError):
        raise missing_parent(child, store.names()) from None
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


def _check_entries(top: Snapshot, found: Mapping[str, TensorEntry]) -> None:
    """Refuse weights that are not those of a delta's manifest."""
    expected = top.entries or {}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise EngineError(
                f"tensor {name!r} must be that of snapshot {top.identity!r} once {top.parent!r} "
                f"has the delta applied: expected {expected.get(name)}, found {found.get(name)}"
            )


def _copy(tensors: Mapping[str, Tensor], *, on_cpu: bool) -> dict[str, Tensor]:
    return {
        name: tensor.detach().to("cpu" if on_cpu else tensor.device, copy=True)
        for name, tensor in tensors.items()
    }


def _on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu() for name, tensor in tensors.items()}


def _num_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
