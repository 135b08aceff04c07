"""A model whose weights several ranks share: FSDP2 (``fully_shard``), arXiv:2304.11277.

Every rank keeps a part of each weight, and has a layer's whole weights only while that layer runs.
Gradients come back to the parts as sums over ranks, never as means: the optimizer divides.
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
    """Runs a function while the weights outside of all layers are whole.

    It takes a function because heads run in chunks and after the backbone, and because the first
    inspection of a model runs parts of it.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, function: Callable[[], R]) -> R:
        return function()


@dataclass
class ShardedModel(LoadedModel):
    """A model of which this rank has a part; ``device`` is where it computes."""

    root: Any = None
    stored: Mapping[str, torch.dtype] = field(default_factory=lambda: {})
    """The dtype of each base tensor as loaded; trained ones are float32 in the parts."""
    sums_whole: bool = True
    """Whether ranks add up whole gradients, and reduce them in the last micro-batch of a request.
    Otherwise they reduce them in every micro-batch, and a rank keeps its part only."""

    @property
    def num_parameters(self) -> int:
        """Of the whole model."""
        return sum(parameter.numel() for parameter in self.root.parameters())

    @property
    def part_bytes(self) -> int:
        """Weights in the largest part that a rank has; the same number on all ranks."""
        return sum(_count_part(parameter) for parameter in self.root.parameters())

    def run(self, function: Callable[[], R]) -> R:
        """Call a function that runs the module; all ranks do so at the same time.

        Tensors that it returns may be differentiated. Weights may only be read inside of modules
        and inside of ``run``.
        """
        return cast("R", self.root(function))

    def reduce_gradients(self, *, is_last: bool) -> None:
        """Say before a backward pass whether it is the last one of a request."""
        self.root.set_requires_gradient_sync(is_last or not self.sums_whole)


def shard(
    loaded: LoadedModel, mesh: DeviceMesh, device: torch.device, *, is_trained: bool, offload: bool
) -> ShardedModel:
    """Shard a model that all ranks have loaded; ``loaded`` must not be used afterwards.

    A model that is trained keeps its parts in float32 and computes in its own dtype, its gradients
    are added up in float32; a frozen one keeps its dtype. With ``offload`` parts, gradients and
    optimizer state stay in the host's memory. Weights go to ``device`` layer by layer.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    module = loaded.module
    stored = {name: tensor.dtype for name, tensor in base_tensors(module).items()}
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
    for part in (*layers, root):
        # Also the root: otherwise its weights would stay whole, and stale, after an optimizer step.
        fully_shard(
            part, mesh=mesh, reshard_after_forward=True, mp_policy=precision, offload_policy=away
        )
    for part in root.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
    # An expert may get tokens on one rank and none on another.
    cast("FSDPModule", root).set_reduce_scatter_unused_params(True)
    given: dict[str, Any] = {
        field.name: getattr(loaded, field.name) for field in fields(LoadedModel)
    }
    given["device"] = device
    return ShardedModel(**given, root=root, stored=stored)


def gather_tensors(
    tensors: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype], *, keep: bool
) -> dict[str, Tensor]:
    """Whole tensors in CPU memory, on the ranks that ``keep`` them; all ranks call it.

    One tensor at a time is whole on a rank's device.
    """
    gathered: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        part = tensor.detach().to(dtypes.get(name, tensor.dtype))
        whole = part.full_tensor() if isinstance(part, DTensor) else part
        if keep:
            gathered[name] = whole.cpu()
    return gathered


def _count_part(tensor: Tensor) -> int:
    """The bytes of the largest part of a tensor on any rank."""
    numel = tensor.numel()
    if isinstance(tensor, DTensor) and numel:
        rows = tensor.shape[0]
        numel = numel // rows * -(-rows // tensor.device_mesh.size())
    return numel * tensor.element_size()


def local_parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    """What this rank has of each tensor, as plain tensors on the same memory."""
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
