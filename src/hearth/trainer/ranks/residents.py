"""The models of a rank, and the optimizer of its parts of them.

A full policy is sharded: each rank has gradient, moments and float32 weights of its part. An
adapter is small: every rank has a whole copy, and the gradients are summed once per step.
"""

from __future__ import annotations

import gc
import logging
import math
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hearth.errors import ConfigError
from hearth.models.loading import LoadedModel, LoraOptions
from hearth.models.parallel import ShardedModel, count_copies, local_parts, return_freed_memory
from hearth.planning.gradients import TRAINED_BYTES, fits_whole_gradient
from hearth.trainer.logprobs import TargetScorer
from hearth.trainer.optim import Optimizer
from hearth.trainer.options import TrainerOptions
from hearth.trainer.ranks.group import RankGroup
from hearth.trainer.ranks.muon import ShardedMuon
from hearth.trainer.ranks.passes import RankScorer
from hearth.trainer.residents import Resident, Residents, find_trainable

logger = logging.getLogger(__name__)

_GIB = 2**30


class RankResidents(Residents):
    """The models of one rank; all ranks add and remove the same ones in the same order.

    ``load`` and ``load_trained`` load the base weights, frozen or to be trained. ``memory`` are the
    bytes that a rank may take, the same on all ranks.
    """

    def __init__(
        self,
        load: Callable[[], LoadedModel],
        load_trained: Callable[[], ShardedModel],
        options: TrainerOptions,
        group: RankGroup,
        *,
        memory: int,
        offload: bool,
    ) -> None:
        self._load_trained = load_trained
        self._memory = memory
        self._group = group
        self._offload = offload
        super().__init__(load, options)
        # Makes model ids differ from those before a restart; all ranks give the same ids.
        self._process = group.run_on_first(lambda: secrets.token_hex(4))

    def add_policy(self, lora: LoraOptions | None, owner: str | None = None) -> Resident:
        """A trainable model on the base weights."""
        with return_freed_memory():
            return super().add_policy(lora, owner)

    def add_frozen(self, owner: str | None = None, lora: LoraOptions | None = None) -> Resident:
        """A model that is the base weights and never changes; ``lora`` is an untrained adapter."""
        with return_freed_memory():
            return super().add_frozen(owner, lora)

    def remove(self, model_id: str) -> None:
        """Free a model."""
        super().remove(model_id)
        # Sharded modules refer to themselves.
        gc.collect()

    def _add(
        self, role: str, loaded: LoadedModel, optimizer: Optimizer | None, owner: str | None
    ) -> Resident:
        model = super()._add(role, loaded, optimizer, owner)
        for policy in self.find_policies():
            if policy.lora is None:
                self._choose_sums(policy)
        return model

    def _choose_sums(self, policy: Resident) -> None:
        """Choose by memory how ranks add up a full policy's gradients; all ranks choose alike."""
        loaded = require_sharded(policy.loaded)
        frozen = {id(model.loaded): model.loaded for model in self._models.values()}
        del frozen[id(loaded)]
        # Parts of trained weights are float32, 4 bytes.
        held = TRAINED_BYTES // 4 * loaded.part_bytes
        held += sum(require_sharded(model).part_bytes for model in frozen.values())
        held = 0 if self._offload else held
        parameters = loaded.num_parameters
        loaded.sums_whole = fits_whole_gradient(parameters, held=held, memory=self._memory)
        logger.info(
            "model %s: gradients of several micro-batches are added up %s: %.2f GiB of a whole "
            "gradient beside %.2f GiB of parts, in %.1f GiB of memory",
            policy.model_id,
            "whole on each rank, and reduced once a request"
            if loaded.sums_whole
            else "in parts, and reduced in each one",
            4 * parameters / _GIB,
            held / _GIB,
            self._memory / _GIB,
        )

    def _make_scorer(self, loaded: LoadedModel) -> TargetScorer:
        return RankScorer(require_sharded(loaded), self._options)

    def _make_optimizer(self, loaded: LoadedModel) -> Optimizer:
        parameters, is_8bit = find_trainable(loaded), self._options.optimizer == "adamw_8bit"
        if is_8bit and any(isinstance(parameter, DTensor) for parameter in parameters.values()):
            raise ConfigError(
                "optimizer must be 'adamw' or 'muon' for all weights on several ranks, got "
                "'adamw_8bit': its moments are scaled in blocks, which the ranks' parts would cut; "
                "more ranks hold moments in float32, or train an adapter"
            )
        return RankOptimizer(
            parameters,
            self._group,
            require_sharded(loaded).stored,
            matrices=self._find_matrices(loaded),
            is_8bit=is_8bit,
        )

    def _load_own(self) -> LoadedModel:
        if not any(model.loaded is self._base for model in self._models.values()):
            # Its parts are those of frozen weights.
            self._base = None
            gc.collect()
        return self._load_trained()


class RankOptimizer(Optimizer):
    """``Optimizer`` of this rank's parts of sharded parameters, or of its copies of whole ones.

    ``stored`` are the dtypes of the weights in snapshots. Parts are float32: where the stored dtype
    is another one, they are the master weights.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        group: RankGroup,
        stored: Mapping[str, torch.dtype],
        *,
        matrices: Collection[str],
        is_8bit: bool,
    ) -> None:
        self._group = group
        self._rounded = [
            name for name in parameters if stored.get(name, torch.float32) != torch.float32
        ]
        super().__init__(parameters, matrices, is_8bit=is_8bit)

    def state_tensors(self) -> dict[str, Tensor]:
        """As in a trainer that is one process."""
        masters = {f"master/{name}": self._masters[name].detach() for name in self._rounded}
        return super().state_tensors() | masters

    def _make_muon(self, matrices: list[nn.Parameter]) -> torch.optim.Optimizer:
        if any(isinstance(matrix, DTensor) for matrix in matrices):
            return ShardedMuon(matrices, self._group.device)
        return super()._make_muon(matrices)

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
        sharded = [weight for weight in self._parameters.values() if isinstance(weight, DTensor)]
        if not sharded:
            return own
        total = self._group.reduce_sum(torch.tensor(own**2, dtype=torch.float64))
        return math.sqrt(float(total) / count_copies(sharded[0]))


def require_sharded(loaded: LoadedModel) -> ShardedModel:
    """A rank's model as what it is."""
    assert isinstance(loaded, ShardedModel), "every model of a rank is sharded"
    return loaded
