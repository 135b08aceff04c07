"""A model whose weights several ranks share: FSDP2 (``fully_shard``), arXiv:2304.11277.

Every rank keeps a part of each weight, and has a layer's whole weights only while that layer runs.
Gradients come back to the parts as sums over ranks, never as means: the optimizer divides.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
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

logger = logging.getLogger(__name__)

R = TypeVar("R")
Shard = Callable[[nn.Module], None]
"""What ``load_model`` calls to divide weights before they are read."""


# Of glibc's malloc.h, and the largest threshold that it takes.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_GLIBC_SETTINGS = {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"}
_KEPT_BYTES = 2**25
_RETURNED_BYTES = 2**16


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
        # Between copies of the weights once a request, whatever it is within a copy.
        self.root.set_requires_all_reduce(is_last)


@dataclass(frozen=True)
class Sharding:
    """How the weights of a model are divided over ranks.

    A model that is trained keeps its parts in float32 and computes in its own dtype, its gradients
    are added up in float32; a frozen one keeps its dtype. With ``offload`` parts, gradients and
    optimizer state stay in the host's memory. Weights go to ``device`` layer by layer.
    """

    choose_mesh: Callable[[int], DeviceMesh]
    """The ranks that share a model of so many parameters; of two dimensions, [copies, parts]."""
    device: torch.device
    """Where this rank computes."""
    dtype: torch.dtype
    """What the model is loaded in."""
    is_trained: bool
    offload: bool

    def load(self, load: Callable[[Shard | None], LoadedModel]) -> ShardedModel:
        """A model of which this rank reads its own parts only; all ranks load theirs at once.

        ``load`` gets the argument ``shard`` of ``load_model``. A model whose parts cannot be read
        by themselves is read whole by every rank, and the log says why.

        Raises:
            ConfigError: as ``load_model``.
        """
        roots: list[_Root] = []
        try:
            loaded = load(lambda module: roots.append(self._shard(module)))
            _check_conversions(loaded.module)
            _check_tied(loaded.module)
        except _WholeError as error:
            logger.warning("each rank reads the whole model: %s", error)
            roots.clear()
            gc.collect()
            loaded = load(None)
            roots.append(self._shard(loaded.module))
        return self._finish(loaded, roots[0])

    def _shard(self, module: nn.Module) -> _Root:
        """Divide the weights of a module, on the meta device or loaded."""
        from transformers.modeling_layers import GradientCheckpointingLayer

        is_mixed = self.is_trained and self.dtype != torch.float32
        precision = MixedPrecisionPolicy(
            param_dtype=self.dtype if is_mixed else None,
            reduce_dtype=torch.float32 if is_mixed else None,
        )
        pinned = self.device.type == "cuda"
        away = CPUOffloadPolicy(pin_memory=pinned) if self.offload else OffloadPolicy()
        for target, source in _find_tied(module).items():
            # transformers ties after loading; a weight of two layers must be divided as one.
            owner, _, name = target.rpartition(".")
            setattr(module.get_submodule(owner), name, module.get_parameter(source))
        mesh = self.choose_mesh(sum(weight.numel() for weight in module.parameters()))
        root = _Root(module)
        layers = [part for part in module.modules() if isinstance(part, GradientCheckpointingLayer)]
        for part in (*layers, root):
            # Also the root: otherwise its weights would stay whole, and stale, after a step.
            fully_shard(
                part,
                mesh=mesh,
                reshard_after_forward=True,
                mp_policy=precision,
                offload_policy=away,
            )
        for part in root.modules():
            if isinstance(part, FSDPModule):
                part.set_gradient_divide_factor(1.0)
                part.set_force_sum_reduction_for_comms(True)
        # An expert may get tokens on one rank and none on another.
        cast("FSDPModule", root).set_reduce_scatter_unused_params(True)
        _check_experts(module)
        return root

    def _finish(self, loaded: LoadedModel, root: _Root) -> ShardedModel:
        """Give the parts their dtype, and move them to where they stay."""
        module = loaded.module
        stored = {name: tensor.dtype for name, tensor in base_tensors(module).items()}
        place = torch.device("cpu") if self.offload else self.device
        finished: dict[int, nn.Parameter] = {}
        for owner in module.modules():
            for name, weight in owner.named_parameters(recurse=False):
                if id(weight) not in finished:
                    dtype = torch.float32 if self.is_trained else weight.dtype
                    # What was read may be the file's own pages, which others can change.
                    part = weight.detach().to(place, dtype, copy=True)
                    finished[id(weight)] = nn.Parameter(part, requires_grad=self.is_trained)
                setattr(owner, name, finished[id(weight)])
            for name, buffer in owner.named_buffers(recurse=False):
                setattr(owner, name, buffer.to(self.device, copy=True))
        given: dict[str, Any] = {
            field.name: getattr(loaded, field.name) for field in fields(LoadedModel)
        }
        given["device"] = self.device
        return ShardedModel(**given, root=root, stored=stored)


@contextlib.contextmanager
def return_freed_memory() -> Iterator[None]:
    """Inside the ``with`` freed tensors go back to the system at once.

    Otherwise glibc keeps them, for each thread by itself: a start was measured to hold four times
    its weights. Where arithmetic frees and allocates all the time, keeping them is faster. The
    setting is of the whole process; without glibc, or where the environment has settings of its
    own, this does nothing.
    """
    if _GLIBC_SETTINGS & os.environ.keys():
        yield
        return
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        yield
        return
    mallopt(_MMAP_THRESHOLD, _RETURNED_BYTES)
    try:
        yield
    finally:
        # glibc's own limits once a process has freed large tensors.
        mallopt(_MMAP_THRESHOLD, _KEPT_BYTES)
        mallopt(_TRIM_THRESHOLD, 2 * _KEPT_BYTES)


class _WholeError(Exception):
    """Parts of a model cannot be read by themselves."""


def _check_experts(module: nn.Module) -> None:
    """Refuse experts of which some rank has none: transformers cannot read parts of them."""
    for name, weight in module.named_parameters():
        if weight.ndim < 3 or not isinstance(weight, DTensor) or not weight.is_meta:
            continue
        ranks = _count_parts(weight)
        if -(-weight.shape[0] // ranks) * (ranks - 1) >= weight.shape[0]:
            raise _WholeError(f"{name} leaves a rank without any of its {weight.shape[0]} experts")


def _find_tied(module: Any) -> dict[str, str]:
    """Names of the parameters that are others', with the names of those."""
    return dict(getattr(module, "all_tied_weights_keys", None) or {})


