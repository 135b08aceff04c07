"""The compiled loops as calls on tensors. Legend: R rows of a matrix, H columns, V vocabulary.

All tensors are float32, contiguous and on the CPU; nothing is checked here, since every call is
made thousands of times a second. ``Kernels`` exists where the loops could be compiled.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hearth.kernels.build import load_library

_SMALL_WORK = 2**17
_ALLOCATING = ("decode_step", "sample", "tree_forward", "tree_backward")
_POINTER, _INT64, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float


class AttentionShape(ctypes.Structure):
    """Sizes of attention in ``decode_step``; a ``*_stride`` counts elements of the KV cache."""

    _fields_ = (
        ("rows", _INT64),
        ("heads", _INT64),
        ("kv_heads", _INT64),
        ("dim", _INT64),
        ("row_stride", _INT64),
        ("head_stride", _INT64),
        ("threads", _INT64),
        ("eps", _FLOAT),
        ("scale", _FLOAT),
    )


class StepLayer(ctypes.Structure):
    """The addresses of one layer's weights; matrices are in panels (``Kernels.pack``).

    Of a wide model matrices are as the module has them. ``qkv`` is the queries' and ``gate_up`` the
    gate's, and ``k``, ``v`` and ``up`` are the others; else these are None.
    """

    _attention = ("input_norm", "qkv", "bias", "q_norm", "k_norm", "o")
    _mlp = ("post_norm", "gate_up", "down")
    _fields_ = tuple((name, _POINTER) for name in (*_attention, *_mlp, "k", "v", "up"))


class LoraUpdate(ctypes.Structure):
    """An adapter's update of one linear layer: ``down`` [K, I] and ``up`` [K, O]; K 0 is none."""

    _fields_ = (("down", _POINTER), ("up", _POINTER), ("rank", _INT64), ("scale", _FLOAT))


class StepModel(ctypes.Structure):
    """The sizes and weights for ``decode_step``; ``layer_stride`` is the cache's, in elements.

    ``is_half`` says that a wide model's linear weights and embedding are bfloat16.
    """

    _fields_ = (
        ("layers", ctypes.POINTER(StepLayer)),
        ("embedding", _POINTER),
        ("final_norm", _POINTER),
        ("head", _POINTER),
        ("head_bias", _POINTER),
        ("cosine", _POINTER),
        ("sine", _POINTER),
        ("num_layers", _INT64),
        ("hidden", _INT64),
        ("inner", _INT64),
        ("vocab", _INT64),
        ("layer_stride", _INT64),
        ("is_wide", _INT64),
        ("is_half", _INT64),
    )


class RopeShape(ctypes.Structure):
    """Sizes for ``rope_*``."""

    _fields_ = (
        ("rows", _INT64),
        ("heads", _INT64),
        ("dim", _INT64),
        ("eps", _FLOAT),
        ("threads", ctypes.c_int32),
    )


class TreeShape(ctypes.Structure):
    """Sizes for ``tree_*``."""

    _fields_ = (
        ("clusters", _INT64),
        ("heads", _INT64),
        ("kv_heads", _INT64),
        ("dim", _INT64),
        ("most_keys", _INT64),
        ("scale", _FLOAT),
        ("threads", ctypes.c_int32),
    )


