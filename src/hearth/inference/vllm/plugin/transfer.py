"""A weight-transfer engine of vLLM that loads Hearth's snapshot folders.

vLLM's own engines receive tensors over NCCL or CUDA's IPC. This one is told a folder and reads it,
in each of a server's workers. Modelled on the interface that vLLM documents for such engines
(``vllm.distributed.weight_transfer.base``).
"""

# vLLM is no dependency of Hearth's: this runs in its environment alone.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false

from __future__ import annotations

import contextlib
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
    """Nothing has to be agreed on."""


@dataclass
class SnapshotUpdate(WeightTransferUpdateInfo):
    """What to serve: a snapshot under ``root``, or of None the model that the server began with."""

    root: str
    identity: str | None = None


class SnapshotTransferEngine(WeightTransferEngine[SnapshotInit, SnapshotUpdate]):
    """Loads a snapshot in one call of ``update_weights``; start and finish have nothing to do.

    What can fail in reading comes before the first weight is touched, and its error says so.
    """

    init_info_cls = SnapshotInit
    update_info_cls = SnapshotUpdate
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._source = SnapshotSource()

    def init_transfer_engine(self, init_info: SnapshotInit) -> None:
        """Nothing to do."""

    def start_weight_update(self) -> None:
        """Nothing to do: what is served stays whole until the snapshot is read."""

    def finish_weight_update(self) -> None:
        """Nothing to do."""

    def shutdown(self) -> None:
        """Nothing to release."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Read, prove and load what ``update_info`` names."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: SnapshotUpdate) -> None:
        """Load a snapshot, or the model's own weights again.

        Raises:
            RuntimeError: the snapshot cannot be used, and what is served was not touched.
        """
        if update_info.identity is None:
            self._source.forget()
            self._load(self._own_weights())
            return
        try:
            update = self._source.read(Path(update_info.root), update_info.identity)
        except Exception as error:
            raise RuntimeError(f"{UNCHANGED}: {error}") from error
        # Should loading fail, nobody knows what is in place.
        self._source.forget()
        self._load(iter(update.tensors.items()))
        self._source.loaded(update)

    def _own_weights(self) -> Iterable[tuple[str, Tensor]]:
        from vllm.model_executor.model_loader import get_model_loader

        loader: Any = get_model_loader(self.vllm_config.load_config)
        return loader.get_all_weights(self.model_config, self.model)

    def _load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        with torch.no_grad(), _without_adapters(self.model):
            initialize_layerwise_reload(self.model)
            self.model.load_weights(weights)
            finalize_layerwise_reload(self.model, self.model_config)
            if self.device.type == "cpu":
                _pack_heads(self.model)


def _pack_heads(model: nn.Module) -> None:
    """Pack the heads' weights again.

    On a CPU a head computes with a packed copy. vLLM renews it with the head's own weights, and a
    tied head has none.
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
def _without_adapters(model: nn.Module) -> Iterator[None]:
    """Inside the ``with`` the layers that carry adapters stand bare, under their plain names."""
    wrapped: list[tuple[nn.Module, str, nn.Module]] = []
    for owner in model.modules():
        for name, layer in owner.named_children():
            # Only layers with adapters have one.
            bare = layer._modules.get("base_layer")
            if bare is not None:
                wrapped.append((owner, name, layer))
    for owner, name, layer in wrapped:
        setattr(owner, name, layer.get_submodule("base_layer"))
    try:
        yield
    finally:
        for owner, name, layer in wrapped:
            setattr(owner, name, layer)
