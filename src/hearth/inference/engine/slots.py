"""The active rows of the batch as arrays: what changes each step is never a Python object per row.

Legend: B active rows. DecodeSlots 0..B-1 are in use; a hole is filled from the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hearth.inference.backend import SampledToken
from hearth.inference.engine.cache import MIN_ROWS
from hearth.inference.engine.sampler import SampledTokens, SamplingValues, TopTokens
from hearth.inference.engine.sequence import Running
from hearth.wire.completions import FinishReason

_NO_TOKEN = -1


class DecodeSlots:
    """Per-row state. ``length`` counts a row's tokens, prompt included."""

    def __init__(self) -> None:
        self.sequences: list[Running] = []
        self.last_token = np.zeros(0, np.int64)
        self.length = np.zeros(0, np.int64)
        self._prompt_length = np.zeros(0, np.int64)
        self._limit = np.zeros(0, np.int64)
        self._seed = np.zeros(0, np.uint64)
        self._temperature = np.zeros(0, np.float64)
        self._top_p = np.zeros(0, np.float64)
        self._top_k = np.zeros(0, np.int64)
        self._watched = np.zeros(0, np.bool_)
        self._heard = np.zeros(0, np.bool_)
        self._routed = np.zeros(0, np.bool_)
        self._top_logprobs = np.zeros(0, np.int64)
        self._stop_ids = np.full((0, 1), _NO_TOKEN, np.int64)
        self._tokens = np.zeros((0, 0), np.int64)
        self._logprobs = np.zeros((0, 0), np.float32)
        self._sampling_logprobs = np.zeros((0, 0), np.float32)

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def longest_limit(self) -> int:
        """The most tokens that any active row may come to."""
        return int(self._limit[: len(self)].max(initial=0))

    @property
    def longest(self) -> int:
        """The most tokens that any active row has."""
        return int(self.length[: len(self)].max(initial=0))

    @property
    def are_routed(self) -> bool:
        """Whether any active row is to tell its experts."""
        return bool(self._routed[: len(self)].any())

    def add(self, sequences: Sequence[Running]) -> slice:
        """Give each sequence a row; returns the new rows."""
        start, stop = len(self), len(self) + len(sequences)
        self._make_room(stop, sequences)
        rows = slice(start, stop)
        requests = [sequence.request for sequence in sequences]
        self.sequences.extend(sequences)
        lengths = [len(sequence.tokens) for sequence in sequences]
        self.length[rows] = self._prompt_length[rows] = lengths
        self._limit[rows] = [sequence.limit for sequence in sequences]
        self._seed[rows] = np.array([sequence.seed for sequence in sequences], np.uint64)
        self._temperature[rows] = [request.temperature for request in requests]
        self._top_p[rows] = [request.top_p for request in requests]
        self._top_k[rows] = [request.top_k for request in requests]
        self._watched[rows] = [sequence.watch is not None for sequence in sequences]
        self._heard[rows] = [request.listener is not None for request in requests]
        self._routed[rows] = [request.routing for request in requests]
        self._top_logprobs[rows] = [request.top_logprobs for request in requests]
        self._stop_ids[rows] = _NO_TOKEN
        for row, sequence in enumerate(sequences, start):
            self._stop_ids[row, : len(sequence.stop_ids)] = sequence.stop_ids
        return rows

    def inputs(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Last tokens and their positions, padded to at least ``MIN_ROWS`` rows."""
        rows = max(len(self), MIN_ROWS)
        return self.last_token[:rows], self.length[:rows] - 1

    def sampling(self, rows: slice) -> tuple[SamplingValues, NDArray[np.uint64], NDArray[np.int64]]:
        """Sampling values, seeds and the positions of the tokens to be drawn for ``rows``."""
        top = self._top_logprobs[rows]
        values = SamplingValues(
            self._temperature[rows],
            self._top_p[rows],
            self._top_k[rows],
            top if top.any() else None,
        )
        return values, self._seed[rows], self.length[rows]

    def take_routing(self, choices: NDArray[np.unsignedinteger] | None) -> None:
        """Note the experts [B, M, K] that every row's next token is drawn with."""
        if choices is None:
            return
        for row in np.flatnonzero(self._routed[: len(self)]):
            self.sequences[row].routing.append(choices[row])

    def take(self, rows: slice, draw: SampledTokens) -> list[tuple[int, FinishReason]]:
        """Append one drawn token to each of ``rows``; returns (row, reason) of those that end."""
        index = np.arange(rows.start, rows.stop)
        place = self.length[rows] - self._prompt_length[rows]
        self._tokens[index, place] = draw.tokens
        self._logprobs[index, place] = draw.logprobs
        self._sampling_logprobs[index, place] = draw.sampling_logprobs
        self.last_token[rows] = draw.tokens
        self.length[rows] += 1
        if draw.top is not None:
            self._take_top(rows, draw.top)
        stopped = (draw.tokens[:, None] == self._stop_ids[rows]).any(axis=1)
        for row in np.flatnonzero(self._watched[rows]):
            watch = self.sequences[rows.start + row].watch
            assert watch is not None
            stopped[row] |= watch.push(int(draw.tokens[row]))
        ended = stopped | (self.length[rows] >= self._limit[rows])
        ended |= ~np.isfinite(draw.logprobs)
        reasons: tuple[FinishReason, FinishReason] = ("length", "stop")
        return [
            (rows.start + int(row), reasons[int(stopped[row])]) for row in np.flatnonzero(ended)
        ]

    def tell(self, rows: slice, draw: SampledTokens) -> None:
        """Tell the listeners of ``rows`` what ``draw`` gave them; broken logits are no token."""
        for row in np.flatnonzero(self._heard[rows] & np.isfinite(draw.logprobs)):
            sequence = self.sequences[rows.start + row]
            sequence.tell(
                SampledToken(
                    int(draw.tokens[row]),
                    float(draw.logprobs[row]),
                    float(draw.sampling_logprobs[row]),
                    sequence.top_logprobs[-1] if sequence.top_logprobs else None,
                    sequence.routing[-1] if sequence.routing else None,
                )
            )

    def count(self, row: int) -> int:
        """The number of tokens of a row's completion."""
        return int(self.length[row] - self._prompt_length[row])

    def drawn(self, row: int) -> tuple[list[int], list[float], list[float]]:
        """Tokens, logprobs and sampling logprobs of a row's completion."""
        count = self.count(row)
        return (
            self._tokens[row, :count].tolist(),
            self._logprobs[row, :count].tolist(),
            self._sampling_logprobs[row, :count].tolist(),
        )

    def is_finite(self, row: int) -> bool:
        """Whether the last drawn token of a row came from finite logits."""
        return bool(np.isfinite(self._logprobs[row, self.count(row) - 1]))

    def remove(self, rows: Sequence[int]) -> tuple[list[int], list[int]]:
        """Free ``rows``; returns (sources, targets) of the rows that were moved into the holes."""
        gone = set(rows)
        kept = len(self) - len(gone)
        targets = sorted(row for row in gone if row < kept)
        sources = [row for row in range(kept, len(self)) if row not in gone]
        for array in self._arrays():
            array[targets] = array[sources]
        for source, target in zip(sources, targets, strict=True):
            self.sequences[target] = self.sequences[source]
        # Slots without a sequence still run in a padded batch, at position 0 of their own slot.
        self.length[kept : len(self)] = 1
        self.last_token[kept : len(self)] = 0
        del self.sequences[kept:]
        return sources, targets

    def _take_top(self, rows: slice, top: TopTokens) -> None:
        for row, tokens, logprobs in zip(top.rows, top.tokens, top.logprobs, strict=True):
            sequence = self.sequences[rows.start + row]
            count = sequence.request.top_logprobs
            told = zip(tokens[:count].tolist(), logprobs[:count].tolist(), strict=True)
            sequence.top_logprobs.append(list(told))

    def _arrays(self) -> list[NDArray[Any]]:
        return [value for value in vars(self).values() if isinstance(value, np.ndarray)]

    def _make_room(self, rows: int, sequences: Sequence[Running]) -> None:
        """Grow the arrays to ``rows`` rows, and the columns to what the new sequences need."""
        height = max(len(self.length), MIN_ROWS, 1 << (rows - 1).bit_length())
        longest = max(sequence.limit - len(sequence.tokens) for sequence in sequences)
        columns = max(self._tokens.shape[1], 1 << (longest - 1).bit_length())
        stops = max(self._stop_ids.shape[1], *(len(sequence.stop_ids) for sequence in sequences))
        sizes = {"_stop_ids": stops, "_tokens": columns, "_logprobs": columns}
        sizes["_sampling_logprobs"] = columns
        fills = {"_stop_ids": _NO_TOKEN, "length": 1}
        for name, array in list(vars(self).items()):
            if not isinstance(array, np.ndarray):
                continue
            shape = (height, sizes[name]) if name in sizes else (height,)
            if array.shape == shape:
                continue
            grown = np.full(shape, fills.get(name, 0), array.dtype)
            grown[tuple(slice(0, size) for size in array.shape)] = array
            setattr(self, name, grown)
