"""A decoding step in one call, for plain decoders in float32 on the CPU.

The call is a loop in C (``hearth.kernels``) that computes all layers, with torch's own matrix
products inside. Each thread has rows of its own, so threads wait for each other once per step.
Where torch's library does not export its product, the loops between products are called one by one.
The three attention projections are one product, and so are the MLP's first two. The fused weights
are copies of the module's: ``refresh`` drops them after every change.

Legend: B rows, V vocabulary, H hidden size, F size of the MLP.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hearth.inference.engine.cache import MIN_ROWS, SlotCache
from hearth.kernels.build import find_torch_symbol
from hearth.kernels.ops import AttentionShape, Kernels, StepLayer, StepModel, kernels
from hearth.models.decoder import Decoder, DecoderLayer, plain_bias, plain_weight, read_decoder
from hearth.models.loading import LoadedModel

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
        self, loaded: LoadedModel, decoder: Decoder, loops: Kernels, *, positions: int
    ) -> None:
        self._loaded = loaded
        self._decoder = decoder
        self._loops = loops
        self._rotations = decoder.compute_rotations(max(positions, _LEAST_POSITIONS))
        self._layers: list[_LayerWeights] = []
        self._head: tuple[Tensor, Tensor | None] | None = None
        self._buffers: dict[int, _StepBuffers] = {}
        self._step: StepModel | None = None
        """The weights for ``decode_step``; None where torch does not export its product."""

    @classmethod
    def for_model(cls, loaded: LoadedModel, *, positions: int) -> FusedDecoder | None:
        """The fused form of a model for sequences up to ``positions``; None where there is none."""
        loops = kernels()
        is_plain = loaded.dtype == torch.float32 and torch.device(loaded.device).type == "cpu"
        decoder = read_decoder(loaded) if loops is not None and is_plain else None
        if decoder is None or loops is None:
            return None
        return cls(loaded, decoder, loops, positions=positions)

    def refresh(self) -> None:
        """Drop the weights; the next step takes those that the module has then."""
        self._layers, self._head = [], None

    @torch.inference_mode()
    def decode(
        self, tokens: NDArray[np.int64], positions: NDArray[np.int64], cache: SlotCache
    ) -> Tensor:
        """Logits [B, V] after ``tokens`` at ``positions`` [B], which enter the cache."""
        head = self._head or self._fuse()
        if self._step is not None:
            return self._decode_in_one_call(self._step, tokens, positions, cache)
        rows = len(tokens)
        work = self._buffers.get(rows) or self._make_buffers(rows)
        shape = self._attention_shape(rows, cache)
        at = torch.from_numpy(positions)
        backbone, eps, loops = self._decoder.backbone, self._decoder.eps, self._loops
        x = torch.nn.functional.embedding(torch.from_numpy(tokens), backbone.embed_tokens.weight)
        added: Tensor | None = None
        for number, layer in enumerate(self._layers):
            if added is None:
                loops.rms_norm(x, layer.input_norm, eps, work.normed)
            else:
                loops.add_rms_norm(x, added, layer.input_norm, eps, work.normed)
            torch.mm(work.normed, layer.qkv, out=work.qkv)
            heads = loops.decode_attention(
                work.qkv,
                layer.addresses(),
                self._rotations,
                at,
                (cache.keys[number], cache.values[number]),
                shape,
            )
            torch.mm(heads, layer.o, out=work.added)
            loops.add_rms_norm(x, work.added, layer.post_norm, eps, work.normed)
            torch.mm(work.normed, layer.gate_up, out=work.gate_up)
            loops.silu_mul(work.gate_up, work.inner)
            added = torch.mm(work.inner, layer.down, out=work.added)
        assert added is not None, "a decoder has layers"
        loops.add_rms_norm(x, added, backbone.norm.weight, eps, work.normed)
        return torch.nn.functional.linear(work.normed, *head)

    def _fuse(self) -> tuple[Tensor, Tensor | None]:
        """Copy the module's weights, whose linear layers an adapter may have replaced; the head."""
        decoder = read_decoder(self._loaded)
        assert decoder is not None, "a plain decoder with an adapter is a plain decoder"
        self._decoder = decoder
        self._layers = [_fuse_layer(layer) for layer in decoder.layers]
        head: Any = decoder.module.get_output_embeddings()
        self._head = (plain_weight(head), plain_bias(head))
        self._step = self._make_step_model(*self._head)
        return self._head

    def _make_step_model(self, head: Tensor, head_bias: Tensor | None) -> StepModel | None:
        product, own_threads = (
            find_torch_symbol("sgemm_"),
            find_torch_symbol("MKL_Set_Num_Threads_Local"),
        )
        if product is None:
            return None
        backbone, layers = self._decoder.backbone, self._layers
        addresses = (StepLayer * len(layers))(*(layer.addresses() for layer in layers))
        return StepModel(
            product,
            own_threads,
            addresses,
            backbone.embed_tokens.weight.data_ptr(),
            backbone.norm.weight.data_ptr(),
            head.data_ptr(),
            None if head_bias is None else head_bias.data_ptr(),
            self._rotations[0].data_ptr(),
            self._rotations[1].data_ptr(),
            len(layers),
            head.shape[1],
            layers[0].gate_up.shape[1] // 2,
            head.shape[0],
        )

    def _decode_in_one_call(
        self,
        step: StepModel,
        tokens: NDArray[np.int64],
        positions: NDArray[np.int64],
        cache: SlotCache,
    ) -> Tensor:
        step.layer_stride = cache.keys.stride(0)
        return self._loops.decode_step(
            step,
            self._attention_shape(len(tokens), cache),
            torch.from_numpy(tokens),
            torch.from_numpy(positions),
            (cache.keys, cache.values),
            least_rows=MIN_ROWS,
        )

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

    def _make_buffers(self, rows: int) -> _StepBuffers:
        """Buffers for steps of so many rows; those for another number are freed."""
        layer = self._layers[0]
        hidden = layer.qkv.shape[0]
        buffers = _StepBuffers(
            normed=torch.empty(rows, hidden),
            qkv=torch.empty(rows, layer.qkv.shape[1]),
            added=torch.empty(rows, hidden),
            gate_up=torch.empty(rows, layer.gate_up.shape[1]),
            inner=torch.empty(rows, layer.gate_up.shape[1] // 2),
        )
        self._buffers = {rows: buffers}
        return buffers


@dataclass(frozen=True, eq=False)
class _StepBuffers:
    normed: Tensor
    qkv: Tensor
    added: Tensor
    gate_up: Tensor
    inner: Tensor


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
