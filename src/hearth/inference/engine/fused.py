"""A decoding step in one call, for plain decoders on the CPU, in float32.

The call is a loop in C (``hearth.kernels``) that computes all layers. Each thread has rows of its
own, so threads wait for each other once per step. The three attention projections are one product,
and so are the MLP's first two. The weights are copies of the module's, in the order in which the
loop reads them: ``refresh`` drops them after every change.

A wide model's weights are not copied, bfloat16 ones neither, and its adapter is not merged: a step
reads the module's own tensors from memory, once for all rows, and threads share each product.

Legend: B rows, V vocabulary, H hidden size, F size of the MLP.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hearth.inference.engine.adapters import Adapter, LayerUpdate
from hearth.inference.engine.cache import SlotCache
from hearth.kernels.ops import AttentionShape, Kernels, LoraUpdate, StepLayer, StepModel, kernels
from hearth.models.decoder import (
    Decoder,
    DecoderLayer,
    base_weight,
    plain_bias,
    plain_weight,
    read_cpu_decoder,
    read_decoder,
    read_linear,
)
from hearth.models.loading import LoadedModel

_LEAST_POSITIONS = 64
"""The runner's probe has more tokens than the shortest ``max_seq_len``."""
_WIDE = 2**20
"""Values of an MLP's weight from which a model is wide: a core's cache does not hold one."""
_MULTIPLE = 16
"""Sizes of a wide model are multiples of it: as many floats as a register has at most."""


