"""A model whose weights several ranks share: FSDP2 (``fully_shard``), arXiv:2304.11277.

Every rank keeps a part of each weight, and has a layer's whole weights only while that layer runs.
Gradients come back to the parts as sums over ranks, never as means: who divides is the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from hearth.models.loading import LoadedModel, base_tensors

R = TypeVar("R")


class _Root(nn.Module):
    """Runs a function while the weights that belong to no layer are whole.

    A function, not one forward: heads are asked in chunks and after the backbone, and a first look
    at a model goes through parts of it.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, function: Callable[[], R]) -> R:
        return function()


@dataclass
class ShardedModel(LoadedModel):
    """A model of which this rank has a part. ``device`` is where it computes."""

    root: Any = None
    stored: Mapping[str, torch.dtype] = field(default_factory=lambda: {})
    """The dtype of each base tensor as the model came; trained ones are float32 in the parts."""

    def run(self, function: Callable[[], R]) -> R:
        """Call a function that runs the module; all ranks do so at the same time.

        Tensors that it returns may be differentiated. What it reads of weights is only right
        inside of modules, and inside of ``run``.
        """
        return cast("R", self.root(function))

    def reduce_gradients(self, *, is_last: bool) -> None:
        """Have the next backward pass add its gradient up here, or, the last, over all ranks."""
        self.root.set_requires_gradient_sync(is_last)


def shard(
    loaded: LoadedModel, mesh: DeviceMesh, device: torch.device, *, is_trained: bool, offload: bool
) -> ShardedModel:
    """Share a model that all ranks have loaded; ``loaded`` itself is used up.

    A model that is trained keeps its parts in float32 and computes in its own dtype, its gradients
    are added up in float32; a frozen one is as it came. With ``offload`` parts, gradients and what
    an optimizer makes of them stay in the host's memory. Weights go to ``device`` layer by layer.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    module = loaded.module
    stored = {name: one.dtype for name, one in base_tensors(module).items()}
    module.requires_grad_(is_trained)
    if is_trained:
        for parameter in module.parameters():
            parameter.data = parameter.data.float()
    is_mixed = is_trained and loaded.dtype != torch.float32
    precision = MixedPrecisionPolicy(
        param_dtype=loaded.dtype if is_mixed else None,
        reduce_dtype=torch.float32 if is_mixed else None,
    )
    away = CPUOffloadPolicy(pin_memory=device.type == "cuda") if offload else OffloadPolicy()
    root = _Root(module)
    layers = [
        module for module in module.modules() if isinstance(module, GradientCheckpointingLayer)
    ]
    for one in (*layers, root):
        # Also the root: its weights would else stay whole, and stale, after the optimizer's step.
        fully_shard(
            one, mesh=mesh, reshard_after_forward=True, mp_policy=precision, offload_policy=away
        )
    for one in root.modules():
        if isinstance(one, FSDPModule):
            one.set_gradient_divide_factor(1.0)
            one.set_force_sum_reduction_for_comms(True)
    # A rank's tokens may have gone past an expert that another's have met.
    cast("FSDPModule", root).set_reduce_scatter_unused_params(True)
    given: dict[str, Any] = {
        field.name: getattr(loaded, field.name) for field in fields(LoadedModel)
    }
    given["device"] = device
    return ShardedModel(**given, root=root, stored=stored)


def gathered(
    tensors: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype], *, keep: bool
) -> dict[str, Tensor]:
    """Whole tensors in CPU memory, on the ranks that ``keep`` them; all ranks call it.

    One tensor at a time is whole on a rank's device.
    """
    found: dict[str, Tensor] = {}
    for name, one in tensors.items():
        part = one.detach()
        part = part.to(dtypes.get(name, part.dtype))
        whole = part.full_tensor() if isinstance(part, DTensor) else part
        if keep:
            found[name] = whole.cpu()
    return found


def local_parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    """What this rank has of each tensor, as plain tensors on the same memory."""
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
