"""Packed tokens, and their forward pass through a plain decoder in fused loops and plain products.

Legend: S packed tokens, T tokens of a sequence, H hidden size, A heads, G key heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hearth.kernels.ops import kernels
from hearth.kernels.training import (
    Tree,
    add_rms_norm,
    linears,
    rms_norm,
    rope,
    silu_mul,
    tree_attention,
)
from hearth.models.decoder import Decoder, DecoderLayer, read_cpu_decoder, read_decoder, read_linear
from hearth.models.loading import LoadedModel
from hearth.models.prefixes import Cluster

PAD_MULTIPLE = 32
"""Lengths are padded to it: on the CPU in float32 a token then has the same bits in any batch."""
_FIRST_POSITIONS = 4096


@dataclass(frozen=True, eq=False)
class PackedTokens:
    """Token sequences that share one forward pass without padding, each common prefix once."""

    tokens: Tensor
    """int64 [S]; S is a multiple of 32."""
    positions: Tensor
    """int64 [S]."""
    tree: Tree
    """Which tokens attend to which."""
    places: list[Tensor]
    """Where each sequence's tokens are, int64 [T], in the clusters' order; sequences that share a
    prefix share its places."""


def pack(sequences: Sequence[Tensor], packed: Sequence[Cluster]) -> PackedTokens:
    """The members of some clusters end to end; ``sequences`` are int64 [T]."""
    tokens: list[Tensor] = []
    positions: list[Tensor] = []
    places: list[Tensor] = []
    heads: list[tuple[int, int, int, int]] = []
    tails: list[tuple[int, int]] = []
    place = most = 0
    for cluster in packed:
        start, prefix, first = place, cluster.prefix, len(tails)
        tokens.append(sequences[cluster.members[0]][:prefix])
        positions.append(torch.arange(prefix))
        place += prefix
        for member in cluster.members:
            own = sequences[member].numel() - prefix
            shared = torch.arange(start, start + prefix)
            places.append(torch.cat([shared, torch.arange(place, place + own)]))
            most = max(most, prefix + own)
            if own:
                tokens.append(sequences[member][prefix:])
                positions.append(torch.arange(prefix, prefix + own))
                tails.append((place, own))
                place += own
        heads.append((start, prefix, first, len(tails)))
    if missing := -place % PAD_MULTIPLE:
        heads.append((place, missing, 0, 0))
        tokens.append(torch.zeros(missing, dtype=torch.int64))
        positions.append(torch.arange(missing))
    tree = Tree(torch.tensor(heads), torch.tensor(tails or [(0, 0)]), max(most, PAD_MULTIPLE))
    return PackedTokens(torch.cat(tokens), torch.cat(positions), tree, places)


class PackedDecoder:
    """Runs packed tokens without padding; ``from_model`` makes it where model and machine allow."""

    def __init__(self, loaded: LoadedModel, decoder: Decoder) -> None:
        self._loaded = loaded
        self._rotations = decoder.compute_rotations(self._room(_FIRST_POSITIONS))

    @classmethod
    def from_model(cls, loaded: LoadedModel) -> PackedDecoder | None:
        """The packed form of a model; None unless it is a plain decoder on a CPU."""
        decoder = read_cpu_decoder(loaded) if kernels() is not None else None
        return None if decoder is None else cls(loaded, decoder)

    def states(
        self,
        tokens: Tensor,
        positions: Tensor,
        tree: Tree,
        *,
        recompute: bool = False,
        cache: list[tuple[Tensor, Tensor]] | None = None,
    ) -> Tensor:
        """Last hidden states [S, H] of these tokens at these positions [S].

        The backward pass computes outputs of norms and of the MLP's activation again; with
        ``recompute`` layers keep their inputs only.
        Each layer's keys and values [S, G, D] are added to ``cache``.
        """
        # Read again in each pass: an adapter replaces linear layers.
        decoder = read_decoder(self._loaded)
        assert decoder is not None, "an adapter keeps a plain decoder plain"
        rotations = self._rotations_for(decoder, tree.most_keys)
        x = decoder.backbone.embed_tokens(tokens).float()
        followers = [*(layer.input_norm for layer in decoder.layers[1:]), decoder.backbone.norm]

        def norm(module: Any, x: Tensor) -> Tensor:
            return rms_norm(x, module.weight.float(), decoder.eps)

        def run(layer: DecoderLayer, following: Any, x: Tensor, normed: Tensor) -> Any:
            again = partial(norm, layer.input_norm, x)
            q, k, v = _heads(decoder, layer, normed, again, rotations, positions)
            if cache is not None:
                cache.append((k, v))
            mixed = tree_attention(q, k, v, tree, decoder.scale)
            (attended,) = _linears((layer.o_proj,), mixed.view(mixed.shape[0], -1))
            x, normed = add_rms_norm(x, attended, layer.post_norm.weight.float(), decoder.eps)
            again = partial(norm, layer.post_norm, x)
            gate, up = _linears((layer.gate_proj, layer.up_proj), normed, again)
            again = partial(silu_mul, gate, up)
            (added,) = _linears((layer.down_proj,), silu_mul(gate, up), again)
            return add_rms_norm(x, added, following.weight.float(), decoder.eps)

        normed = norm(decoder.layers[0].input_norm, x)
        if recompute:
            run = partial(checkpoint, run, use_reentrant=False, preserve_rng_state=False)
        for layer, following in zip(decoder.layers, followers, strict=True):
            x, normed = run(layer, following, x, normed)
        return normed

    def logits(self, states: Tensor) -> Tensor:
        """What the head makes [R, V] of last hidden states [R, H]."""
        # Read at each call: an adapter may have replaced the head.
        module: Any = self._loaded.module
        return _linears((module.get_output_embeddings(),), states)[0]

    def _rotations_for(self, decoder: Decoder, positions: int) -> tuple[Tensor, Tensor]:
        if positions > self._rotations[0].shape[0]:
            self._rotations = decoder.compute_rotations(self._room(2 * positions))
        return self._rotations

    def _room(self, positions: int) -> int:
        """This number of positions, at most the model's and at least those of the padding."""
        return max(PAD_MULTIPLE, min(self._loaded.max_position, positions))


def _heads(
    decoder: Decoder,
    layer: DecoderLayer,
    normed: Tensor,
    again: Callable[[], Tensor],
    rotations: tuple[Tensor, Tensor],
    positions: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [S, A, D], keys and values [S, G, D] of one layer."""
    tokens, dim = normed.shape[0], decoder.dim
    projections = _linears((layer.q_proj, layer.k_proj, layer.v_proj), normed, again)
    q, k, v = (projection.view(tokens, -1, dim) for projection in projections)

    def rotate(heads: Tensor, norm: Any | None) -> Tensor:
        weight = None if norm is None else norm.weight.float()
        return rope(heads, weight, decoder.eps, rotations, positions)

    return rotate(q, layer.q_norm), rotate(k, layer.k_norm), v


def _linears(
    modules: Sequence[Any], x: Tensor, again: Callable[[], Tensor] | None = None
) -> tuple[Tensor, ...]:
    """The outputs of several linear modules for the same input, which ``again`` computes anew."""
    layers = [layer for module in modules if (layer := read_linear(module)) is not None]
    if len(layers) == len(modules):
        return linears(x, *layers, compute_x=again)
    # Those of a deployment with many adapters, of which each row has its own.
    return tuple(module(x).contiguous() for module in modules)
