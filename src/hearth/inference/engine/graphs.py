"""Decoding steps that are recorded once and replayed from then on (CUDA graphs).

A step of a module is one to two thousand small kernels. A GPU runs one in microseconds, and Python
needs several times as long to launch it, so decoding waits for Python. A replay launches all of
them at once.

There is one recording per bucket: a number of rows and a number of keys. The first step of a bucket
runs eagerly; the second is recorded, checked against its own eager logits, and replayed from then
on. A recording has the addresses of weights and cache; ``DecodeGraphs`` drops its recordings when
either has moved, and records nothing after a failure.

Legend: R rows of the batch, B rows of a bucket, S slots of the cache, V vocabulary.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hearth.errors import EngineError
from hearth.inference.engine.cache import MIN_ROWS, SlotCache
from hearth.inference.engine.transfers import stage
from hearth.models.loading import LoadedModel

logger = logging.getLogger(__name__)

_LEAST_SPAN = 64
_MOST_GRAPHS = 64
"""Recordings that are kept; each needs some MiB."""

# PyTorch allows one recording at a time in a process.
_one_recording = threading.Lock()

Step = Callable[[Tensor, Tensor, int, SlotCache], Tensor]
"""Tokens [B], their positions [B] and a key span to logits [B, V] in any dtype. It computes on the
device alone: on the CPU it may read only shapes and the span."""
Replay = Callable[[], None]
_Bucket = tuple[int, int]


class CudaRecorder:
    """Records CUDA graphs that share one pool of memory; no two are replayed at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None

    def record(self, run: Callable[[], None]) -> Replay:
        """A function that replays ``run`` on the current stream; ``run`` is not executed here.

        Raises:
            RuntimeError: ``run`` does something that cannot be recorded, such as waiting for the
                device.
        """
        with _one_recording, torch.cuda.device(self._device):
            self._stream = self._stream or torch.cuda.Stream()
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            # Thread-local: a trainer in this process may go on using the device.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                run()
        return graph.replay

    def forget(self) -> None:
        """Take a new pool for the next recording; all earlier ones were dropped."""
        # A pool without graphs must not be reused before the allocator has released it.
        self._pool = None


def row_bucket(rows: int) -> int:
    """The rows, at least ``rows``, that a step computes: 16, 24, 32, 48, 64, 96, 128, ..."""
    return max(MIN_ROWS, _round_up(rows, 2))


