"""State of the active slots as arrays, so that a step makes no Python object per slot.

Legend: B active slots, M layers with experts, K experts per token. Slots 0..B-1 are in use; when
one of them is freed, the last active slot moves into its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hearth.inference.backend import SampledToken
from hearth.inference.engine.adapters import Adapter
from hearth.inference.engine.cache import MIN_ROWS
from hearth.inference.engine.sampler import SampledTokens, SamplingValues, TopTokens
from hearth.inference.engine.sequence import SequenceState
from hearth.wire.completions import FinishReason

_NO_TOKEN = -1


class DecodeSlots:
    """One sequence per slot. ``length`` counts its tokens, prompt included."""

    def __init__(self) -> None:
        self.sequences: list[SequenceState] = []
        self.last_token = np.zeros(0, np.int64)
        self.length = np.zeros(0, np.int64)
        self._prompt_length = np.zeros(0, np.int64)
        self._limit = np.zeros(0, np.int64)
        self._seed = np.zeros(0, np.uint64)
        self._temperature = np.zeros(0, np.float64)
        self._top_p = np.zeros(0, np.float64)
        self._top_k = np.zeros(0, np.int64)
        self._has_stop_text = np.zeros(0, np.bool_)
        self._has_listener = np.zeros(0, np.bool_)
        self._wants_routing = np.zeros(0, np.bool_)
        self._has_adapter = np.zeros(0, np.bool_)
        self._top_logprobs = np.zeros(0, np.int64)
        self._stop_ids = np.full((0, 1), _NO_TOKEN, np.int64)
        self._tokens = np.zeros((0, 0), np.int64)
        self._logprobs = np.zeros((0, 0), np.float32)
        self._sampling_logprobs = np.zeros((0, 0), np.float32)

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def longest_limit(self) -> int:
        """The most tokens that any active sequence may reach."""
        return int(self._limit[: len(self)].max(initial=0))

    @property
    def longest(self) -> int:
        """The most tokens that any active sequence has."""
        return int(self.length[: len(self)].max(initial=0))

    @property
    def want_routing(self) -> bool:
        """Whether any active request asks for its experts."""
        return bool(self._wants_routing[: len(self)].any())

    @property
    def adapters(self) -> list[Adapter | None]:
        """The adapter of each slot; empty where no slot has one."""
        if not self._has_adapter[: len(self)].any():
            return []
        return [sequence.adapter for sequence in self.sequences]

    def add(self, sequences: Sequence[SequenceState]) -> slice:
        """Give each sequence a slot; returns the new slots."""
        start, stop = len(self), len(self) + len(sequences)
        self._make_room(stop, sequences)
        slots = slice(start, stop)
        requests = [sequence.request for sequence in sequences]
        self.sequences.extend(sequences)
        lengths = [len(sequence.tokens) for sequence in sequences]
        self.length[slots] = self._prompt_length[slots] = lengths
        self._limit[slots] = [sequence.limit for sequence in sequences]
        self._seed[slots] = np.array([sequence.seed for sequence in sequences], np.uint64)
        self._temperature[slots] = [request.temperature for request in requests]
        self._top_p[slots] = [request.top_p for request in requests]
        self._top_k[slots] = [request.top_k for request in requests]
        self._has_stop_text[slots] = [sequence.stop_text is not None for sequence in sequences]
        self._has_listener[slots] = [request.listener is not None for request in requests]
        self._wants_routing[slots] = [request.routing for request in requests]
        self._has_adapter[slots] = [sequence.adapter is not None for sequence in sequences]
        self._top_logprobs[slots] = [request.top_logprobs for request in requests]
        self._stop_ids[slots] = _NO_TOKEN
        for slot, sequence in enumerate(sequences, start):
            self._stop_ids[slot, : len(sequence.stop_ids)] = sequence.stop_ids
        return slots

    def inputs(self, least: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Last tokens and their positions, padded to ``least`` slots."""
        count = max(len(self), least)
        return self.last_token[:count], self.length[:count] - 1

    def sampling_inputs(
        self, slots: slice
    ) -> tuple[SamplingValues, NDArray[np.uint64], NDArray[np.int64]]:
        """Sampling values, seeds and positions of the next tokens of ``slots``."""
        top = self._top_logprobs[slots]
        values = SamplingValues(
            self._temperature[slots],
            self._top_p[slots],
            self._top_k[slots],
            top if top.any() else None,
        )
        return values, self._seed[slots], self.length[slots]

    def append_routing(self, choices: NDArray[np.unsignedinteger] | None) -> None:
        """Append the experts [B, M, K] with which every slot's next token is computed."""
        if choices is None:
            return
        for slot in np.flatnonzero(self._wants_routing[: len(self)]):
            self.sequences[slot].routing.append(choices[slot])

    def append(self, slots: slice, sampled: SampledTokens) -> list[tuple[int, FinishReason]]:
        """Append one token to each of ``slots``; returns (slot, reason) of those that end."""
        index = np.arange(slots.start, slots.stop)
        place = self.length[slots] - self._prompt_length[slots]
        self._tokens[index, place] = sampled.tokens
        self._logprobs[index, place] = sampled.logprobs
        self._sampling_logprobs[index, place] = sampled.sampling_logprobs
        self.last_token[slots] = sampled.tokens
        self.length[slots] += 1
        if sampled.top is not None:
            self._append_top(slots, sampled.top)
        stopped = (sampled.tokens[:, None] == self._stop_ids[slots]).any(axis=1)
        for offset in np.flatnonzero(self._has_stop_text[slots]):
            stop_text = self.sequences[slots.start + offset].stop_text
            assert stop_text is not None
            stopped[offset] |= stop_text.push(int(sampled.tokens[offset]))
        ended = stopped | (self.length[slots] >= self._limit[slots])
        ended |= ~np.isfinite(sampled.logprobs)
        reasons: tuple[FinishReason, FinishReason] = ("length", "stop")
        return [
            (slots.start + int(offset), reasons[int(stopped[offset])])
            for offset in np.flatnonzero(ended)
        ]

    def notify(self, slots: slice, sampled: SampledTokens) -> None:
        """Call the listeners of ``slots`` with their tokens; broken logits are no token."""
        for offset in np.flatnonzero(self._has_listener[slots] & np.isfinite(sampled.logprobs)):
            sequence = self.sequences[slots.start + offset]
            sequence.notify_token(
                SampledToken(
                    int(sampled.tokens[offset]),
                    float(sampled.logprobs[offset]),
                    float(sampled.sampling_logprobs[offset]),
                    sequence.top_logprobs[-1] if sequence.top_logprobs else None,
                    sequence.routing[-1] if sequence.routing else None,
                )
            )

    def count(self, slot: int) -> int:
        """The number of tokens of a slot's completion."""
        return int(self.length[slot] - self._prompt_length[slot])

    def completion(self, slot: int) -> tuple[list[int], list[float], list[float]]:
        """Tokens, logprobs and sampling logprobs of a slot's completion."""
        count = self.count(slot)
        return (
            self._tokens[slot, :count].tolist(),
            self._logprobs[slot, :count].tolist(),
            self._sampling_logprobs[slot, :count].tolist(),
        )

    def is_finite(self, slot: int) -> bool:
        """Whether the last token of a slot was sampled from finite logits."""
        return bool(np.isfinite(self._logprobs[slot, self.count(slot) - 1]))

    def remove(self, slots: Sequence[int]) -> tuple[list[int], list[int]]:
        """Free ``slots``; returns (sources, targets) of the slots that moved to fill them."""
        freed = set(slots)
        kept = len(self) - len(freed)
        targets = sorted(slot for slot in freed if slot < kept)
        sources = [slot for slot in range(kept, len(self)) if slot not in freed]
        for array in self._arrays().values():
            array[targets] = array[sources]
        for source, target in zip(sources, targets, strict=True):
            self.sequences[target] = self.sequences[source]
        # Slots without a sequence still run in a padded batch, at their own position 0.
        self.length[kept : len(self)] = 1
        self.last_token[kept : len(self)] = 0
        del self.sequences[kept:]
        return sources, targets

    def _append_top(self, slots: slice, top: TopTokens) -> None:
        for row, offset in enumerate(np.flatnonzero(self._top_logprobs[slots])):
            sequence = self.sequences[slots.start + offset]
            sequence.top_logprobs.append(top.select(row, sequence.request.top_logprobs))

    def _arrays(self) -> dict[str, NDArray[Any]]:
        return {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}

    def _make_room(self, slots: int, sequences: Sequence[SequenceState]) -> None:
        """Grow the arrays to ``slots`` slots, and the columns to what the new sequences need."""
        height = max(len(self.length), MIN_ROWS, 1 << (slots - 1).bit_length())
        longest = max(sequence.limit - len(sequence.tokens) for sequence in sequences)
        columns = max(self._tokens.shape[1], 1 << (longest - 1).bit_length())
        stops = max(self._stop_ids.shape[1], *(len(sequence.stop_ids) for sequence in sequences))
        sizes = {"_stop_ids": stops, "_tokens": columns, "_logprobs": columns}
        sizes["_sampling_logprobs"] = columns
        fills = {"_stop_ids": _NO_TOKEN, "length": 1}
        for name, array in self._arrays().items():
            shape = (height, sizes[name]) if name in sizes else (height,)
            if array.shape == shape:
                continue
            grown = np.full(shape, fills.get(name, 0), array.dtype)
            grown[tuple(slice(0, size) for size in array.shape)] = array
            setattr(self, name, grown)
