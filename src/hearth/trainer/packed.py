"""The forward pass of packed rows through a plain decoder, in fused loops and plain products.

Legend: S rows, H hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hearth.kernels.ops import kernels
from hearth.kernels.training import add_rms_norm, rms_norm, silu_mul, tree_attention, turn
from hearth.kernels.tree import Tree
from hearth.models.decoder import Decoder, DecoderLayer, read_decoder
from hearth.models.loading import LoadedModel
from hearth.trainer.packing import PAD_MULTIPLE

_FIRST_POSITIONS = 4096


class PackedDecoder:
    """Runs rows without padding; made by ``of`` where model and machine allow it."""

    def __init__(self, loaded: LoadedModel, decoder: Decoder) -> None:
        self._loaded = loaded
        self._turns = decoder.turns(self._room(_FIRST_POSITIONS))

    @classmethod
    def of(cls, loaded: LoadedModel) -> PackedDecoder | None:
        """The packed form of a model; None for another than a plain decoder in float32 on a CPU."""
        is_plain = loaded.dtype == torch.float32 and torch.device(loaded.device).type == "cpu"
        decoder = read_decoder(loaded) if is_plain and kernels() is not None else None
        return None if decoder is None else cls(loaded, decoder)

    def states(self, tokens: Tensor, positions: Tensor, tree: Tree) -> Tensor:
        """Last hidden states [S, H] of rows with these tokens and positions [S]."""
        # Read anew: an adapter replaces linear layers.
        decoder = read_decoder(self._loaded)
        assert decoder is not None, "an adapter makes no other model of it"
        turns = self._turns_for(decoder, tree.most_keys)
        x = decoder.backbone.embed_tokens(tokens)
        normed = rms_norm(x, decoder.layers[0].input_norm.weight, decoder.eps)
        followers = [*(one.input_norm for one in decoder.layers[1:]), decoder.backbone.norm]
        for layer, following in zip(decoder.layers, followers, strict=True):
            attended = _attend(decoder, layer, normed, turns, positions, tree)
            x, normed = add_rms_norm(x, attended, layer.post_norm.weight, decoder.eps)
            inner = silu_mul(_linear(layer.gate_proj, normed), _linear(layer.up_proj, normed))
            x, normed = add_rms_norm(
                x, _linear(layer.down_proj, inner), following.weight, decoder.eps
            )
        return normed

    def _turns_for(self, decoder: Decoder, positions: int) -> tuple[Tensor, Tensor]:
        if positions > self._turns[0].shape[0]:
            self._turns = decoder.turns(self._room(2 * positions))
        return self._turns

    def _room(self, positions: int) -> int:
        """As many positions, as far as the model has them; those of the padding in any case."""
        return max(PAD_MULTIPLE, min(self._loaded.max_position, positions))


def _attend(
    decoder: Decoder, layer: DecoderLayer, normed: Tensor, turns: tuple[Tensor, Tensor],
    positions: Tensor, tree: Tree,
) -> Tensor:  # fmt: skip
    rows, dim = normed.shape[0], decoder.dim

    def heads(linear: Any, norm: Any | None) -> Tensor:
        projected = _linear(linear, normed).view(rows, -1, dim)
        weight = None if norm is None else norm.weight
        return turn(projected, weight, decoder.eps, turns, positions)

    mixed = tree_attention(
        heads(layer.q_proj, layer.q_norm), heads(layer.k_proj, layer.k_norm),
        _linear(layer.v_proj, normed).view(rows, -1, dim), tree, decoder.scale,
    )  # fmt: skip
    return _linear(layer.o_proj, mixed.view(rows, -1))


def _linear(linear: Any, x: Tensor) -> Tensor:
    """A plain layer's product without the module's overhead; an adapter's as it does it."""
    if type(linear) is nn.Linear:
        return nn.functional.linear(x, linear.weight, linear.bias)
    return linear(x).contiguous()
