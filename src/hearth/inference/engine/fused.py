"""A decoding step in one call, for plain decoders in float32 on the CPU.

The call is a loop in C (``hearth.kernels``) that computes all layers, with torch's own matrix
products inside. Each thread has rows of its own, so threads wait for each other once per step.
The three attention projections are one product, and so are the MLP's first two. The fused weights
are copies of the module's: ``refresh`` drops them after every change.

Legend: B rows, V vocabulary, H hidden size, F size of the MLP.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hearth.inference.engine.adapters import Adapter
from hearth.inference.engine.cache import MIN_ROWS, SlotCache
from hearth.kernels.build import find_torch_symbol
from hearth.kernels.ops import AttentionShape, Kernels, LoraUpdate, StepLayer, StepModel, kernels
from hearth.models.decoder import Decoder, DecoderLayer, plain_bias, plain_weight, read_decoder
from hearth.models.loading import LoadedModel

logger = logging.getLogger(__name__)

_LEAST_POSITIONS = 64
"""The runner's probe has more tokens than the shortest ``max_seq_len``."""


@dataclass(frozen=True, eq=False)
class _LayerWeights:
    """One layer's weights, transposed for ``x @ w``; views where that needs no copy."""

    input_norm: Tensor
    qkv: Tensor
    bias: Tensor | None
    norms: tuple[Tensor, Tensor] | None
    o: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor

    def addresses(self) -> StepLayer:
        """Their addresses, valid as long as the tensors live."""
        tensors = {name: value for name, value in vars(self).items() if name != "norms"}
        tensors["q_norm"], tensors["k_norm"] = self.norms or (None, None)
        return StepLayer(
            **{name: tensor.data_ptr() for name, tensor in tensors.items() if tensor is not None}
        )


