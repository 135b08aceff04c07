"""The models of a rank, and the optimizer of what it has of them.

A full policy is trained in parts: each rank has its part's gradient, moments and float32 weights.
An adapter is small; every rank has all of it, and its gradients are summed once per step.
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
from hearth.trainer.residents import Residents, trainable


class RankResidents(Residents):
    """The models of one rank; all ranks add and remove the same ones in the same order.

    ``process`` tells the trainer's models from those of an earlier one, on all ranks alike.
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

    def _scorer(self, loaded: LoadedModel) -> TargetScorer:
        assert isinstance(loaded, ShardedModel), "the weights' owners shard them"
        return RankScorer(loaded, self._options)

    def _optimizer(self, loaded: LoadedModel) -> Optimizer:
        assert isinstance(loaded, ShardedModel), "the weights' owners shard them"
        return RankOptimizer(trainable(loaded), self._group, loaded.stored)

    def _shared_weights(self) -> LoadedModel:
        base = super()._shared_weights()
        if not isinstance(base, ShardedModel):
            self._base = base = self._shard(base, is_trained=False)
        return base

    def _own_weights(self) -> LoadedModel:
        if isinstance(self._base, ShardedModel) and not self._models:
            # Nobody's any more, and in parts that were made to stay as they are.
            self._base = None
        return self._shard(super()._own_weights(), is_trained=True)

    def _shard(self, loaded: LoadedModel, *, is_trained: bool) -> ShardedModel:
        return shard(
            loaded,
            self._group.mesh,
            self._group.device,
            is_trained=is_trained,
            offload=self._offload,
        )


class RankOptimizer(Optimizer):
    """AdamW on this rank's parts of some parameters, or on all of parameters that ranks copy.

    ``stored`` are the dtypes that weights have outside; parts of others are their masters.
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
        """As of a trainer that is one process."""
        masters = {f"master/{name}": self._masters[name].detach() for name in self._rounded}
        return super().state_tensors() | masters

    def _gradients(self) -> list[Tensor]:
        gradients = super()._gradients()
        copied = [gradient for gradient in gradients if not isinstance(gradient, DTensor)]
        if copied:
            total = self._group.add(torch.cat([one.flatten() for one in copied]))
            parts = total.split([one.numel() for one in copied])
            for one, part in zip(copied, parts, strict=True):
                one.copy_(part.view_as(one))
        return local_parts(gradients)

    def _norm(self, gradients: Sequence[Tensor]) -> float:
        own = super()._norm(gradients)
        if not any(isinstance(parameter, DTensor) for parameter in self._parameters.values()):
            return own
        return math.sqrt(float(self._group.add(torch.tensor(own**2, dtype=torch.float64))))