def _check_tied(module: nn.Module) -> None:
    """Refuse tied weights for which the files have several values: they were divided as one."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for target, source in _find_tied(module).items():
        if parameters[target] is not parameters[source]:
            raise _WholeError(f"the files have values of {target}, which is tied to {source}")


def _check_conversions(module: Any) -> None:
    """Refuse weights that transformers computed from parts of a file where it needs all of it."""
    conversions = getattr(module, "_weight_conversions", None)
    if conversions is None:
        raise _WholeError("this version of transformers does not say how it read the weights")
    for conversion in conversions:
        for operation in getattr(conversion, "operations", ()):
            kind, dim = type(operation).__name__, getattr(operation, "dim", None)
            # Experts are stacked in front of the divided dimension, or joined behind it.
            if not ((kind == "MergeModulelist" and dim == 0) or (kind == "Concatenate" and dim)):
                raise _WholeError(f"its weights are converted by {operation}")


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


def count_copies(tensor: DTensor) -> int:
    """How many ranks have the same part of a tensor."""
    return tensor.device_mesh.size(0) if tensor.device_mesh.ndim == 2 else 1


def is_first_copy(tensor: DTensor) -> bool:
    """Whether this rank is the first of those that have the same part of a tensor."""
    place = tensor.device_mesh.get_coordinate()
    assert place is not None, "all ranks are in the mesh"
    return tensor.device_mesh.ndim == 1 or place[0] == 0


def _count_parts(tensor: DTensor) -> int:
    """In how many parts a tensor is divided."""
    return tensor.device_mesh.size() // count_copies(tensor)


def _count_part(tensor: Tensor) -> int:
    """The bytes of the largest part of a tensor on any rank."""
    numel = tensor.numel()
    if isinstance(tensor, DTensor) and numel:
        rows = tensor.shape[0]
        numel = numel // rows * -(-rows // _count_parts(tensor))
    return numel * tensor.element_size()


def local_parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    """What this rank has of each tensor, as plain tensors on the same memory."""
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
