"""The experts of a mixture, and low-rank updates of them that no dense weight is made for.

A layer's experts are two tensors, ``EXPERT_WEIGHTS``. Tokens are sorted by the expert that they
are sent to; then each product runs once over all experts, and so do the two thin ones of an update.

Legend: T tokens, K experts of a token, P = T * K pairs of a token and an expert of it, sorted by
the expert; E experts, I inputs and O outputs of an expert's product, R rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hearth.errors import ConfigError

EXPERT_WEIGHTS = ("gate_up_proj", "down_proj")
"""Parameters that hold all experts of a layer."""

_ALIGNMENT = 16
"""Bytes; a grouped product wants strides that are a multiple of it."""


@dataclass(frozen=True, eq=False)
class Pairs:
    """Tokens beside the experts that they are sent to, sorted by expert."""

    tokens: Tensor
    """The token of each pair, int64 [P]."""
    experts: Tensor
    """Its expert, int64 [P], rising."""
    ends: Tensor
    """Where the pairs of each expert end, int32 [E]."""

    def select(self, places: Tensor) -> Pairs:
        """The pairs at these places, int64 and rising."""
        experts = self.experts[places]
        return Pairs(self.tokens[places], experts, _find_ends(experts, len(self.ends)))


Updates = Callable[[str, Tensor, Tensor, Pairs], Tensor]
"""A weight's name, its inputs [P, I], outputs [P, O] and pairs, to the outputs with updates."""


def find_experts(module: nn.Module) -> dict[str, nn.Module]:
    """The modules that hold a layer's experts, by full name; an adapter does not change it."""
    return {
        name: part
        for name, part in module.named_modules()
        if not name.endswith(".base_layer") and _holds_experts(getattr(part, "base_layer", part))
    }


def is_adaptable(experts: nn.Module) -> bool:
    """Whether ``compute_experts`` computes what the module does."""
    # What transformers' ``use_experts_implementation`` says of a module.
    return bool(getattr(experts, "has_gate", False))


def require_adaptable(experts: nn.Module, name: str) -> None:
    """Refuse experts that are not adaptable.

    Raises:
        ConfigError: they are not.
    """
    if not is_adaptable(experts):
        raise ConfigError(
            f"lora must leave out mlp for this model, got train_mlp=True: {name!r} "
            f"({type(experts).__name__}) computes its experts in a way of its own; train attn or "
            "unembed"
        )


def expert_sizes(experts: Any, weight: str) -> tuple[int, int, int]:
    """Number of experts, inputs and outputs of one of ``EXPERT_WEIGHTS``."""
    count, rows, columns = getattr(experts, weight).shape
    is_transposed = getattr(experts, "is_transposed", False)
    return (count, rows, columns) if is_transposed else (count, columns, rows)


def compute_experts(
    experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor, update: Updates
) -> Tensor:
    """What a module of experts returns for tokens [T, H], with updates of its products.

    ``chosen`` and ``weights`` [T, K] are the experts of each token and the weights of their
    outputs. Without an update the operations are those of transformers' ``grouped_mm``.
    """
    places, pairs = _sort_pairs(chosen, getattr(experts, EXPERT_WEIGHTS[0]).shape[0])

    def project(weight: str, x: Tensor) -> Tensor:
        matrices = getattr(experts, weight)
        y = multiply(x, matrices if experts.is_transposed else matrices.mT, pairs.ends)
        if experts.has_bias:
            y = y + getattr(experts, f"{weight}_bias")[pairs.experts]
        return update(weight, x, y, pairs)

    inner = experts._apply_gate(project("gate_up_proj", hidden[pairs.tokens]))
    outputs = project("down_proj", inner)
    if getattr(experts, "has_post_expert_norm", False):
        outputs = experts.post_expert_norm(outputs)
    weighted = outputs * weights.flatten()[places, None]
    own = torch.empty_like(places)
    own[places] = torch.arange(len(places), device=places.device)
    return weighted[own].view(*chosen.shape, -1).sum(1).to(hidden.dtype)


