"""The KV cache in slots. Legend: N layers, S slots, H kv heads, C capacity, D head size.

Active slots are 0..B-1 without a gap, so attention reads a plain slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MIN_ROWS = 16
"""MKL's sgemm gives a row the same bits in any batch of at least this many rows."""

_FINE_SPAN = 64
_COARSE_SPAN = 512


def key_span(tokens: int) -> int:
    """The number of key positions, at least ``tokens``, that attention looks at.

    Multiples of 64 up to 256, then of 512: the CPU kernel works on blocks of 512 keys, and with
    these spans (measured) a row's result has the same bits under any of them.
    """
    step = _FINE_SPAN if tokens <= 4 * _FINE_SPAN else _COARSE_SPAN
    return -(-tokens // step) * step


@dataclass(frozen=True)
class CacheShape:
    """What one position of one slot holds."""

    layers: int
    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one position over all layers."""
        size = self.layers * self.heads * (self.key_dim + self.value_dim)
        return size * self.dtype.itemsize


class SlotCache:
    """Keys [N, S, H, C, D] and values alike; grows within ``budget_bytes``."""

    def __init__(self, shape: CacheShape, *, budget_bytes: int, max_slots: int) -> None:
        self.shape = shape
        self._max_slots = max_slots
        self._budget = budget_bytes
        self.keys, self.values = self._allocate(0, 0)

    def fits(self, slots: int, tokens: int) -> bool:
        """Whether that many slots of that many tokens each have room within the budget."""
        size = max(slots, MIN_ROWS) * key_span(tokens) * self.shape.bytes_per_token
        return slots <= self._max_slots and size <= self._budget

    @torch.inference_mode()
    def reserve(self, slots: int, tokens: int, *, active: int) -> None:
        """Make room for so many slots and tokens; the first ``active`` slots keep their content."""
        slots, capacity = max(slots, MIN_ROWS), key_span(tokens)
        old_keys, old_values = self.keys, self.values
        if slots <= old_keys.shape[1] and capacity <= old_keys.shape[3]:
            return
        slots, capacity = self._choose_size(slots, capacity)
        if active == 0:
            # There is nothing to keep, so the old memory is freed before the new is allocated.
            self.keys, self.values = self._allocate(0, 0)
            del old_keys, old_values
            self.keys, self.values = self._allocate(slots, capacity)
            return
        self.keys, self.values = self._allocate(slots, capacity)
        held = min(capacity, old_keys.shape[3])
        self.keys[:, :active, :, :held] = old_keys[:, :active, :, :held]
        self.values[:, :active, :, :held] = old_values[:, :active, :, :held]

    @torch.inference_mode()
    def fill(self, slots: Sequence[int], keys: Tensor, values: Tensor) -> None:
        """Copy a prompt's ``keys`` [N, H, T, D] and ``values`` into each of ``slots``."""
        index = torch.tensor(slots, device=self.shape.device)
        tokens = keys.shape[2]
        self.keys[:, index, :, :tokens] = keys.unsqueeze(1)
        self.values[:, index, :, :tokens] = values.unsqueeze(1)

    @torch.inference_mode()
    def move(self, sources: Sequence[int], targets: Sequence[int], tokens: int) -> None:
        """Copy the first ``tokens`` positions of slots ``sources`` to slots ``targets``."""
        source = torch.tensor(sources, device=self.shape.device)
        target = torch.tensor(targets, device=self.shape.device)
        self.keys[:, target, :, :tokens] = self.keys[:, source, :, :tokens]
        self.values[:, target, :, :tokens] = self.values[:, source, :, :tokens]

    @torch.inference_mode()
    def wipe(self, slots: Sequence[int]) -> None:
        """Zero ``slots``; see ``clear``."""
        for slot in slots:
            self.keys[:, slot].zero_()
            self.values[:, slot].zero_()

    @torch.inference_mode()
    def clear(self) -> None:
        """Zero everything: a NaN left there would reach a later sequence through a masked key."""
        self.keys.zero_()
        self.values.zero_()

    def _choose_size(self, slots: int, capacity: int) -> tuple[int, int]:
        """A larger size where the budget allows, so that the cache seldom grows."""
        most = max(self._max_slots, MIN_ROWS)
        wide = min(most, 1 << (slots - 1).bit_length())
        long = max(capacity, self.keys.shape[3])
        for candidate in ((max(wide, self.keys.shape[1]), long), (wide, long), (slots, long)):
            if candidate[0] * candidate[1] * self.shape.bytes_per_token <= self._budget:
                return candidate
        return slots, capacity

    def _allocate(self, slots: int, capacity: int) -> tuple[Tensor, Tensor]:
        shape = self.shape
        lead = (shape.layers, slots, shape.heads, capacity)
        keys = torch.zeros(*lead, shape.key_dim, dtype=shape.dtype, device=shape.device)
        values = torch.zeros(*lead, shape.value_dim, dtype=shape.dtype, device=shape.device)
        return keys, values
