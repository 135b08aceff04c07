"""The compiled loops as differentiable functions, for packed float32 rows on the CPU.

Legend: R tokens, H hidden size, A heads, G key heads, D size of a head, V vocabulary. All tensors
are contiguous. The loops must be available (``hearth.kernels.ops.kernels``).
"""

# Each autograd function has arguments of its own, and as many as torch must pass one by one.
# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from hearth.kernels.ops import RopeShape, TreeShape, kernels
from hearth.threads import refresh

_PARTS = 16
"""Partial sums of a norm's weight gradient (``PARTS`` in cpu.c)."""


@dataclass(frozen=True, eq=False)
class Tree:
    """Which tokens of a packed batch attend to which: clusters of sequences that share a prefix.

    ``clusters`` [n, 4] (int64): first token and number of tokens of the prefix, first and end index
    of its sequences. ``sequences`` [m, 2]: first token and number of tokens. A token attends to the
    prefix of its cluster and to its own sequence, both up to itself.
    """

    clusters: Tensor
    sequences: Tensor
    most_keys: int
    """The most tokens that any token attends to."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, of rows [R, H] (arXiv:1910.07467)."""
    return _Norm.apply(x, weight, eps)  # pyright: ignore[reportReturnType]


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + y, and the same normalized."""
    return _AddNorm.apply(x, y, weight, eps)  # pyright: ignore[reportReturnType]


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return _SiluMul.apply(gate, up)  # pyright: ignore[reportReturnType]


def rope(
    x: Tensor, norm: Tensor | None, eps: float, rotations: tuple[Tensor, Tensor], positions: Tensor
) -> Tensor:
    """Heads [R, A, D], RMS-normalized where ``norm`` [D] is given, rotated to their positions.

    ``rotations`` are cosines and sines [C, D] (arXiv:2104.09864), ``positions`` [R] int64.
    """
    return _Rope.apply(x, norm, eps, *rotations, positions)  # pyright: ignore[reportReturnType]


def tree_attention(q: Tensor, k: Tensor, v: Tensor, tree: Tree, scale: float) -> Tensor:
    """Softmax attention [R, A, D] of q [R, A, D] to k and v [R, G, D] within a ``Tree``."""
    return _TreeAttention.apply(q, k, v, tree, scale)  # pyright: ignore[reportReturnType]


def products(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """x [R, H] times each of ``weights`` [O, H], transposed: [R, O] each.

    The backward pass adds the gradients in x up inside the products instead of afterwards.
    """
    return _Products.apply(x, *weights)  # pyright: ignore[reportReturnType]


def score(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    """Logprobs [R] of ``targets`` [R] under softmax(logits / temperature) [R, V].

    The backward pass overwrites the logits with their gradient: no other code may use them.
    """
    return _Score.apply(logits, targets, 1.0 / temperature)  # pyright: ignore[reportReturnType]


def _loops() -> ctypes.CDLL:
    loops = kernels()
    assert loops is not None, "callers check kernels() first"
    return loops.library


class _Norm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out, scales = torch.empty_like(x), x.new_empty(x.shape[0])
        _loops().hearth_norm_forward(
            x.data_ptr(),
            None,
            weight.data_ptr(),
            eps,
            *x.shape,
            None,
            out.data_ptr(),
            scales.data_ptr(),
            torch.get_num_threads(),
        )
        ctx.save_for_backward(x, weight, scales)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return *_norm_backward(ctx, grad, None), None


class _AddNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, weight: Tensor, eps: float) -> Any:
        total, out, scales = torch.empty_like(x), torch.empty_like(x), x.new_empty(x.shape[0])
        _loops().hearth_norm_forward(
            x.data_ptr(),
            y.data_ptr(),
            weight.data_ptr(),
            eps,
            *x.shape,
            total.data_ptr(),
            out.data_ptr(),
            scales.data_ptr(),
            torch.get_num_threads(),
        )
        ctx.save_for_backward(total, weight, scales)
        return total, out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, total_grad: Tensor, grad: Tensor) -> Any:
        x_grad, weight_grad = _norm_backward(ctx, grad, total_grad.contiguous())
        return x_grad, x_grad, weight_grad, None


def _norm_backward(ctx: Any, grad: Tensor, more: Tensor | None) -> tuple[Tensor, Tensor | None]:
    x, weight, scales = ctx.saved_tensors
    wants_weight = weight.requires_grad
    partial = weight.new_zeros(_PARTS, x.shape[1]) if wants_weight else None
    x_grad, grad = torch.empty_like(x), grad.contiguous()
    _loops().hearth_norm_backward(
        x.data_ptr(),
        weight.data_ptr(),
        scales.data_ptr(),
        grad.data_ptr(),
        _address(more),
        *x.shape,
        x_grad.data_ptr(),
        _address(partial),
        torch.get_num_threads(),
    )
    return x_grad, None if partial is None else partial.sum(0)


class _SiluMul(Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        out = torch.empty_like(gate)
        _loops().hearth_silu_forward(
            gate.data_ptr(), up.data_ptr(), gate.numel(), out.data_ptr(), torch.get_num_threads()
        )
        ctx.save_for_backward(gate, up)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        grad = grad.contiguous()
        gate_grad, up_grad = torch.empty_like(gate), torch.empty_like(up)
        _loops().hearth_silu_backward(
            gate.data_ptr(),
            up.data_ptr(),
            grad.data_ptr(),
            gate.numel(),
            gate_grad.data_ptr(),
            up_grad.data_ptr(),
            torch.get_num_threads(),
        )
        return gate_grad, up_grad


class _Rope(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm: Tensor | None,
        eps: float,
        cosines: Tensor,
        sines: Tensor,
        positions: Tensor,
    ) -> Tensor:
        rows, heads, dim = x.shape
        out, scales = torch.empty_like(x), x.new_empty(rows, heads)
        ctx.shape = RopeShape(rows, heads, dim, eps, torch.get_num_threads())
        _loops().hearth_rope_forward(
            x.data_ptr(),
            _address(norm),
            cosines.data_ptr(),
            sines.data_ptr(),
            positions.data_ptr(),
            out.data_ptr(),
            scales.data_ptr(),
            ctypes.byref(ctx.shape),
        )
        ctx.save_for_backward(None if norm is None else x, norm, scales, cosines, sines, positions)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, norm, scales, cosines, sines, positions = ctx.saved_tensors
        ctx.shape.threads = torch.get_num_threads()
        grad = grad.contiguous()
        x_grad, partial = torch.empty_like(grad), None
        if norm is not None and norm.requires_grad:
            partial = norm.new_zeros(_PARTS, norm.shape[0])
        _loops().hearth_rope_backward(
            _address(x),
            _address(norm),
            scales.data_ptr(),
            cosines.data_ptr(),
            sines.data_ptr(),
            positions.data_ptr(),
            grad.data_ptr(),
            x_grad.data_ptr(),
            _address(partial),
            ctypes.byref(ctx.shape),
        )
        norm_grad = None if partial is None else partial.sum(0)
        return x_grad, norm_grad, None, None, None, None


class _TreeAttention(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, tree: Tree, scale: float) -> Tensor:
        refresh()
        rows, heads, dim = q.shape
        ctx.tree = tree
        ctx.shape = TreeShape(
            tree.clusters.shape[0],
            heads,
            k.shape[1],
            dim,
            tree.most_keys,
            scale,
            torch.get_num_threads(),
        )
        out, totals = torch.empty_like(q), q.new_empty(rows, heads)
        _loops().hearth_tree_forward(
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            tree.clusters.data_ptr(),
            tree.sequences.data_ptr(),
            out.data_ptr(),
            totals.data_ptr(),
            ctypes.byref(ctx.shape),
        )
        ctx.save_for_backward(q, k, v, out, totals)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        refresh()
        q, k, v, out, totals = ctx.saved_tensors
        ctx.shape.threads = torch.get_num_threads()
        grad = grad.contiguous()
        q_grad, k_grad, v_grad = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        _loops().hearth_tree_backward(
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            out.data_ptr(),
            totals.data_ptr(),
            grad.data_ptr(),
            ctx.tree.clusters.data_ptr(),
            ctx.tree.sequences.data_ptr(),
            q_grad.data_ptr(),
            k_grad.data_ptr(),
            v_grad.data_ptr(),
            ctypes.byref(ctx.shape),
        )
        return q_grad, k_grad, v_grad, None, None


class _Products(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Any:
        ctx.save_for_backward(x, *weights)
        return tuple(x @ weight.t() for weight in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        wants_x, *wanted = ctx.needs_input_grad
        x_grad = None
        if wants_x:
            x_grad = grads[0] @ weights[0]
            for grad, weight in zip(grads[1:], weights[1:], strict=True):
                x_grad.addmm_(grad, weight)
        pairs = zip(grads, wanted, strict=True)
        return x_grad, *(grad.t() @ x if is_wanted else None for grad, is_wanted in pairs)


class _Score(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, factor: float) -> Tensor:
        rows, vocab = logits.shape
        logprobs, largest, log_sums = logits.new_empty(3, rows)
        _loops().hearth_score_forward(
            logits.data_ptr(),
            targets.data_ptr(),
            factor,
            rows,
            vocab,
            logprobs.data_ptr(),
            largest.data_ptr(),
            log_sums.data_ptr(),
            torch.get_num_threads(),
        )
        ctx.save_for_backward(logits, targets, largest, log_sums)
        ctx.factor = factor
        return logprobs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        logits, targets, largest, log_sums = ctx.saved_tensors
        grad = grad.contiguous()
        _loops().hearth_score_backward(
            logits.data_ptr(),
            targets.data_ptr(),
            ctx.factor,
            largest.data_ptr(),
            log_sums.data_ptr(),
            grad.data_ptr(),
            *logits.shape,
            torch.get_num_threads(),
        )
        return logits, None, None


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
