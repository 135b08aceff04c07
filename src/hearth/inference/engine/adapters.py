"""LoRA adapters beside the base weights: each token of a forward may have one of its own.

Nothing is merged. A linear layer, or a product of a mixture's experts, computes the base's output
for all tokens at once; then each adapter's update is added to the tokens that have it. What a
token gets does not depend on the others: products of few rows, which round otherwise, are padded to
``MIN_ROWS``. Those of experts are not, in a base neither.

Legend: R tokens, I and O inputs and outputs of a layer, K rank of an adapter, E experts.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from hearth.errors import RequestError
from hearth.inference.engine.cache import MIN_ROWS
from hearth.models.experts import (
    EXPERT_WEIGHTS,
    Pairs,
    add_update,
    compute_experts,
    expert_sizes,
    find_experts,
    is_adaptable,
)
from hearth.models.loading import LoadedModel, LoraOptions, describe_non_finite
from hearth.models.lora import linear_parts, target_experts, target_modules
from hearth.sync.store import Snapshot

HIGHEST_RANK = 512
"""Of an adapter; above it an update costs as much as the layer."""
_PREFIX = "base_model.model."
_serials = itertools.count(1)


@dataclass(frozen=True)
class LayerUpdate:
    """One layer's update ``scale * x @ down.T @ up``, float32: ``down`` [K, I], ``up`` [K, O]."""

    down: Tensor
    up: Tensor
    scale: float

    def __call__(self, x: Tensor) -> Tensor:
        """The update [R, O] for inputs [R, I], in float32."""
        linear = nn.functional.linear
        return linear(linear(x.float(), self.down), self.up.t()) * self.scale


@dataclass(frozen=True)
class ExpertsUpdate:
    """The update of a weight of a layer's experts: ``down`` [E, K, I], ``up`` [E, O, K]."""

    down: Tensor
    up: Tensor
    scale: float


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter in memory, ready to compute."""

    identity: str
    layers: Mapping[str, LayerUpdate]
    """By the layers' full names."""
    experts: Mapping[str, ExpertsUpdate]
    """By the weights' full names."""
    serial: int = field(default_factory=lambda: next(_serials))
    """Never used again, even if the same snapshot is loaded again."""


@dataclass(frozen=True)
class AdapterRows:
    """The tokens of a forward that have one adapter; None: all of them."""

    adapter: Adapter
    rows: Tensor | None = None
    count: int = 0
    """The first so many of ``rows`` count; the others are padding."""