@dataclass(frozen=True)
class Kernels:
    """The compiled loops; they run on torch's number of threads."""

    library: ctypes.CDLL

    def decode_step(
        self,
        model: StepModel,
        shape: AttentionShape,
        tokens: Tensor,
        positions: Tensor,
        cache: tuple[Tensor, Tensor],
        *,
        adapters: ctypes.Array[Any] | None = None,
    ) -> Tensor:
        """A whole decoding step: logits [R, V] after ``tokens`` at ``positions`` [R] (int64).

        Each thread takes some of the rows through all layers.
        ``adapters`` has for each row the address of its ``LoraUpdate`` array: seven per layer (q,
        k, v, o, gate, up, down), then the head's; None for a row without an adapter.

        Six parameters and no record, which would have to be made anew for every token.
        """
        logits = torch.empty(shape.rows, model.vocab)
        self.library.hearth_decode_step(
            ctypes.byref(model),
            ctypes.byref(shape),
            tokens.data_ptr(),
            positions.data_ptr(),
            adapters,
            cache[0].data_ptr(),
            cache[1].data_ptr(),
            logits.data_ptr(),
        )
        return logits

    def pack(self, weights: Sequence[Tensor], panels: Tensor | None = None) -> Tensor:
        """Weights [O, I], one below the other, as ``decode_step`` reads a small model's.

        They are in panels [P, I, C] of C rows; those given are written again.
        """
        depth = weights[0].shape[1]
        if panels is None:
            columns = self.library.hearth_panel_columns()
            rows = sum(weight.shape[0] for weight in weights)
            panels = torch.zeros(-(-rows // columns), depth, columns)
        first = 0
        for weight in map(Tensor.contiguous, weights):
            place = (weight.shape[0], depth, first, panels.data_ptr())
            self.library.hearth_pack(weight.data_ptr(), *place)
            first += weight.shape[0]
        return panels

    def sample(
        self, logits: Tensor, temperatures: Tensor, fractions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens [R] (int64), and their logprobs [R] before and after the temperature.

        A token is the first whose cumulative probability under ``softmax(logits / temperature)``
        [R, V], in vocabulary order and float64, exceeds its fraction [R] (float64, in [0, 1)) of
        the total. ``temperatures`` [R] are float32 and above 0.
        """
        rows, vocab = logits.shape
        tokens = torch.empty(rows, dtype=torch.int64)
        logprobs, sampled_logprobs = torch.empty(2, rows)
        self.library.hearth_sample(
            logits.data_ptr(),
            temperatures.data_ptr(),
            fractions.data_ptr(),
            rows,
            vocab,
            tokens.data_ptr(),
            logprobs.data_ptr(),
            sampled_logprobs.data_ptr(),
            _threads(rows * vocab),
        )
        return tokens, logprobs, sampled_logprobs


@functools.cache
def kernels() -> Kernels | None:
    """The compiled loops; None where ``load_library`` has none."""
    library = load_library()
    if library is None:
        return None
    p, n, f, i = _POINTER, _INT64, _FLOAT, _INT
    for name, types in {
        "decode_step": (*map(ctypes.POINTER, (StepModel, AttentionShape)), p, p, p, p, p, p),
        "pack": (p, n, n, n, p),
        "norm_forward": (p, p, p, f, n, n, p, p, p, i),
        "norm_backward": (p, p, p, p, p, n, n, p, p, i),
        "silu_forward": (p, p, n, p, i),
        "silu_backward": (p, p, p, n, p, p, i),
        "rope_forward": (*(p,) * 7, ctypes.POINTER(RopeShape)),
        "rope_backward": (*(p,) * 9, ctypes.POINTER(RopeShape)),
        "tree_forward": (*(p,) * 7, ctypes.POINTER(TreeShape)),
        "tree_backward": (*(p,) * 11, ctypes.POINTER(TreeShape)),
        "score_forward": (p, p, f, n, n, p, p, p, i),
        "score_backward": (p, p, f, p, p, p, n, n, i),
        "sample": (p, p, p, n, n, p, p, p, i),
    }.items():
        function = getattr(library, f"hearth_{name}")
        function.argtypes, function.restype = types, None
        if name in _ALLOCATING:
            function.restype, function.errcheck = i, _check_memory
    return Kernels(library)


def _check_memory(failed: int, function: Any, _arguments: Any) -> None:
    if failed:
        raise MemoryError(f"{function.__name__} cannot allocate its work arrays")


def _threads(work: int) -> int:
    """Threads for this number of multiplications: waking a second one must be worth it."""
    return torch.get_num_threads() if work > _SMALL_WORK else 1