def multiply(x: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """The products [P, O] of inputs [P, I] with the matrices [E, I, O] of their experts."""
    if _runs_grouped(x, *matrices.shape[1:]):
        return functional.grouped_mm(x, matrices, offs=ends)
    return torch.cat(
        [rows @ matrix for rows, matrix in zip(_split(x, ends), matrices, strict=True)]
    )


def add_update(
    x: Tensor, y: Tensor, pairs: Pairs, down: Tensor, up: Tensor, scale: float
) -> Tensor:
    """Outputs [P, O] and ``scale * x @ down.T @ up.T`` of each expert.

    ``down`` [E, R, I] and ``up`` [E, O, R] are float32; they are multiplied in the dtype of ``x``.
    """
    change: Tensor = _LowRank.apply(x, down, up, scale, pairs.ends)  # pyright: ignore[reportAssignmentType]
    return y + change


class _LowRank(torch.autograd.Function):
    """``scale * x @ down.T @ up.T``, which keeps ``x`` alone: the rest is cheap to make again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, down: Tensor, up: Tensor, scale: float, ends: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, down, up, ends)
        ctx.scale = scale
        thin, wide = _convert(down, up, x)
        return multiply(multiply(x, thin.mT, ends) * scale, wide.mT, ends)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, down, up, ends = ctx.saved_tensors
        (gradient,) = gradients
        gradient = gradient.contiguous()
        thin, wide = _convert(down, up, x)
        inner = multiply(x, thin.mT, ends) * ctx.scale
        inner_gradient = multiply(gradient, wide, ends) * ctx.scale
        rank = down.shape[1]
        return (
            multiply(inner_gradient, thin, ends) if ctx.needs_input_grad[0] else None,
            _sum_products(inner_gradient, x, ends)[:, :rank].to(down.dtype),
            _sum_products(gradient, inner, ends)[:, :, :rank].to(up.dtype),
            None,
            None,
        )


def _convert(down: Tensor, up: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """An update's matrices in the dtype of ``x``, with zeros up to a rank that is aligned."""
    if missing := -down.shape[1] % (_ALIGNMENT // x.element_size()):
        down = functional.pad(down, (0, 0, 0, missing))
        up = functional.pad(up, (0, missing))
    return down.to(x.dtype), up.to(x.dtype)


def _sum_products(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Of each expert ``left.T @ right`` [E, M, N] over its rows of [P, M] and [P, N]."""
    if _runs_grouped(left, left.shape[1], right.shape[1]):
        return functional.grouped_mm(left.mT, right, offs=ends)
    return torch.stack(
        [
            rows.mT @ others
            for rows, others in zip(_split(left, ends), _split(right, ends), strict=True)
        ]
    )


def _runs_grouped(x: Tensor, *widths: int) -> bool:
    """Whether torch multiplies all experts at once: matrices of these widths, for ``x``."""
    is_aligned = not any(width * x.element_size() % _ALIGNMENT for width in widths)
    has_kernel = not x.is_cuda or torch.cuda.get_device_capability(x.device) >= (8, 0)
    return is_aligned and has_kernel and x.dtype in (torch.float32, torch.bfloat16)


def _split(x: Tensor, ends: Tensor) -> list[Tensor]:
    """The rows of each expert."""
    bounds = [0, *ends.tolist()]
    return [x[start:end] for start, end in pairwise(bounds)]


class ExpertUpdate(nn.Module):
    """The update of one of ``EXPERT_WEIGHTS``: two thin matrices of each expert, float32."""

    def __init__(self, sizes: tuple[int, int, int], rank: int, device: torch.device) -> None:
        super().__init__()
        count, inputs, outputs = sizes
        make: Any = {"device": device, "dtype": torch.float32}
        self.lora_A = nn.Parameter(torch.empty(count, rank, inputs, **make))
        self.lora_B = nn.Parameter(torch.empty(count, outputs, rank, **make))


class AdaptedExperts(nn.Module):
    """A module of experts and an adapter of them."""

    def __init__(
        self, base_layer: nn.Module, *, rank: int, scale: float, device: torch.device
    ) -> None:
        super().__init__()
        self.base_layer = base_layer
        for weight in EXPERT_WEIGHTS:
            setattr(self, weight, ExpertUpdate(expert_sizes(base_layer, weight), rank, device))
        self.scale = scale
        self.is_enabled = True

    def enable_adapters(self, enabled: bool) -> None:
        """Compute with the adapter, or without it, as PEFT's layers do."""
        self.is_enabled = enabled

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The outputs of the tokens' experts, as of the module inside."""
        update = self._add if self.is_enabled else _add_nothing
        return compute_experts(self.base_layer, hidden_states, top_k_index, top_k_weights, update)

    @torch.no_grad()
    def merge(self, weight: str, matrices: Tensor) -> Tensor:
        """A copy of a base weight with the update added in float32, expert by expert."""
        target = torch.empty_like(matrices)
        own: ExpertUpdate = getattr(self, weight)
        base: Any = self.base_layer
        for merged, matrix, down, up in zip(target, matrices, own.lora_A, own.lora_B, strict=True):
            change = (self.scale * up @ down).to(matrix.device)
            merged.copy_(matrix.float() + (change.mT if base.is_transposed else change))
        return target

    def _add(self, weight: str, x: Tensor, y: Tensor, pairs: Pairs) -> Tensor:
        own: ExpertUpdate = getattr(self, weight)
        return add_update(x, y, pairs, own.lora_A, own.lora_B, self.scale)


def initialize_down(value: Tensor, generator: torch.Generator) -> None:
    """Kaiming uniform, as PEFT begins: of each expert as of a linear layer."""
    nn.init.kaiming_uniform_(value.view(-1, value.shape[-1]), a=math.sqrt(5), generator=generator)


def _add_nothing(_weight: str, _x: Tensor, y: Tensor, _pairs: Pairs) -> Tensor:
    return y


def _holds_experts(part: nn.Module) -> bool:
    own = dict(part.named_parameters(recurse=False))
    return all(name in own and own[name].ndim == 3 for name in EXPERT_WEIGHTS)


def _sort_pairs(chosen: Tensor, count: int) -> tuple[Tensor, Pairs]:
    """Where each pair is in ``chosen`` [T, K] flattened, int64 [P], and the pairs."""
    experts, places = chosen.flatten().sort(stable=True)
    tokens = places // chosen.shape[1]
    return places, Pairs(tokens, experts, _find_ends(experts, count))


def _find_ends(experts: Tensor, count: int) -> Tensor:
    numbers = torch.arange(count, device=experts.device)
    return torch.searchsorted(experts, numbers, right=True).to(torch.int32)
