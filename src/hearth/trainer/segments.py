"""Packed tokens as segments, which attention takes without a mask of all tokens.

A segment is consecutive tokens. Each sees the tokens of the segment up to itself, and all tokens of
the segment's prefix: a segment is a prefix, a sequence behind its prefix, or a text alone. The keys
of a shared prefix are gathered for every sequence behind it, since the kernel needs a segment's
keys in one piece.

Legend: S tokens, n segments, E keys of all segments, A heads, G key heads, D size of a head.
"""

# An autograd function chooses its own arguments.
# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from hearth.errors import EngineError
from hearth.kernels.training import Tree

LARGEST_DIM = 256
"""Heads that torch's flash attention takes; multiples of 8 up to this."""


@dataclass(frozen=True, eq=False)
class Segments:
    """Where each segment's queries and keys begin and end."""

    query_starts: Tensor
    """int32 [n + 1], in tokens: segment i has the tokens from entry i to the next."""
    key_starts: Tensor
    """int32 [n + 1], in keys. A segment's last token sees all of its keys, the one before all but
    the last, and so on."""
    most_queries: int
    most_keys: int
    keys: Tensor | None
    """Token of each key, int64 [E]; None where keys are the tokens in their order."""


Kernel = Callable[[Tensor, Tensor, Tensor, Segments, float], Tensor]
"""Queries [S, A, D], keys and values [E, G, D], segments, scale to [S, A, D]; differentiable."""


def find_segments(tree: Tree, device: torch.device) -> Segments:
    """The segments of a packed batch, in the order of its tokens."""
    queries: list[int] = []
    keys: list[Tensor] = []
    is_shared = False
    sequences = tree.sequences.tolist()
    for start, prefix, first, end in tree.clusters.tolist():
        shared = torch.arange(start, start + prefix)
        if prefix:
            queries.append(prefix)
            keys.append(shared)
        for begin, length in sequences[first:end]:
            is_shared |= prefix > 0
            queries.append(length)
            keys.append(torch.cat([shared, torch.arange(begin, begin + length)]))
    counts = [key.numel() for key in keys]
    return Segments(
        query_starts=_sum_starts(queries, device),
        key_starts=_sum_starts(counts, device),
        most_queries=max(queries),
        most_keys=max(counts),
        keys=torch.cat(keys).to(device) if is_shared else None,
    )


def attend(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, kernel: Kernel
) -> Tensor:
    """Attention [S, A, D] of queries [S, A, D] to keys and values [S, G, D] within segments.

    Keys are gathered once per sequence, prefix included. They are not kept for the backward pass
    but gathered again, and their gradients add up in float32.
    """
    if segments.keys is None:
        return kernel(q, k, v, segments, scale)
    arguments = (q, k, v, segments, scale, kernel)
    if not torch.is_grad_enabled():
        return _attend_gathered(*arguments)
    mixed = checkpoint(_attend_gathered, *arguments, use_reentrant=False, preserve_rng_state=False)
    assert isinstance(mixed, Tensor)
    return mixed


