"""A weight-transfer engine of vLLM that loads Hearth's snapshot folders.

vLLM's own engines receive tensors over NCCL or CUDA's IPC. This one gets a folder's path and reads
it in each of a server's workers. It implements the interface that vLLM documents for such engines
(``vllm.distributed.weight_transfer.base``).
"""

# vLLM is not a dependency of Hearth: this runs only in vLLM's environment.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from hearth.inference.vllm.plugin.entry import UNCHANGED
from hearth.inference.vllm.plugin.source import SnapshotSource


@dataclass
class SnapshotInit(WeightTransferInitInfo):
    """No options."""


@dataclass
class SnapshotUpdate(WeightTransferUpdateInfo):
    """A snapshot under ``root``; with None the model with which the server started."""

    root: str
    identity: str | None = None


class SnapshotTransferEngine(WeightTransferEngine[SnapshotInit, SnapshotUpdate]):
    """Loads a snapshot in one call of ``update_weights``; start and finish do nothing.

    A snapshot is read and verified before the first weight is changed, by ``prepare`` while the
    server samples, or else in that call; the error of a failed read begins with ``UNCHANGED``.
    """

    init_info_cls = SnapshotInit
    update_info_cls = SnapshotUpdate
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._source = SnapshotSource()

    def prepare(self, root: str, identity: str) -> bool:
        """As ``SnapshotSource.prepare``."""
        return self._source.prepare(Path(root), identity)

    def init_transfer_engine(self, init_info: SnapshotInit) -> None:
        """Nothing to do."""

    def start_weight_update(self) -> None:
        """Nothing to do: the served weights stay whole until the snapshot is read."""

    def finish_weight_update(self) -> None:
        """Nothing to do."""

    def shutdown(self) -> None:
        """Nothing to release."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Read, verify and load the snapshot of ``update_info``."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: SnapshotUpdate) -> None:
        """Load a snapshot, or the model's own weights again.

        Raises:
            RuntimeError: the snapshot cannot be used; the served weights are unchanged.
        """
        if update_info.identity is None:
            self._source.forget()
            self._load(self._own_weights())
            return
        try:
            update = self._source.take(Path(update_info.root), update_info.identity)
        except Exception as error:
            raise RuntimeError(f"{UNCHANGED}: {error}") from error
        # If loading fails, it is unknown which weights are served.
        self._source.forget()
        self._load(iter(update.tensors.items()))
        self._source.note_loaded(update)

    def _own_weights(self) -> Iterable[tuple[str, Tensor]]:
        from vllm.model_executor.model_loader import get_model_loader

        loader: Any = get_model_loader(self.vllm_config.load_config)
        return loader.get_all_weights(self.model_config, self.model)

    def _load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        is_on_cpu = self.device.type == "cpu"
        packing = _packing_experts(self.model) if is_on_cpu else contextlib.nullcontext()
        with torch.no_grad(), _without_adapters(self.model), packing:
            initialize_layerwise_reload(self.model)
            self.model.load_weights(weights)
            finalize_layerwise_reload(self.model, self.model_config)
            if is_on_cpu:
                _pack_heads(self.model)


def _pack_heads(model: nn.Module) -> None:
    """Pack the heads' weights again.

    On a CPU a head computes with a packed copy. vLLM packs it again when the head's own weights are
    loaded, and a tied head has none.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        UnquantizedEmbeddingMethod,
    )

    heads: list[Any] = [module for module in model.modules() if isinstance(module, ParallelLMHead)]
    for head in heads:
        if isinstance(head.quant_method, UnquantizedEmbeddingMethod):
            head.quant_method.process_weights_after_loading(head)


@contextlib.contextmanager
def _packing_experts(model: nn.Module) -> Iterator[None]:
    """Inside the ``with`` experts whose weights are loaded are packed.

    On a CPU experts compute with packed weights. vLLM packs those that it starts with, and none of
    those that follow, with which it then computes other numbers without an error.
    """
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
        UnquantizedFusedMoEMethod,
    )

    methods: set[Any] = {getattr(layer, "quant_method", None) for layer in model.modules()}
    packers: list[Any] = [
        method for method in methods if isinstance(method, UnquantizedFusedMoEMethod)
    ]
    for method in packers:
        method.process_weights_after_loading = functools.partial(_process_and_pack, method)
    try:
        yield
    finally:
        for method in packers:
            # The class's own again.
            del method.process_weights_after_loading


def _process_and_pack(method: Any, layer: nn.Module) -> None:
    type(method).process_weights_after_loading(method, layer)
    method.moe_kernel.fused_experts.process_weights_after_loading(layer)


@contextlib.contextmanager
def _without_adapters(model: nn.Module) -> Iterator[None]:
    """Inside the ``with`` layers with adapters are replaced by their base layers."""
    wrapped: list[tuple[nn.Module, str, nn.Module]] = []
    for owner in model.modules():
        for name, layer in owner.named_children():
            # Only layers with adapters have a base layer.
            if layer._modules.get("base_layer") is not None:
                wrapped.append((owner, name, layer))
    for owner, name, layer in wrapped:
        setattr(owner, name, layer.get_submodule("base_layer"))
    try:
        yield
    finally:
        for owner, name, layer in wrapped:
            setattr(owner, name, layer)
