"""The models of a rank, and the optimizer of its parts of them.

A full policy is sharded: each rank has gradient, moments and float32 weights of its part. An
adapter is small: every rank has a whole copy, and the gradients are summed once per step.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hearth.models.loading import LoadedModel
from hearth.models.parallel import ShardedModel, local_parts, shard
from hearth.trainer.logprobs import TargetScorer
from hearth.trainer.optim import Optimizer
from hearth.trainer.options import TrainerOptions
from hearth.trainer.ranks.group import RankGroup
from hearth.trainer.ranks.passes import RankScorer
from hearth.trainer.residents import Residents, find_trainable


class RankResidents(Residents):
    """The models of one rank; all ranks add and remove the same ones in the same order.

    ``process`` makes model ids differ from those before a restart; it is the same on all ranks.
    """

    def __init__(
        self,
        load: Callable[[], LoadedModel],
        options: TrainerOptions,
        group: RankGroup,
        *,
        process: str,
        offload: bool,
    ) -> None:
        super().__init__(load, options)
        self._process = process
        self._group = group
        self._offload = offload

    def remove(self, model_id: str) -> None:
        """Free a model."""
        super().remove(model_id)
        # Sharded modules refer to themselves.
        gc.collect()

    def _make_scorer(self, loaded: LoadedModel) -> TargetScorer:
        assert isinstance(loaded, ShardedModel), "all weights of ranks are sharded"
        return RankScorer(loaded, self._options)

    def _make_optimizer(self, loaded: LoadedModel) -> Optimizer:
        assert isinstance(loaded, ShardedModel), "all weights of ranks are sharded"
        return RankOptimizer(find_trainable(loaded), self._group, loaded.stored)

    def _load_shared(self) -> LoadedModel:
        base = super()._load_shared()
        if not isinstance(base, ShardedModel):
            self._base = base = self._shard(base, is_trained=False)
        return base

    def _load_own(self) -> LoadedModel:
        if isinstance(self._base, ShardedModel) and not self._models:
            # Unused now, and sharded as frozen weights.
            self._base = None
        return self._shard(super()._load_own(), is_trained=True)

    def _shard(self, loaded: LoadedModel, *, is_trained: bool) -> ShardedModel:
        return shard(
            loaded,
            self._group.mesh,
            self._group.device,
            is_trained=is_trained,
            offload=self._offload,
        )


class RankOptimizer(Optimizer):
    """AdamW on this rank's parts of sharded parameters, or on its copies of whole ones.

    ``stored`` are the dtypes of the weights in snapshots. Parts are float32: where the stored dtype
    is another one, they are the master weights.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        group: RankGroup,
        stored: Mapping[str, torch.dtype],
    ) -> None:
        self._group = group
        self._rounded = [
            name for name in parameters if stored.get(name, torch.float32) != torch.float32
        ]
        super().__init__(parameters)

    def state_tensors(self) -> dict[str, Tensor]:
        """As in a trainer that is one process."""
        masters = {f"master/{name}": self._masters[name].detach() for name in self._rounded}
        return super().state_tensors() | masters

    def _collect_gradients(self) -> list[Tensor]:
        gradients = super()._collect_gradients()
        copied = [gradient for gradient in gradients if not isinstance(gradient, DTensor)]
        if copied:
            total = self._group.reduce_sum(torch.cat([gradient.flatten() for gradient in copied]))
            parts = total.split([gradient.numel() for gradient in copied])
            for gradient, part in zip(copied, parts, strict=True):
                gradient.copy_(part.view_as(gradient))
        return local_parts(gradients)

    def _compute_norm(self, gradients: Sequence[Tensor]) -> float:
        own = super()._compute_norm(gradients)
        if not any(isinstance(parameter, DTensor) for parameter in self._parameters.values()):
            return own
        return math.sqrt(float(self._group.reduce_sum(torch.tensor(own**2, dtype=torch.float64))))
