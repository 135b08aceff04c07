"""Records and replays which experts a mixture-of-experts model sends its tokens to.

The model's own module does the routing. Hooks inside a ``with`` read its choice or replace it; the
weights of the chosen experts then come from the router's own logits, so that the router is trained
as without replay (R3, arXiv:2510.11370).

Legend: N layers with experts, E experts of each, K experts per token, T tokens of a forward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hearth.models.loading import LoadedModel
from hearth.wire.routing import RoutingShape

_PROBED_TOKENS = 16
# Names of the number of experts in the families' configs.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")

_Decision = tuple[Tensor, Tensor, Tensor]
"""A router's output: logits [T, E], weights of the chosen experts [T, K], their ids [T, K]."""
_Weighting = Callable[[Tensor, Tensor], Tensor]
"""Logits [T, E] and chosen experts [T, K] to their weights [T, K]."""


@dataclass
class Recording:
    """The choices of all routers in the last forward of a ``with``; None without a shape."""

    shape: RoutingShape | None = None
    _layers: dict[int, Tensor] = field(default_factory=lambda: {})

    def note(self, layer: int, chosen: Tensor) -> None:
        """Store the choice [T, K] of a layer."""
        self._layers[layer] = chosen

    def choices(self) -> NDArray[np.unsignedinteger] | None:
        """Expert ids [T, N, K] of the tokens in their flattened order."""
        if self.shape is None:
            return None
        stacked = torch.stack([self._layers[layer] for layer in range(self.shape.layers)], dim=1)
        return stacked.cpu().numpy().astype(self.shape.dtype)


@dataclass(frozen=True, eq=False)
class Routers:
    """A model's routers in the order of its layers."""

    shape: RoutingShape
    _modules: Sequence[nn.Module]
    _weightings: Sequence[_Weighting]

    @contextlib.contextmanager
    def recording(self) -> Iterator[Recording]:
        """Record what the routers choose inside the ``with``."""
        record = Recording(self.shape)

        def note(layer: int, _module: nn.Module, _args: Any, output: _Decision) -> None:
            record.note(layer, output[2])

        hooks = [partial(note, layer) for layer in range(self.shape.layers)]
        with _add_hooks(self._modules, hooks):
            yield record

    @contextlib.contextmanager
    def replaying(self, choices: Tensor) -> Iterator[None]:
        """Have the routers choose ``choices`` [T, N, K] for the flattened tokens of each forward.

        A token whose experts are ``FREE`` keeps its router's choice. A backward pass that
        computes a layer again (gradient checkpointing) must run inside the ``with`` too.
        """

        def replace(layer: int, _module: nn.Module, _args: Any, output: _Decision) -> _Decision:
            logits, weights, own = output
            given = choices[:, layer].to(own.device)
            chosen = torch.where(given >= 0, given, own)
            return logits, self._weightings[layer](logits, chosen).to(weights.dtype), chosen

        hooks = [partial(replace, layer) for layer in range(self.shape.layers)]
        with _add_hooks(self._modules, hooks):
            yield


@torch.no_grad()
def find_routers(loaded: LoadedModel) -> Routers | None:
    """The model's routers; None for a dense model.

    A short forward pass finds them by the form of their output. Also None for a model with experts
    whose router returns something else, or weights its experts by none of the rules here.
    """
    config = loaded.config.get_text_config()
    if not any(getattr(config, name, None) for name in _EXPERTS):
        return None
    decisions: dict[nn.Module, _Decision] = {}

    def note(module: nn.Module, _args: Any, output: object) -> None:
        if _is_decision(output):
            decisions[module] = cast("_Decision", output)

    modules = list(loaded.module.modules())
    ids = torch.arange(_PROBED_TOKENS, device=loaded.device)[None] % loaded.vocab_size
    with _add_hooks(modules, [note] * len(modules)):
        loaded.module(input_ids=ids, use_cache=False)
    weightings = [_weighting_of(module, decision) for module, decision in decisions.items()]
    known = [weighting for weighting in weightings if weighting is not None]
    shapes = {(logits.shape[1], own.shape[1]) for logits, _, own in decisions.values()}
    if len(known) < len(weightings) or len(shapes) != 1:
        return None
    ((experts, top_k),) = shapes
    return Routers(RoutingShape(len(known), experts, top_k), list(decisions), known)


@contextlib.contextmanager
def _add_hooks(modules: Sequence[nn.Module], hooks: Sequence[Callable[..., Any]]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for module, hook in zip(modules, hooks, strict=True):
            stack.callback(module.register_forward_hook(hook).remove)
        yield


def _is_decision(output: object) -> bool:
    parts = cast("tuple[Any, ...]", output) if isinstance(output, tuple) else ()
    if len(parts) != 3 or not all(isinstance(part, Tensor) and part.ndim == 2 for part in parts):
        return False
    logits, weights, own = cast("_Decision", parts)
    is_index = own.dtype == torch.int64 and weights.is_floating_point()
    return is_index and weights.shape == own.shape and logits.shape[1] > own.shape[1]


def _weighting_of(module: nn.Module, decision: _Decision) -> _Weighting | None:
    """The rule that reproduces the router's weights; None if none does."""
    logits, weights, own = decision
    # DeepSeek and its relatives.
    scale = float(getattr(module, "routed_scaling_factor", 1.0))
    rules: list[_Weighting] = [
        _share,
        _share_of_chosen,
        _softmax_of_chosen,
        partial(_gates, scale=scale),
        partial(_gates_of_chosen, scale=scale),
    ]
    errors = [float((rule(logits, own).to(weights.dtype) - weights).abs().max()) for rule in rules]
    tolerance = 1e-5 if weights.dtype == torch.float32 else 1e-2
    best = min(range(len(rules)), key=errors.__getitem__)
    return rules[best] if errors[best] <= tolerance else None


def _share(logits: Tensor, chosen: Tensor) -> Tensor:
    return torch.softmax(logits, dim=-1, dtype=torch.float32).gather(1, chosen)


def _share_of_chosen(logits: Tensor, chosen: Tensor) -> Tensor:
    shares = _share(logits, chosen)
    return shares / shares.sum(dim=-1, keepdim=True)


def _softmax_of_chosen(logits: Tensor, chosen: Tensor) -> Tensor:
    return torch.softmax(logits.gather(1, chosen), dim=-1)


def _gates(logits: Tensor, chosen: Tensor, *, scale: float) -> Tensor:
    return logits.sigmoid().gather(1, chosen) * scale


def _gates_of_chosen(logits: Tensor, chosen: Tensor, *, scale: float) -> Tensor:
    gates = logits.sigmoid().gather(1, chosen)
    return gates / (gates.sum(dim=-1, keepdim=True) + 1e-20) * scale
