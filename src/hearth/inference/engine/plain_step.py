"""A decoding step of a plain decoder in a third of the operations that its module needs.

For devices where each operation costs microseconds whatever it computes. The weights are the
module's own tensors. In bfloat16 norms and rotations round once where the module rounds several
times; otherwise the numbers are the same.

Legend: B rows, H hidden size, A heads, G key heads, D size of a head, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hearth.inference.engine.cache import SlotCache
from hearth.models.decoder import Decoder, DecoderLayer, read_decoder
from hearth.models.loading import LoadedModel

_LEAST_POSITIONS = 64
"""The runner's probe has more tokens than the shortest ``max_seq_len``."""


class PlainStep:
    """Decodes one token per row; ``for_model`` makes it for plain decoders."""

    def __init__(self, loaded: LoadedModel, decoder: Decoder, *, positions: int) -> None:
        self._loaded = loaded
        self._decoder = decoder
        cosines, sines = decoder.compute_rotations(max(positions, _LEAST_POSITIONS))
        half = decoder.dim // 2
        # Rotation swaps the halves and negates the first; here the sign is in the sines.
        signed = torch.cat([-sines[:, :half], sines[:, half:]], dim=1)
        self._rotations = torch.stack([cosines, signed], dim=1).to(loaded.dtype)

    @classmethod
    def for_model(cls, loaded: LoadedModel, *, positions: int) -> PlainStep | None:
        """The step of a model for sequences up to ``positions``; None for other models."""
        decoder = read_decoder(loaded)
        return None if decoder is None else cls(loaded, decoder, positions=positions)

    def weights_changed(self) -> None:
        """Compute with the layers that the module has now; an adapter may have replaced some."""
        decoder = read_decoder(self._loaded)
        assert decoder is not None, "a plain decoder with an adapter is a plain decoder"
        self._decoder = decoder

    def __call__(self, tokens: Tensor, at: Tensor, span: int, cache: SlotCache) -> Tensor:
        """Logits [B, V] after ``tokens`` at positions ``at`` [B], which enter the cache.

        Attention reads the first ``span`` keys, in each row those up to its own position.
        """
        decoder = self._decoder
        rows = torch.arange(len(tokens), device=tokens.device)
        seen = torch.arange(span, device=tokens.device) <= at[:, None]
        mask = torch.zeros(seen.shape, dtype=cache.shape.dtype, device=tokens.device)
        mask = mask.masked_fill_(~seen, -torch.inf)[:, None, None]
        # Cosines and sines of each row, for all its heads alike.
        rotations = self._rotations[at].transpose(0, 1).unsqueeze(2)
        x = decoder.backbone.embed_tokens(tokens)
        for number, layer in enumerate(decoder.layers):
            normed = self._norm(x, layer.input_norm)
            q, k, v = self._heads(layer, normed, rotations)
            keys, values = cache.keys[number, : len(rows)], cache.values[number, : len(rows)]
            keys[rows, :, at], values[rows, :, at] = k, v
            mixed = self._attend(q, keys[:, :, :span], values[:, :, :span], mask)
            x = _add_linear(x, layer.o_proj, mixed)
            normed = self._norm(x, layer.post_norm)
            inner = nn.functional.silu(layer.gate_proj(normed)) * layer.up_proj(normed)
            x = _add_linear(x, layer.down_proj, inner)
        head: Any = decoder.module.get_output_embeddings()
        return head(self._norm(x, decoder.backbone.norm))

    def _heads(
        self, layer: DecoderLayer, normed: Tensor, rotations: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, A, D], keys and values [B, G, D]; the first two rotated."""
        shape = (normed.shape[0], -1, self._decoder.dim)
        projections = (layer.q_proj, layer.k_proj, layer.v_proj)
        q, k, v = (project(normed).view(shape) for project in projections)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._norm(q, layer.q_norm), self._norm(k, layer.k_norm)
        both = torch.cat([q, k], dim=1)
        cosines, sines = rotations
        other_half = both.roll(self._decoder.dim // 2, dims=2)
        turned = torch.addcmul(both * cosines, other_half, sines)
        q, k = turned.split([self._decoder.heads, self._decoder.kv_heads], dim=1)
        return q, k, v

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Attention [B, A * D] of each row's query to its own keys."""
        # The heads of one key head read the same keys, so they are one query of several rows.
        grouped = q.unflatten(1, (self._decoder.kv_heads, -1))
        mixed = nn.functional.scaled_dot_product_attention(
            grouped, keys, values, attn_mask=mask, scale=self._decoder.scale
        )
        return mixed.flatten(1)

    def _norm(self, x: Tensor, norm: Any) -> Tensor:
        return nn.functional.rms_norm(x, x.shape[-1:], norm.weight, self._decoder.eps)


def _add_linear(x: Tensor, linear: Any, y: Tensor) -> Tensor:
    """x + linear(y), in one product where the layer is a plain ``nn.Linear``."""
    if type(linear) is nn.Linear and linear.bias is None:
        return torch.addmm(x, y, linear.weight.t())
    return x + linear(y)
