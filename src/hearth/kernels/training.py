"""The compiled loops as differentiable functions, for packed float32 rows on the CPU.

Legend: R tokens, H hidden size, A heads, G key heads, D size of a head, V vocabulary. All tensors
are contiguous. The loops must be available (``hearth.kernels.ops.kernels``).
"""

# Each autograd function has arguments of its own, and as many as torch must pass one by one.
# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator, Sequence
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
_WIDENED = 2**22
"""Values of a bfloat16 weight that are float32 at one time: 16 MiB."""


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


@dataclass(frozen=True, eq=False)
class Linear:
    """A linear layer [O, H], and an adapter's update of rank K: ``scale * x @ down.T @ up.T``."""

    weight: Tensor
    """float32, or bfloat16 that is computed with in float32."""
    bias: Tensor | None = None
    """[O]."""
    down: Tensor | None = None
    """[K, H]; None without an adapter."""
    up: Tensor | None = None
    """[O, K]."""
    scale: float = 1.0


def linears(
    x: Tensor, *layers: Linear, compute_x: Callable[[], Tensor] | None = None
) -> tuple[Tensor, ...]:
    """The outputs [R, O] of each layer for the same x [R, H].

    An update is added to its layer's output inside a product. The backward pass keeps x once and
    each adapter's K values, adds all gradients in x up inside products, and computes none that
    nobody wants. With ``compute_x`` it does not keep x and gets the same bits from there.
    """
    flat = [(layer.weight, layer.bias, layer.down, layer.up) for layer in layers]
    scales = [layer.scale for layer in layers]
    return _Linears.apply(x, compute_x, scales, *itertools.chain(*flat))  # pyright: ignore[reportReturnType]


