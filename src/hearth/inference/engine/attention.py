"""Connects a ``transformers`` module to our KV cache, without changing the module.

A prefill runs the module's own causal attention without a mask, as training does, and keeps the
keys and values of each layer. A decoding step writes each layer's new keys and values into slots.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from hearth.inference.engine.cache import SlotCache

DECODING_ATTENTION = "hearth_sdpa"


class PrefillCache(Cache):
    """Keeps the keys and values [P, H, L, D] of every layer of one prefill."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        self.keys[layer_idx], self.values[layer_idx] = key_states, value_states
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0


class DecodeCache(Cache):
    """Writes one position of each slot and returns the slice that attention reads."""

    def __init__(self, cache: SlotCache, positions: Tensor, span: int) -> None:
        super().__init__(layers=[])
        self._cache = cache
        self._positions = positions
        self._slots = torch.arange(positions.shape[0], device=positions.device)
        self._span = span

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        count = self._slots.shape[0]
        keys = self._cache.keys[layer_idx, :count]
        values = self._cache.values[layer_idx, :count]
        keys[self._slots, :, self._positions] = key_states[:, :, 0]
        values[self._slots, :, self._positions] = value_states[:, :, 0]
        return keys[:, :, : self._span], values[:, :, : self._span]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._span - 1

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self._span - 1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self._span, 0


def install(module: Any) -> None:
    """Replace the module's ``sdpa`` attention with ours; other implementations stay."""
    if module.config._attn_implementation != "sdpa":
        return
    AttentionInterface.register(DECODING_ATTENTION, _attention)
    AttentionMaskInterface.register(DECODING_ATTENTION, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    module.set_attn_implementation(DECODING_ATTENTION)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **rest: Any,
) -> tuple[Tensor, Tensor | None]:
    """``transformers``' own function, with a single query row doubled on the CPU.

    One query row per key head would be a matrix-vector product there, whose rounding differs from
    the matrix product of prefill and training.
    """
    is_single = (
        query.shape[2] == 1 and query.shape[1] == key.shape[1] and query.device.type == "cpu"
    )
    if not is_single:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **rest)
    pair = query.repeat(1, 1, 2, 1)
    output, weights = sdpa_attention_forward(module, pair, key, value, attention_mask, **rest)
    return output[:, :1], weights
