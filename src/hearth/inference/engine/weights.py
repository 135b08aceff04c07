"""How a snapshot takes the place of the module's weights: whole, or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from hearth.errors import EngineError
from hearth.models.loading import LoadedModel, base_tensors, check_same_tensors
from hearth.models.lora import LoraOptions, adapter_tensors, attach_lora, detach_lora
from hearth.sync.store import Snapshot

_ALIGNMENT = 64


def adopt(loaded: LoadedModel, snapshot: Snapshot) -> None:
    """Compute with the snapshot's weights from now on.

    Tensors of the right dtype and device are taken as they are, without a copy. A ``base``
    snapshot takes an adapter away; a ``lora`` snapshot puts its own on top of the base weights.

    Raises:
        EngineError: a name is missing or unknown, or a shape differs; nothing was changed.
    """
    if snapshot.kind == "base":
        own = base_tensors(loaded.module)
        _check(own, snapshot)
        if loaded.lora is not None:
            detach_lora(loaded)
        _take(own, snapshot.tensors)
    else:
        _adopt_adapter(loaded, snapshot)


def _adopt_adapter(loaded: LoadedModel, snapshot: Snapshot) -> None:
    # The seed says where training started; it is no part of what the adapter computes.
    options = replace(LoraOptions.from_metadata(snapshot.metadata), seed=0)
    before = loaded.lora
    if before == options:
        own = adapter_tensors(loaded)
        _check(own, snapshot)
        _take(own, snapshot.tensors)
        return
    old = dict(_values(adapter_tensors(loaded))) if before is not None else {}
    try:
        _replace_adapter(loaded, options)
        own = adapter_tensors(loaded)
        _check(own, snapshot)
    except Exception:
        _replace_adapter(loaded, before)
        if before is not None:
            _take(adapter_tensors(loaded), old)
        raise
    _take(own, snapshot.tensors)


def _replace_adapter(loaded: LoadedModel, options: LoraOptions | None) -> None:
    if loaded.lora is not None:
        detach_lora(loaded)
    if options is not None:
        attach_lora(loaded, options)


def _check(own: Mapping[str, Tensor], snapshot: Snapshot) -> None:
    try:
        check_same_tensors(own, snapshot.tensors)
    except EngineError as error:
        raise EngineError(
            f"snapshot {snapshot.identity!r} must fit the model that is served: {error}"
        ) from None


def _values(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.data for name, tensor in tensors.items()}


def _take(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    for name, target in own.items():
        value = given[name].detach().to(device=target.device, dtype=target.dtype).contiguous()
        # sgemm may round by alignment, and a file's mapping puts tensors anywhere.
        target.data = value.clone() if value.data_ptr() % _ALIGNMENT else value