def find_torch_kernel() -> Kernel | None:
    """torch's variable-length attention, for bfloat16 on a GPU; None where torch has none."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    # Earlier versions have other arguments.
    known = inspect.signature(varlen_attn).parameters
    if not known.keys() >= {"scale", "window_size", "enable_gqa"}:
        return None

    def run(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> Tensor:
        starts = (segments.query_starts, segments.key_starts)
        most = (segments.most_queries, segments.most_keys)
        options = {"window_size": (-1, 0), "enable_gqa": q.shape[1] != k.shape[1]}
        mixed = varlen_attn(q, k, v, *starts, *most, scale=scale, **options)
        assert isinstance(mixed, Tensor)
        return mixed

    return run


def attend_in_turn(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> Tensor:
    """torch's attention of one segment after the other, for CPUs, where a call costs little."""
    queries, keys = segments.query_starts.tolist(), segments.key_starts.tolist()
    mixed: list[Tensor] = []
    for own, seen in zip(pairwise(queries), pairwise(keys), strict=True):
        count, total = own[1] - own[0], seen[1] - seen[0]
        is_alone = count == total
        parts = (q[slice(*own)], k[slice(*seen)], v[slice(*seen)])
        output = torch.nn.functional.scaled_dot_product_attention(
            *(states.transpose(0, 1)[None] for states in parts),
            attn_mask=None if is_alone else q.new_ones(count, total).bool().tril(total - count),
            is_causal=is_alone,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        mixed.append(output[0].transpose(0, 1))
    return torch.cat(mixed)


@torch.enable_grad()
def check_kernel(
    kernel: Kernel, *, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Compare a kernel with attention under a dense mask once, gradients included.

    Raises:
        EngineError: it differs. The kernel's own errors are passed on.
    """
    # A prefix of 5 tokens with 3 and 7 behind it, and 6 tokens alone.
    tree = Tree(torch.tensor([[0, 5, 0, 2], [15, 6, 2, 2]]), torch.tensor([[5, 3], [8, 7]]), 12)
    segments = find_segments(tree, device)
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(21, count, dim, generator=generator) for count in (heads, *[kv_heads] * 2)]
    weights = torch.randn(21, heads, dim, generator=generator).to(device, dtype)
    scale = dim**-0.5
    q, k, v = (tensor.to(device, dtype).requires_grad_() for tensor in made)
    output = attend(q, k, v, segments, scale, kernel)
    expected = _attend_dense(q.float(), k.float(), v.float(), make_mask(tree).to(device), scale)
    for name, actual, wanted in (
        ("output", output.detach(), expected.detach()),
        *zip(
            ("gradient of q", "gradient of k", "gradient of v"),
            torch.autograd.grad((output * weights).sum(), (q, k, v)),
            torch.autograd.grad((expected * weights.float()).sum(), (q, k, v)),
            strict=True,
        ),
    ):
        tolerance = (1e-4 if dtype == torch.float32 else 0.05) * float(wanted.abs().max())
        difference = float((actual.float() - wanted.float()).abs().max())
        if not difference <= tolerance:
            raise EngineError(
                f"variable-length attention must equal attention under a mask, got a difference "
                f"of {difference:.2g} in its {name}"
            )


def make_mask(tree: Tree) -> Tensor:
    """Which token sees which as a dense mask, bool [S, S]; for comparisons."""
    ends = [int((spans[0] + spans[1]).max()) for spans in (tree.clusters.T, tree.sequences.T)]
    seen = torch.zeros(max(ends), max(ends), dtype=torch.bool)
    sequences = tree.sequences.tolist()
    for start, prefix, first, end in tree.clusters.tolist():
        for begin, length in [(start, prefix), *sequences[first:end]]:
            own, span = torch.arange(length), slice(begin, begin + length)
            seen[span, start : start + prefix] = True
            seen[span, span] = own[:, None] >= own
    return seen


def _attend_dense(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    q, k, v = (states.transpose(0, 1)[None] for states in (q, k, v))
    mixed = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=seen, scale=scale, enable_gqa=True
    )
    return mixed[0].transpose(0, 1)


def _attend_gathered(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, kernel: Kernel
) -> Tensor:
    keys: Any = _Gather.apply(k, segments.keys)
    values: Any = _Gather.apply(v, segments.keys)
    return kernel(q, keys, values, segments, scale)


class _Gather(Function):
    """Keys or values [S, G, D] at an index [E]; a token's gradients add up in float32."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shape = states.shape
        return states.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        (index,) = ctx.saved_tensors
        total = grad.new_zeros(ctx.shape, dtype=torch.float32)
        return total.index_add_(0, index, grad.float()).to(grad.dtype), None


def _sum_starts(counts: list[int], device: torch.device) -> Tensor:
    """0, and the sums up to each count."""
    sums = torch.tensor([0, *counts]).cumsum(0)
    return sums.to(device, torch.int32)