class FusedDecoder:
    """Decodes for a ``ModelRunner``. Used by one thread at a time."""

    def __init__(
        self, loaded: LoadedModel, decoder: Decoder, loops: Kernels, product: int, *, positions: int
    ) -> None:
        self._loaded = loaded
        self._decoder = decoder
        self._loops = loops
        self._product = product
        self._rotations = decoder.compute_rotations(max(positions, _LEAST_POSITIONS))
        self._layers: list[_LayerWeights] = []
        self._head: tuple[Tensor, Tensor | None] | None = None
        self._updates: WeakKeyDictionary[Adapter, ctypes.Array[LoraUpdate]] = WeakKeyDictionary()
        self._step: StepModel | None = None
        """The addresses of the weights; None until they are copied."""

    @classmethod
    def for_model(cls, loaded: LoadedModel, *, positions: int) -> FusedDecoder | None:
        """The fused form of a model for sequences up to ``positions``; None where there is none."""
        loops = kernels()
        is_plain = loaded.dtype == torch.float32 and torch.device(loaded.device).type == "cpu"
        decoder = read_decoder(loaded) if loops is not None and is_plain else None
        if decoder is None or loops is None:
            return None
        product = find_torch_symbol("sgemm_")
        if product is None:
            logger.warning("torch does not export its matrix product: decoding runs in torch")
            return None
        return cls(loaded, decoder, loops, product, positions=positions)

    def refresh(self) -> None:
        """Drop the weights; the next step takes those that the module has then."""
        self._layers, self._head, self._step = [], None, None

    @torch.inference_mode()
    def decode(
        self,
        tokens: NDArray[np.int64],
        positions: NDArray[np.int64],
        cache: SlotCache,
        adapters: Sequence[Adapter | None] = (),
    ) -> Tensor:
        """Logits [B, V] after ``tokens`` at ``positions`` [B], which enter the cache.

        ``adapters`` are those of the first rows.
        """
        step = self._step or self._fuse()
        step.layer_stride = cache.keys.stride(0)
        return self._loops.decode_step(
            step,
            self._attention_shape(len(tokens), cache),
            torch.from_numpy(tokens),
            torch.from_numpy(positions),
            (cache.keys, cache.values),
            least_rows=MIN_ROWS,
            adapters=self._find_updates(adapters, len(tokens)) if adapters else None,
        )

    def _find_updates(
        self, adapters: Sequence[Adapter | None], rows: int
    ) -> ctypes.Array[ctypes.c_void_p]:
        """The address of each row's updates; None for a row without an adapter."""
        addresses = (ctypes.c_void_p * rows)()
        for row, adapter in enumerate(adapters):
            if adapter is None:
                continue
            if adapter not in self._updates:
                self._updates[adapter] = _list_updates(self._decoder, adapter)
            addresses[row] = ctypes.addressof(self._updates[adapter])
        return addresses

    def _fuse(self) -> StepModel:
        """Copy the module's weights, whose linear layers an adapter may have replaced."""
        decoder = read_decoder(self._loaded)
        assert decoder is not None, "a plain decoder with an adapter is a plain decoder"
        self._decoder = decoder
        self._layers = [_fuse_layer(layer) for layer in decoder.layers]
        linear: Any = decoder.module.get_output_embeddings()
        head, head_bias = self._head = (plain_weight(linear), plain_bias(linear))
        addresses = (StepLayer * len(self._layers))(*(layer.addresses() for layer in self._layers))
        self._step = StepModel(
            self._product,
            find_torch_symbol("MKL_Set_Num_Threads_Local"),
            addresses,
            decoder.backbone.embed_tokens.weight.data_ptr(),
            decoder.backbone.norm.weight.data_ptr(),
            head.data_ptr(),
            None if head_bias is None else head_bias.data_ptr(),
            self._rotations[0].data_ptr(),
            self._rotations[1].data_ptr(),
            len(self._layers),
            head.shape[1],
            self._layers[0].gate_up.shape[1] // 2,
            head.shape[0],
        )
        return self._step

    def _attention_shape(self, rows: int, cache: SlotCache) -> AttentionShape:
        decoder, keys = self._decoder, cache.keys
        return AttentionShape(
            rows,
            decoder.heads,
            decoder.kv_heads,
            decoder.dim,
            keys.stride(1),
            keys.stride(2),
            torch.get_num_threads(),
            decoder.eps,
            decoder.scale,
        )


def _list_updates(decoder: Decoder, adapter: Adapter) -> ctypes.Array[LoraUpdate]:
    """An adapter's updates, layer by layer, then the head's; their addresses live as it does."""
    linears: list[Any] = []
    for layer in decoder.layers:
        linears += [layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj]
        linears += [layer.gate_proj, layer.up_proj, layer.down_proj]
    linears.append(decoder.module.get_output_embeddings())
    updates = (LoraUpdate * len(linears))()
    for place, linear in enumerate(linears):
        update = adapter.layers.get(linear.name)
        if update is not None:
            down, up = update.down, update.up
            updates[place] = LoraUpdate(down.data_ptr(), up.data_ptr(), down.shape[0], update.scale)
    return updates


@torch.no_grad()
def _fuse_layer(layer: DecoderLayer) -> _LayerWeights:
    attention = (layer.q_proj, layer.k_proj, layer.v_proj)
    biases = [plain_bias(linear) for linear in attention]
    norms = None
    if layer.q_norm is not None and layer.k_norm is not None:
        norms = (layer.q_norm.weight, layer.k_norm.weight)
    return _LayerWeights(
        input_norm=layer.input_norm.weight,
        qkv=torch.cat([plain_weight(linear) for linear in attention]).t().contiguous(),
        bias=torch.cat([bias for bias in biases if bias is not None])
        if None not in biases
        else None,
        norms=norms,
        o=plain_weight(layer.o_proj).t(),
        post_norm=layer.post_norm.weight,
        gate_up=torch.cat([plain_weight(layer.gate_proj), plain_weight(layer.up_proj)])
        .t()
        .contiguous(),
        down=plain_weight(layer.down_proj).t(),
    )
