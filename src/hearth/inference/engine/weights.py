"""Replaces the module's weights with a snapshot's: all of them, or none.

In two steps: ``prepare`` applies, checks and converts while the engine runs; ``swap_in`` only
assigns tensors, between two of the engine's steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from hearth.errors import EngineError
from hearth.models.loading import (
    LoadedModel,
    base_tensors,
    check_same_tensors,
    describe_non_finite,
    own_weights,
)
from hearth.models.lora import LoraOptions, adapter_tensors, attach_lora, detach_lora
from hearth.sync.chain import apply_verified, resolve
from hearth.sync.manifest import TensorEntry
from hearth.sync.store import Snapshot
from hearth.threads import use_one_if_small

_ALIGNMENT = 64
_PROBE_TOKENS = (1, 2, 0, 1)


@dataclass(frozen=True, eq=False)
class PreparedSnapshot:
    """A snapshot that is ready to be swapped in."""

    snapshot: Snapshot
    values: Mapping[str, Tensor]
    """New tensors by name; those that stay as they are may be absent."""
    required_parent: str | None = None
    """The snapshot that must be served until then; None for any."""


class ServedWeights:
    """A module and the snapshot that it computes with. One thread swaps, others may prepare.

    ``in_place`` copies new weights into the old tensors, which recorded steps read; None does so on
    a GPU. Otherwise the module gets the given tensors themselves. Without
    ``takes_adapter`` no snapshot may be an adapter: requests name theirs.
    """

    def __init__(
        self, loaded: LoadedModel, *, in_place: bool | None = None, takes_adapter: bool = True
    ) -> None:
        self._loaded = loaded
        self._takes_adapter = takes_adapter
        is_on_gpu = torch.device(loaded.device).type == "cuda"
        self._in_place = is_on_gpu if in_place is None else in_place
        self._identity: str | None = None
        self._entries: Mapping[str, TensorEntry] | None = None

    def prepare(self, snapshot: Snapshot) -> PreparedSnapshot:
        """Do everything for a snapshot that can fail or is slow; changes nothing.

        Of a delta whose parent is served only the changed tensors are made. Any other delta is
        resolved from its store. Tensors of the right dtype and device are not copied.

        Raises:
            EngineError: the snapshot is of another base model, a name is missing or unknown, a
                shape differs, a weight is not finite, or a delta has no chain, or not the weights
                that it promises.
        """
        loaded = self._loaded
        if snapshot.base_model not in (loaded.name, loaded.source):
            raise EngineError(
                f"snapshot {snapshot.identity!r} must be of {loaded.name!r}, which is served, got "
                f"one of {snapshot.base_model!r}"
            )
        if snapshot.kind == "lora" and not self._takes_adapter:
            raise EngineError(
                f"snapshot {snapshot.identity!r} must be a base or a delta, got an adapter: "
                "requests name adapters of a deployment that has max_adapters"
            )
        if snapshot.kind == "lora":
            _check_finite(snapshot.tensors, snapshot.identity)
            return PreparedSnapshot(snapshot, snapshot.tensors)
        own = base_tensors(loaded.module)
        if snapshot.weights is None and self._is_parent_of(snapshot, own):
            served = {name: tensor.detach() for name, tensor in own.items()}
            fresh = apply_verified(snapshot, served, self._entries)
            values = _convert(own, fresh)
            _check_finite(values, snapshot.identity)
            return PreparedSnapshot(snapshot, values, required_parent=snapshot.parent)
        snapshot = self._resolve_whole(snapshot)
        weights = snapshot.weights or {}
        _check(own, weights, snapshot.identity)
        values = _convert(own, weights)
        _check_finite(values, snapshot.identity)
        return PreparedSnapshot(snapshot, values)

    def swap_in(self, prepared: PreparedSnapshot) -> None:
        """Compute with the snapshot's weights from now on.

        A ``base`` snapshot removes an adapter; a ``lora`` snapshot sets its own.

        Raises:
            EngineError: an adapter does not fit, a delta was prepared for another snapshot than
                the one that is served, or the model computes no numbers with the new weights;
                nothing was changed.
        """
        snapshot = prepared.snapshot
        if prepared.required_parent is not None and prepared.required_parent != self._identity:
            raise _parent_error(snapshot, self._identity)
        if snapshot.kind == "lora":
            _adopt_adapter(self._loaded, snapshot, in_place=self._in_place)
        else:
            _probe(self._loaded, prepared.values, snapshot.identity)
            if self._loaded.lora is not None:
                detach_lora(self._loaded)
            if self._in_place:
                own_weights(self._loaded)
            _assign(base_tensors(self._loaded.module), prepared.values, in_place=self._in_place)
            # What it was loaded with is computed with no more.
            self._loaded.common = None
        self._identity = snapshot.identity
        self._entries = snapshot.entries

    def _is_parent_of(self, snapshot: Snapshot, own: Mapping[str, Tensor]) -> bool:
        """Whether the module holds, bit for bit, the weights of a delta's parent."""
        entries = snapshot.entries or {}
        return (
            snapshot.parent is not None
            and snapshot.parent == self._identity
            and entries.keys() == own.keys()
            and all(f"torch.{entries[name]['dtype']}" == str(own[name].dtype) for name in own)
        )

    def _resolve_whole(self, snapshot: Snapshot) -> Snapshot:
        if snapshot.weights is not None:
            return snapshot
        if snapshot.source is None:
            raise _parent_error(snapshot, self._identity)
        try:
            return resolve(snapshot.source, snapshot.identity)
        except EngineError as error:
            if snapshot.parent == self._identity:
                raise
            raise EngineError(f"{_parent_error(snapshot, self._identity)}; {error}") from None