def score(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    """Logprobs [R] of ``targets`` [R] under softmax(logits / temperature) [R, V].

    The backward pass overwrites the logits with their gradient: no other code may use them.
    """
    return _Score.apply(logits, targets, 1.0 / temperature)  # pyright: ignore[reportReturnType]


def score_frozen(states: Tensor, head: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    """Logprobs [R] as ``score`` has them, of states [R, H] under a frozen ``head`` [V, H].

    The gradient of a row's logprob in its state is computed with it and kept, [R, H] instead of
    logits [R, V]: the backward pass scales it. The head may be bfloat16.
    """
    return _ScoreFrozen.apply(states, head, targets, 1.0 / temperature)  # pyright: ignore[reportReturnType]


def _loops() -> ctypes.CDLL:
    loops = kernels()
    assert loops is not None, "callers check kernels() first"
    return loops.library


class _Norm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out, scales = torch.empty_like(x), x.new_empty(x.shape[0])
        threads = torch.get_num_threads()
        given, made = _addresses(x, None, weight), _addresses(None, out, scales)
        _loops().hearth_norm_forward(*given, eps, *x.shape, *made, threads)
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
        threads = torch.get_num_threads()
        given, made = _addresses(x, y, weight), _addresses(total, out, scales)
        _loops().hearth_norm_forward(*given, eps, *x.shape, *made, threads)
        ctx.save_for_backward(total, weight, scales)
        return total, out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, total_grad: Tensor, grad: Tensor) -> Any:
        x_grad, weight_grad = _norm_backward(ctx, grad, total_grad.contiguous())
        return x_grad, x_grad, weight_grad, None


def _norm_backward(ctx: Any, grad: Tensor, more: Tensor | None) -> tuple[Tensor, Tensor | None]:
    x, weight, scales = ctx.saved_tensors
    partial = weight.new_zeros(_PARTS, x.shape[1]) if weight.requires_grad else None
    x_grad, grad, threads = torch.empty_like(x), grad.contiguous(), torch.get_num_threads()
    given, made = _addresses(x, weight, scales, grad, more), _addresses(x_grad, partial)
    _loops().hearth_norm_backward(*given, *x.shape, *made, threads)
    return x_grad, None if partial is None else partial.sum(0)


class _SiluMul(Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        out = torch.empty_like(gate)
        threads = torch.get_num_threads()
        _loops().hearth_silu_forward(*_addresses(gate, up), gate.numel(), out.data_ptr(), threads)
        ctx.save_for_backward(gate, up)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        grad, threads = grad.contiguous(), torch.get_num_threads()
        gate_grad, up_grad = torch.empty_like(gate), torch.empty_like(up)
        given, made = _addresses(gate, up, grad), _addresses(gate_grad, up_grad)
        _loops().hearth_silu_backward(*given, gate.numel(), *made, threads)
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
            *_addresses(x, norm, cosines, sines, positions, out, scales), ctypes.byref(ctx.shape)
        )
        ctx.save_for_backward(None if norm is None else x, norm, scales, cosines, sines, positions)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, norm, *rest = ctx.saved_tensors
        ctx.shape.threads = torch.get_num_threads()
        grad = grad.contiguous()
        x_grad, partial = torch.empty_like(grad), None
        if norm is not None and norm.requires_grad:
            partial = norm.new_zeros(_PARTS, norm.shape[0])
        _loops().hearth_rope_backward(
            *_addresses(x, norm, *rest, grad, x_grad, partial), ctypes.byref(ctx.shape)
        )
        norm_grad = None if partial is None else partial.sum(0)
        return x_grad, norm_grad, None, None, None, None


class _TreeAttention(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, tree: Tree, scale: float) -> Tensor:
        refresh()
        rows, heads, dim = q.shape
        clusters, kv_heads, threads = len(tree.clusters), k.shape[1], torch.get_num_threads()
        ctx.tree = tree
        ctx.shape = TreeShape(clusters, heads, kv_heads, dim, tree.most_keys, scale, threads)
        out, totals = torch.empty_like(q), q.new_empty(rows, heads)
        _loops().hearth_tree_forward(
            *_addresses(q, k, v, tree.clusters, tree.sequences, out, totals),
            ctypes.byref(ctx.shape),
        )
        ctx.save_for_backward(q, k, v, out, totals)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        refresh()
        saved, tree, grad = ctx.saved_tensors, ctx.tree, grad.contiguous()
        ctx.shape.threads = torch.get_num_threads()
        grads = [torch.empty_like(tensor) for tensor in saved[:3]]
        given = _addresses(*saved, grad, tree.clusters, tree.sequences)
        _loops().hearth_tree_backward(*given, *_addresses(*grads), ctypes.byref(ctx.shape))
        return *grads, None, None


class _Linears(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        compute_x: Callable[[], Tensor] | None,
        scales: Sequence[float],
        *flat: Tensor | None,
    ) -> Any:
        outputs: list[Tensor] = []
        inners: list[Tensor | None] = []
        for scale, (weight, bias, down, up) in zip(scales, _by_layer(flat), strict=True):
            output, inner = _multiply(x, weight), None
            if bias is not None:
                output.add_(bias)
            if down is not None:
                inner = (x @ down.t()).mul_(scale)
                output.addmm_(inner, up.t())
            outputs.append(output)
            inners.append(inner)
        ctx.scales, ctx.compute_x = scales, compute_x
        ctx.save_for_backward(x if compute_x is None else None, *inners, *flat)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        count = len(grads)
        x, *saved = ctx.saved_tensors
        wants_x, _, _, *wanted = ctx.needs_input_grad
        if x is None:
            # What it holds is free with this step's other tensors.
            x, ctx.compute_x = ctx.compute_x(), None
        layers = zip(grads, ctx.scales, saved[:count], _by_layer(saved[count:]), strict=True)
        x_grad: Tensor | None = None
        flat: list[Tensor | None] = []
        for (grad, scale, inner, layer), wants in zip(layers, _by_layer(wanted), strict=True):
            weight, _, down, up = layer
            if wants_x:
                x_grad = _multiply_back(grad, weight, x_grad)
            flat += [grad.t() @ x if wants[0] else None, grad.sum(0) if wants[1] else None]
            if inner is None:
                flat += [None, None]
                continue
            inner_grad = (grad @ up).mul_(scale)
            if x_grad is not None:
                x_grad.addmm_(inner_grad, down)
            flat += [
                inner_grad.t() @ x if wants[2] else None,
                grad.t() @ inner if wants[3] else None,
            ]
        return x_grad, None, None, *flat


def _multiply(x: Tensor, weight: Tensor) -> Tensor:
    """x [R, H] @ weight [O, H], transposed."""
    output = x.new_empty(x.shape[0], weight.shape[0])
    for rows, values in _widen(weight):
        torch.mm(x, values.t(), out=output[:, rows])
    return output


def _multiply_back(grad: Tensor, weight: Tensor, others: Tensor | None = None) -> Tensor:
    """grad [R, O] @ weight [O, H], added to ``others`` in place."""
    for rows, values in _widen(weight):
        part = grad[:, rows]
        others = part @ values if others is None else others.addmm_(part, values)
    assert others is not None, "a weight has rows"
    return others


def _widen(weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """A float32 weight [O, H] whole; rows of a bfloat16 one in float32, part by part."""
    rows, columns = weight.shape
    step = rows if weight.dtype == torch.float32 else max(1, _WIDENED // columns)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        yield part, weight[part].float()


def _by_layer(flat: Sequence[Any]) -> list[Sequence[Any]]:
    """What layers have of weight, bias, down and up, from all of it end to end."""
    return [flat[start : start + 4] for start in range(0, len(flat), 4)]


class _Score(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, factor: float) -> Tensor:
        logprobs, *kept = _score(logits, targets, factor)
        ctx.save_for_backward(logits, targets, *kept)
        ctx.factor = factor
        return logprobs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        logits, targets, *kept = ctx.saved_tensors
        _become_gradient(logits, targets, ctx.factor, kept, grad.contiguous())
        return logits, None, None


class _ScoreFrozen(Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, head: Tensor, targets: Tensor, factor: float) -> Tensor:
        logits = _multiply(states, head)
        logprobs, *kept = _score(logits, targets, factor)
        if ctx.needs_input_grad[0]:
            _become_gradient(logits, targets, factor, kept, torch.ones_like(logprobs))
            ctx.save_for_backward(_multiply_back(logits, head))
        return logprobs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        (slopes,) = ctx.saved_tensors
        return slopes * grad[:, None], None, None, None


def _score(logits: Tensor, targets: Tensor, factor: float) -> tuple[Tensor, Tensor, Tensor]:
    """Logprobs, and what their gradient needs: the largest logits and the sums' logs, [R] each."""
    rows, vocab = logits.shape
    logprobs, largest, log_sums = logits.new_empty(3, rows)
    given, made = _addresses(logits, targets), _addresses(logprobs, largest, log_sums)
    _loops().hearth_score_forward(*given, factor, rows, vocab, *made, torch.get_num_threads())
    return logprobs, largest, log_sums


def _become_gradient(
    logits: Tensor, targets: Tensor, factor: float, kept: Sequence[Tensor], grad: Tensor
) -> None:
    """Overwrite logits with their gradient, from that of the logprobs [R] and what a score kept."""
    given, others = _addresses(logits, targets), _addresses(*kept, grad)
    threads = torch.get_num_threads()
    _loops().hearth_score_backward(*given, factor, *others, *logits.shape, threads)


def _addresses(*tensors: Tensor | None) -> list[int | None]:
    """Valid as long as the caller keeps the tensors."""
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]