def span_bucket(tokens: int) -> int:
    """The keys, at least ``tokens``, that attention reads: a quarter above ``tokens`` at most, or a
    multiple of 64."""
    return _round_up(-(-tokens // _LEAST_SPAN) * _LEAST_SPAN, 4)


def _round_up(count: int, parts: int) -> int:
    """Up to a whole multiple of the power of two below, divided by ``parts``."""
    step = max(1, (1 << (count - 1).bit_length()) // (2 * parts))
    return -(-count // step) * step


class DecodeGraphs:
    """Decodes with the ``most`` last used recorded steps. Used by one thread at a time.

    A GPU's rounding depends on the number of rows anyway, so buckets are coarser than the sizes
    that give equal bits on the CPU.
    """

    def __init__(
        self, loaded: LoadedModel, step: Step, recorder: CudaRecorder, *, most: int = _MOST_GRAPHS
    ) -> None:
        self._loaded = loaded
        self._most = most
        self._step = step
        self._recorder = recorder
        self._device = torch.device(loaded.device)
        self._graphs: OrderedDict[_Bucket, Replay] = OrderedDict()
        self._seen: set[_Bucket] = set()
        self._buffers: _GraphBuffers | None = None
        self._weights = _list_addresses(loaded)
        self.is_recording = True
        """False after a recording failed."""

    def __len__(self) -> int:
        return len(self._graphs)

    def weights_changed(self) -> None:
        """Drop the recordings if weights have moved, or other ones are used."""
        addresses = _list_addresses(self._loaded)
        if addresses != self._weights:
            self._weights = addresses
            self.clear()

    def clear(self) -> None:
        """Drop all recordings."""
        self._graphs.clear()
        self._seen.clear()
        self._recorder.forget()

    @torch.inference_mode()
    def decode(
        self, tokens: NDArray[np.int64], positions: NDArray[np.int64], cache: SlotCache
    ) -> Tensor:
        """Logits [R, V] (float32) after ``tokens`` at ``positions`` [R], which enter the cache.

        They are in a buffer that the next step overwrites.
        """
        buffers = self._buffers_for(cache)
        slots, capacity = cache.keys.shape[1], cache.keys.shape[3]
        rows = min(row_bucket(len(tokens)), slots)
        span = min(span_bucket(int(positions.max()) + 1), capacity)
        buffers.copy_inputs(tokens, positions)

        def run() -> None:
            logits = self._step(buffers.tokens[:rows], buffers.positions[:rows], span, cache)
            buffers.logits[:rows].copy_(logits)

        self._run((rows, span), run, buffers.logits[:rows])
        return buffers.logits[: len(tokens)]

    def _run(self, bucket: _Bucket, run: Callable[[], None], logits: Tensor) -> None:
        """Execute ``run`` or its recording."""
        replay = self._graphs.get(bucket)
        if replay is not None:
            self._graphs.move_to_end(bucket)
            replay()
            return
        run()
        if self.is_recording and bucket in self._seen:
            self._record(bucket, run, logits)
        self._seen.add(bucket)

    def _record(self, bucket: _Bucket, run: Callable[[], None], logits: Tensor) -> None:
        """Record ``run``, which has just written ``logits``; they keep their values in any case."""
        expected = logits.clone()
        try:
            replay = self._recorder.record(run)
            replay()
            _check_same(logits, expected)
        except Exception as error:
            self.is_recording = False
            self.clear()
            logits.copy_(expected)
            logger.warning(
                "decoding of %s continues without CUDA graphs: the step of %d rows and %d keys "
                "could not be recorded: %s: %s",
                self._loaded.name,
                *bucket,
                type(error).__name__,
                error,
                exc_info=True,
            )
            return
        self._graphs[bucket] = replay
        if len(self._graphs) > self._most:
            self._graphs.popitem(last=False)

    def _buffers_for(self, cache: SlotCache) -> _GraphBuffers:
        address = (cache.keys.data_ptr(), cache.values.data_ptr(), tuple(cache.keys.shape))
        if self._buffers is None or self._buffers.cache_address != address:
            self.clear()
            # The old buffers are freed before the new ones are allocated.
            self._buffers = None
            slots = cache.keys.shape[1]
            inputs = torch.zeros(2, slots, dtype=torch.int64, device=self._device)
            logits = torch.zeros(slots, self._loaded.vocab_size, device=self._device)
            self._buffers = _GraphBuffers(address, inputs, logits)
        return self._buffers


@dataclass(frozen=True, eq=False)
class _GraphBuffers:
    """Where recorded steps read and write; valid as long as the cache has not moved."""

    cache_address: tuple[int, int, tuple[int, ...]]
    inputs: Tensor
    """Tokens and positions, int64 [2, S]."""
    logits: Tensor
    """float32 [S, V]."""

    @property
    def tokens(self) -> Tensor:
        return self.inputs[0]

    @property
    def positions(self) -> Tensor:
        return self.inputs[1]

    def copy_inputs(self, tokens: NDArray[np.int64], positions: NDArray[np.int64]) -> None:
        """Copy in a step's inputs; rows beyond them run at position 0 of their own slots."""
        host = np.zeros(self.inputs.shape, np.int64)
        host[0, : len(tokens)], host[1, : len(positions)] = tokens, positions
        self.inputs.copy_(stage(host, self.inputs.device), non_blocking=True)


def _list_addresses(loaded: LoadedModel) -> tuple[object, ...]:
    """The weights' addresses and the adapter's options, which are fixed in a recorded step."""
    tensors = (*loaded.module.parameters(), *loaded.module.buffers())
    return (loaded.lora, *(tensor.data_ptr() for tensor in tensors))


def _check_same(replayed: Tensor, expected: Tensor) -> None:
    finite = expected[expected.isfinite()]
    scale = 1.0 + (float(finite.abs().max()) if finite.numel() else 0.0)
    # The same kernels on the same numbers; libraries may choose others while recording.
    if not torch.allclose(replayed, expected, rtol=0.0, atol=0.02 * scale, equal_nan=True):
        raise EngineError(
            "a replayed step must give the logits of the step that was recorded, got a difference "
            f"of {float((replayed - expected).abs().max()):.3g}"
        )