def _parent_error(snapshot: Snapshot, served: str | None) -> EngineError:
    return EngineError(
        f"delta {snapshot.identity!r} must go on top of what is served: expected parent "
        f"{snapshot.parent!r}, found {served!r}"
    )


def _adopt_adapter(loaded: LoadedModel, snapshot: Snapshot, *, in_place: bool) -> None:
    # The seed only initializes training; the adapter's output does not depend on it.
    options = replace(LoraOptions.from_metadata(snapshot.metadata), seed=0)
    before = loaded.lora
    own = {} if before is None else adapter_tensors(loaded)
    if before == options:
        _check(own, snapshot.tensors, snapshot.identity)
        values = _convert(own, snapshot.tensors)
        _probe(loaded, values, snapshot.identity)
        _assign(own, values, in_place=in_place)
        return
    old = {name: tensor.data for name, tensor in own.items()}
    try:
        _replace_adapter(loaded, options)
        own = adapter_tensors(loaded)
        _check(own, snapshot.tensors, snapshot.identity)
        values = _convert(own, snapshot.tensors)
        _probe(loaded, values, snapshot.identity)
    except Exception:
        _replace_adapter(loaded, before)
        if before is not None:
            _assign(adapter_tensors(loaded), old, in_place=in_place)
        raise
    _assign(own, values, in_place=in_place)


def _replace_adapter(loaded: LoadedModel, options: LoraOptions | None) -> None:
    if loaded.lora is not None:
        detach_lora(loaded)
    if options is not None:
        attach_lora(loaded, options)


def _check_finite(values: Mapping[str, Tensor], identity: str) -> None:
    # Attention turns a broken query into zeros: the probe does not see every such weight.
    if (found := describe_non_finite(values)) is not None:
        raise EngineError(
            f"weights of snapshot {identity!r} must be finite in the dtype that is served, got "
            f"{found}: save a snapshot of good weights, such as an older checkpoint's"
        )


@torch.inference_mode()
def _probe(loaded: LoadedModel, values: Mapping[str, Tensor], identity: str) -> None:
    """Compute a few tokens with new weights, which are not assigned.

    Raises:
        EngineError: its logits are not finite.
    """
    own = {
        **base_tensors(loaded.module),
        **({} if loaded.lora is None else adapter_tensors(loaded)),
    }
    given = {id(own[name]): value for name, value in values.items()}
    state = loaded.module.state_dict(keep_vars=True)
    swapped = {name: given[id(own)] for name, own in state.items() if id(own) in given}
    tokens = [token % loaded.vocab_size for token in _PROBE_TOKENS]
    input_ids = torch.tensor([tokens], device=loaded.device)
    with use_one_if_small(sum(value.numel() for value in values.values())):
        output: Any = functional_call(
            loaded.module,
            swapped,
            kwargs={"input_ids": input_ids, "use_cache": False},
            tie_weights=False,
        )
    # A model may rule tokens out with -inf, but not all of them.
    highest = output.logits.float().amax(-1)
    if not bool(highest.isfinite().all()):
        raise EngineError(
            f"logits of snapshot {identity!r} must be finite, got {highest.flatten().tolist()}: "
            "its weights overflow in this dtype; what was served before is served "
            "on. Save a snapshot of good weights, such as an older checkpoint's"
        )


def _check(own: Mapping[str, Tensor], given: Mapping[str, Tensor], identity: str) -> None:
    try:
        check_same_tensors(own, given)
    except EngineError as error:
        raise EngineError(
            f"snapshot {identity!r} must fit the model that is served: {error}"
        ) from None


def _convert(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The given tensors in the module's dtypes and on its device; copied only where needed."""
    converted: dict[str, Tensor] = {}
    for name, tensor in given.items():
        target = own[name]
        value = tensor.detach().to(device=target.device, dtype=target.dtype).contiguous()
        # sgemm's rounding may depend on alignment, and a stored tensor may have any.
        converted[name] = value.clone() if value.data_ptr() % _ALIGNMENT else value
    return converted


def _assign(own: Mapping[str, Tensor], values: Mapping[str, Tensor], *, in_place: bool) -> None:
    for name, value in values.items():
        if in_place:
            own[name].data.copy_(value)
        else:
            own[name].data = value