class AdapterLayers:
    """The linear layers of a model, each able to add updates. Used by one thread at a time."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self.active: Sequence[AdapterRows] = ()
        """Those of the forward that is computed now."""
        linears, experts = linear_parts(loaded.module), find_experts(loaded.module)
        for name in linears:
            self._replace(name, AdaptableLinear(loaded.module.get_submodule(name), name, self))
        for name, layer in experts.items():
            if is_adaptable(layer):
                self._replace(name, AdaptableExperts(layer, name, self))

    @contextlib.contextmanager
    def computing(self, active: Sequence[AdapterRows]) -> Generator[None, None, None]:
        """Inside the ``with`` the model computes with these adapters."""
        self.active = active
        try:
            yield
        finally:
            self.active = ()

    def group(self, adapters: Sequence[Adapter | None]) -> list[AdapterRows]:
        """The rows of a step by adapter; ``adapters`` are those of its first rows."""
        rows_of: dict[Adapter, list[int]] = {}
        for row, adapter in enumerate(adapters):
            if adapter is not None:
                rows_of.setdefault(adapter, []).append(row)
        groups: list[AdapterRows] = []
        for adapter, rows in rows_of.items():
            padded = rows + rows[:1] * (MIN_ROWS - len(rows))
            index = torch.tensor(padded, device=self._loaded.device)
            groups.append(AdapterRows(adapter, index, len(rows)))
        return groups

    def read(self, snapshot: Snapshot) -> Adapter:
        """The adapter of a snapshot. May be called from any thread.

        Raises:
            RequestError: it is no LoRA adapter of this model, its rank is above 512, or a weight is
                not finite.
        """
        loaded, identity = self._loaded, snapshot.identity
        if snapshot.kind != "lora":
            raise RequestError(
                f"adapter must name the snapshot of a LoRA adapter, got {identity!r}, a "
                f"{snapshot.kind}: weights of the whole model are served by a weight sync"
            )
        if snapshot.base_model not in (loaded.name, loaded.source):
            raise RequestError(
                f"adapter must be one of {loaded.name!r}, which is served, got {identity!r} of "
                f"{snapshot.base_model!r}"
            )
        options = replace(LoraOptions.from_metadata(snapshot.metadata), seed=0)
        if options.rank > HIGHEST_RANK:
            raise RequestError(
                f"adapter must have a rank in 1..{HIGHEST_RANK}, got {options.rank} in "
                f"{identity!r}: merge it into a model of its own"
            )
        if (found := describe_non_finite(snapshot.tensors)) is not None:
            raise RequestError(
                f"adapter must have finite weights, got {found} in {identity!r}: save a snapshot "
                "of good weights, such as an older checkpoint's"
            )
        names = target_modules(loaded.module, options)
        experts = self._find_expert_weights(options)
        tensors = self._check_tensors(snapshot, names, experts, options.rank)
        scale = options.alpha / options.rank
        return Adapter(
            identity,
            {
                name: LayerUpdate(
                    _place(tensors[f"{name}.lora_A.weight"], loaded.device),
                    _place(tensors[f"{name}.lora_B.weight"].t(), loaded.device),
                    scale,
                )
                for name in names
            },
            {
                name: ExpertsUpdate(
                    _place(tensors[f"{name}.lora_A"], loaded.device),
                    _place(tensors[f"{name}.lora_B"], loaded.device),
                    scale,
                )
                for name in experts
            },
        )

    def _replace(self, name: str, layer: nn.Module) -> None:
        owner, _, attribute = name.rpartition(".")
        setattr(self._loaded.module.get_submodule(owner), attribute, layer)

    def _find_expert_weights(self, options: LoraOptions) -> dict[str, tuple[int, int, int]]:
        """Number of experts, inputs and outputs of each weight of experts that is adapted."""
        return {
            f"{name}.{weight}": expert_sizes(layer.base_layer, weight)
            for name, layer in target_experts(self._loaded.module, options).items()
            if isinstance(layer, AdaptableExperts)
            for weight in EXPERT_WEIGHTS
        }

    def _check_tensors(
        self,
        snapshot: Snapshot,
        names: Sequence[str],
        experts: Mapping[str, tuple[int, int, int]],
        rank: int,
    ) -> dict[str, Tensor]:
        """The snapshot's tensors without PEFT's prefix, if they are those of these layers."""
        found = {name.removeprefix(_PREFIX): tensor for name, tensor in snapshot.tensors.items()}
        expected: dict[str, tuple[int, ...]] = {}
        for name in names:
            layer: Any = self._loaded.module.get_submodule(name)
            outputs, inputs = layer.shape
            expected[f"{name}.lora_A.weight"] = (rank, inputs)
            expected[f"{name}.lora_B.weight"] = (outputs, rank)
        for name, (count, inputs, outputs) in experts.items():
            expected[f"{name}.lora_A"] = (count, rank, inputs)
            expected[f"{name}.lora_B"] = (count, outputs, rank)
        shapes = {name: tuple(tensor.shape) for name, tensor in found.items()}
        wrong = sorted(shapes.items() ^ expected.items())
        if wrong:
            name = wrong[0][0]
            raise RequestError(
                f"adapter must fit {self._loaded.name!r}: expected {name!r} of shape "
                f"{expected.get(name)}, found {shapes.get(name)} in {snapshot.identity!r}"
            )
        return found


class AdaptableLinear(nn.Module):
    """A linear layer that adds the updates that ``AdapterLayers`` names."""

    active_adapters = ()
    """None is merged into the weight."""

    def __init__(self, base_layer: nn.Module, name: str, layers: AdapterLayers) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.name = name
        self._layers = layers

    @property
    def weight(self) -> Tensor:
        """The base layer's, as modules read it that tie it."""
        return self.base_layer.get_parameter("weight")

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        outputs, inputs = self.weight.shape
        # GPT-2's Conv1D is transposed.
        return (outputs, inputs) if isinstance(self.base_layer, nn.Linear) else (inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """The outputs [..., O] for inputs [..., I]."""
        y = self.base_layer(x)
        for group in self._layers.active:
            update = group.adapter.layers.get(self.name)
            if update is None:
                continue
            if group.rows is None:
                y = (y + update(x)).to(y.dtype)
                continue
            rows = group.rows[: group.count]
            own = update(x.flatten(0, -2)[group.rows])[: group.count]
            flat = y.flatten(0, -2)
            y = flat.index_copy(0, rows, (flat[rows] + own).to(y.dtype)).view_as(y)
        return y


class AdaptableExperts(nn.Module):
    """A module of experts that adds the updates that ``AdapterLayers`` names."""

    def __init__(self, base_layer: nn.Module, name: str, layers: AdapterLayers) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.name = name
        self._layers = layers

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The outputs of the tokens' experts, as of the module inside."""
        return compute_experts(
            self.base_layer, hidden_states, top_k_index, top_k_weights, self._add
        )

    def _add(self, weight: str, x: Tensor, y: Tensor, pairs: Pairs) -> Tensor:
        for group in self._layers.active:
            update = group.adapter.experts.get(f"{self.name}.{weight}")
            if update is None:
                continue
            matrices = (update.down, update.up, update.scale)
            if group.rows is None:
                y = add_update(x, y, pairs, *matrices)
                continue
            places = torch.isin(pairs.tokens, group.rows).nonzero().squeeze(1)
            own = add_update(x[places], y[places], pairs.select(places), *matrices)
            y = y.index_copy(0, places, own)
        return y


def _place(tensor: Tensor, device: torch.device) -> Tensor:
    """A float32 copy on the device, aligned and contiguous."""
    return tensor.detach().to(device=device, dtype=torch.float32).contiguous().clone()