@dataclass(frozen=True, eq=False)
class _LayerWeights:
    """One layer's weights as ``StepLayer`` has them; views where that needs no copy."""

    input_norm: Tensor
    qkv: Tensor
    bias: Tensor | None
    norms: tuple[Tensor, Tensor] | None
    o: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor
    k: Tensor | None = None
    v: Tensor | None = None
    up: Tensor | None = None

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
        self, loaded: LoadedModel, decoder: Decoder, loops: Kernels, *, positions: int
    ) -> None:
        self._loaded = loaded
        self._decoder = decoder
        self._loops = loops
        self._rotations = decoder.compute_rotations(max(positions, _LEAST_POSITIONS))
        self._layers: list[_LayerWeights] = []
        self._ends: tuple[Tensor | None, ...] = ()
        """The embedding, the last norm, the head and its bias."""
        self._is_wide = _is_wide(decoder)
        self._updates: WeakKeyDictionary[Adapter, ctypes.Array[LoraUpdate]] = WeakKeyDictionary()
        self._own_updates: tuple[list[LayerUpdate | None], ctypes.Array[LoraUpdate]] | None = None
        """Those of a wide module's own adapter, which all rows have, and their addresses."""
        self._step: StepModel | None = None
        """The addresses of the weights; None until they are copied."""

    @classmethod
    def for_model(cls, loaded: LoadedModel, *, positions: int) -> FusedDecoder | None:
        """The fused form of a model for sequences up to ``positions``; None where there is none."""
        loops = kernels()
        decoder = read_cpu_decoder(loaded) if loops is not None else None
        if decoder is None or loops is None:
            return None
        return cls(loaded, decoder, loops, positions=positions)

    def refresh(self) -> None:
        """Have the next step take the weights that the module has then."""
        self._step = None

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
            adapters=self._find_updates(adapters, len(tokens)),
        )

    def _find_updates(
        self, adapters: Sequence[Adapter | None], rows: int
    ) -> ctypes.Array[ctypes.c_void_p] | None:
        """The address of each row's updates, None for a row without an adapter; None where no row
        has one."""
        if self._own_updates is not None:
            return (ctypes.c_void_p * rows)(*[ctypes.addressof(self._own_updates[1])] * rows)
        if not adapters:
            return None
        addresses = (ctypes.c_void_p * rows)()
        for row, adapter in enumerate(adapters):
            if adapter is None:
                continue
            if adapter not in self._updates:
                linears = self._decoder.list_linears()
                self._updates[adapter] = _list_updates(
                    [adapter.layers.get(linear.name) for linear in linears]
                )
            addresses[row] = ctypes.addressof(self._updates[adapter])
        return addresses

    def _fuse(self) -> StepModel:
        """Copy the module's weights, whose linear layers an adapter may have replaced."""
        decoder = read_decoder(self._loaded)
        assert decoder is not None, "a plain decoder with an adapter is a plain decoder"
        self._decoder = decoder
        linear: Any = decoder.module.get_output_embeddings()
        vocab, hidden = base_weight(linear).shape
        embedding = decoder.backbone.embed_tokens.weight
        if self._is_wide:
            self._layers = [_read_layer(layer) for layer in decoder.layers]
            self._own_updates = None
            if self._loaded.lora is not None:
                updates = [_read_update(linear) for linear in decoder.list_linears()]
                self._own_updates = (updates, _list_updates(updates))
            head = base_weight(linear)
        else:
            before = self._layers or [None] * len(decoder.layers)
            pairs = zip(decoder.layers, before, strict=True)
            self._layers = [_fuse_layer(layer, old, self._loops) for layer, old in pairs]
            old_head = self._ends[2] if self._ends else None
            head = self._loops.pack([plain_weight(linear).float()], old_head)
            embedding = embedding.float()
        norm, head_bias = decoder.backbone.norm.weight.float(), plain_bias(linear)
        head_bias = None if head_bias is None else head_bias.float()
        self._ends = (embedding, norm, head, head_bias)
        addresses = (StepLayer * len(self._layers))(*(layer.addresses() for layer in self._layers))
        self._step = StepModel(
            addresses,
            embedding.data_ptr(),
            norm.data_ptr(),
            head.data_ptr(),
            None if head_bias is None else head_bias.data_ptr(),
            self._rotations[0].data_ptr(),
            self._rotations[1].data_ptr(),
            len(self._layers),
            hidden,
            base_weight(decoder.layers[0].gate_proj).shape[0],
            vocab,
            0,
            self._is_wide,
            head.dtype == torch.bfloat16,
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


def _is_wide(decoder: Decoder) -> bool:
    """Whether weights are too large for a core's cache, and have sizes that its loops take."""
    inner, hidden = base_weight(decoder.layers[0].gate_proj).shape
    sizes = (inner, hidden, decoder.heads * decoder.dim)
    return inner * hidden >= _WIDE and not any(size % _MULTIPLE for size in sizes)


def _list_updates(updates: Sequence[LayerUpdate | None]) -> ctypes.Array[LoraUpdate]:
    """The updates of ``Decoder.list_linears``; their addresses live as long as they do."""
    listed = (LoraUpdate * len(updates))()
    for place, update in enumerate(updates):
        if update is not None:
            down, up = update.down, update.up
            listed[place] = LoraUpdate(down.data_ptr(), up.data_ptr(), down.shape[0], update.scale)
    return listed


@torch.no_grad()
def _read_update(module: Any) -> LayerUpdate | None:
    """The update of a layer's attached adapter; None where it has none."""
    linear = read_linear(module)
    if linear is None or linear.down is None or linear.up is None:
        return None
    return LayerUpdate(linear.down.contiguous(), linear.up.t().contiguous(), linear.scale)


def _read_layer(layer: DecoderLayer) -> _LayerWeights:
    """A wide model's layer: the module's own weights."""
    return _LayerWeights(
        input_norm=layer.input_norm.weight.float(),
        qkv=base_weight(layer.q_proj),
        bias=_join_biases(layer),
        norms=_read_norms(layer),
        o=base_weight(layer.o_proj),
        post_norm=layer.post_norm.weight.float(),
        gate_up=base_weight(layer.gate_proj),
        down=base_weight(layer.down_proj),
        k=base_weight(layer.k_proj),
        v=base_weight(layer.v_proj),
        up=base_weight(layer.up_proj),
    )


@torch.no_grad()
def _fuse_layer(layer: DecoderLayer, old: _LayerWeights | None, loops: Kernels) -> _LayerWeights:
    """A small model's layer in panels: those of its ``old`` weights, if it has any."""

    def pack(name: str, *linears: Any) -> Tensor:
        panels = None if old is None else getattr(old, name)
        return loops.pack([plain_weight(linear).float() for linear in linears], panels)

    return _LayerWeights(
        input_norm=layer.input_norm.weight.float(),
        qkv=pack("qkv", layer.q_proj, layer.k_proj, layer.v_proj),
        bias=_join_biases(layer),
        norms=_read_norms(layer),
        o=pack("o", layer.o_proj),
        post_norm=layer.post_norm.weight.float(),
        gate_up=pack("gate_up", layer.gate_proj, layer.up_proj),
        down=pack("down", layer.down_proj),
    )


@torch.no_grad()
def _join_biases(layer: DecoderLayer) -> Tensor | None:
    """Those of the attention projections, end to end."""
    biases = [plain_bias(linear) for linear in (layer.q_proj, layer.k_proj, layer.v_proj)]
    given = [bias.float() for bias in biases if bias is not None]
    return torch.cat(given) if len(given) == len(biases) else None


def _read_norms(layer: DecoderLayer) -> tuple[Tensor, Tensor] | None:
    """The weights of the queries' and keys' norms, in families that have them."""
    if layer.q_norm is None or layer.k_norm is None:
        return None
    return layer.q_norm.weight.float(), layer.k_norm.weight.float()
