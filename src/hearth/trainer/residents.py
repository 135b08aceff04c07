"""The models of one trainer, and the weights in memory that they share."""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from hearth.errors import ConfigError, EngineError, ForwardOnlyError, NotFoundError, RequestError
from hearth.models.loading import (
    LoadedModel,
    base_tensors,
    load_base_tensors,
    own_weights,
    share_weights,
)
from hearth.models.lora import (
    LoraOptions,
    adapter_tensors,
    attach_lora,
    base_only,
    detach_lora,
    has_experts,
    load_adapter_tensors,
)
from hearth.models.sizes import find_matrices
from hearth.sync.chain import Published
from hearth.trainer.logprobs import TargetScorer
from hearth.trainer.optim import Optimizer
from hearth.trainer.options import TrainerOptions

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Resident:
    """A model that operations name. A frozen one has no optimizer and is the base weights."""

    model_id: str
    loaded: LoadedModel
    scorer: TargetScorer
    optimizer: Optimizer | None = None
    steps: int = 0
    """Optimizer steps taken."""
    owner: str | None = None
    """The client that made it, where it gave its name."""
    published: Published = field(default_factory=Published)
    """Its last snapshot for a sampler."""
    untrained: LoraOptions | None = None
    """The adapter that a frozen model was asked for with: its update is 0, so there is none."""

    @property
    def lora(self) -> LoraOptions | None:
        """The adapter that it trains."""
        return self.loaded.lora if self.optimizer is not None else None

    @property
    def lora_rank(self) -> int:
        """Rank of its adapter; 0 where it has none."""
        adapter = self.lora or self.untrained
        return adapter.rank if adapter is not None else 0

    def weights(self) -> contextlib.AbstractContextManager[None]:
        """Inside the ``with`` the module computes this model: a frozen one without the adapter."""
        if self.optimizer is not None:
            return contextlib.nullcontext()
        return base_only(self.loaded)

    def tensors(self) -> dict[str, Tensor]:
        """This model's own tensors, not copies: its adapter's, or all weights."""
        if self.lora is not None:
            return adapter_tensors(self.loaded)
        return base_tensors(self.loaded.module)

    def load_tensors(self, tensors: dict[str, Tensor], source: str) -> None:
        """Copy ``tensors`` over ``tensors()``.

        Raises:
            RequestError: names or shapes differ; nothing was changed.
        """
        self.published.forget()
        try:
            if self.lora is not None:
                load_adapter_tensors(self.loaded, tensors)
            else:
                load_base_tensors(self.loaded.module, tensors)
        except EngineError as error:
            raise RequestError(f"{source} must fit model {self.model_id}: {error}") from None


class Residents:
    """At most ``options.max_policies`` policies, and frozen models beside them.

    Frozen models share one copy of the base weights; LoRA policies share it too, a policy that
    trains all parameters has its own. Where there may be several policies, all are LoRA, and each
    has modules of its own on the shared weights.
    """

    def __init__(self, load: Callable[[], LoadedModel], options: TrainerOptions) -> None:
        self._load = load
        self._options = options
        self._models: dict[str, Resident] = {}
        self._numbers = itertools.count(1)
        # Makes ids differ from those before a restart, which must not name another model.
        self._process = secrets.token_hex(4)
        self._base: LoadedModel | None = load()
        # Refuses a model that cannot be scored when the trainer starts.
        self.routing = self._make_scorer(self._base).routing
        """The model's routers, layers and experts; None for a dense model."""

    def get(self, model_id: str) -> Resident:
        """The model of an id.

        Raises:
            NotFoundError: no model has this id.
        """
        model = self._models.get(model_id)
        if model is None:
            raise unknown_model(model_id)
        return model

    def find_policies(self) -> list[Resident]:
        """The trainable models."""
        return [model for model in self._models.values() if model.optimizer is not None]

    def find_others(self, owner: str | None) -> list[str]:
        """Ids of the models that another client has made."""
        return [model.model_id for model in self._models.values() if model.owner != owner]

    def add_policy(self, lora: LoraOptions | None, owner: str | None = None) -> Resident:
        """A trainable model on the base weights.

        Raises:
            RequestError: there are as many policies as there may be, or it must be a LoRA.
            ConfigError: the adapter fits no layer, or memory is too small.
        """
        most, policies = self._options.max_policies, self.find_policies()
        if most == 1 and policies:
            raise RequestError(
                "a trainer must have at most one policy, got a second beside "
                f"{policies[0].model_id!r}, which another client has made: unload that one first, "
                "or ask to replace it"
            )
        if len(policies) >= most:
            raise RequestError(
                f"a trainer must have at most {most} policies, got one more: unload one first, or "
                "create the trainer with a larger max_policies"
            )
        if most > 1 and lora is None:
            raise RequestError(
                f"lora_config.rank must be >= 1 on a trainer of {most} policies, got 0: they share "
                "one set of base weights"
            )
        loaded = self._load_own() if lora is None else self._load_shared()
        if lora is not None:
            loaded = share_weights(loaded) if most > 1 else loaded
            attach_lora(loaded, lora)
        try:
            optimizer = self._make_optimizer(loaded)
        except ConfigError:
            # The base is for the next policy.
            if lora is not None and most == 1:
                detach_lora(loaded)
            raise
        return self._add("policy", loaded, optimizer, owner)

    def add_frozen(self, owner: str | None = None, lora: LoraOptions | None = None) -> Resident:
        """A model that is the base weights and never changes; ``lora`` is an untrained adapter."""
        model = self._add("frozen", self._load_shared(), None, owner)
        model.untrained = lora
        return model

    def match_experts(self, model: Resident, lora: LoraOptions) -> None:
        """Give a mixture's policy experts in its adapter if ``lora`` has them, or take them out.

        The adapter and the optimizer are then fresh ones.
        """
        loaded, own = model.loaded, model.loaded.lora
        if own is None or own.train_experts == lora.train_experts or not has_experts(loaded.module):
            return
        if own.train_mlp:
            logger.info(
                "model %s: its adapter %s experts from here on, as that of the checkpoint",
                model.model_id,
                "changes" if lora.train_experts else "leaves alone all",
            )
        require_trainable(model, "load_weights").close()
        detach_lora(loaded)
        attach_lora(loaded, replace(own, train_experts=lora.train_experts))
        model.optimizer = self._make_optimizer(loaded)

    def remove(self, model_id: str) -> None:
        """Free a model. The base weights stay in memory for the next one.

        Raises:
            NotFoundError: no model has this id.
        """
        model = self.get(model_id)
        del self._models[model_id]
        if model.optimizer is not None:
            model.optimizer.close()
            if model.loaded.lora is not None and self._options.max_policies == 1:
                detach_lora(model.loaded)
        if model.loaded.device.type == "cuda":
            torch.cuda.empty_cache()

    def clear(self) -> None:
        """Free everything."""
        for model_id in list(self._models):
            self.remove(model_id)
        self._base = None

    def _add(
        self, role: str, loaded: LoadedModel, optimizer: Optimizer | None, owner: str | None
    ) -> Resident:
        model_id = f"{role}-{next(self._numbers)}-{self._process}"
        model = Resident(model_id, loaded, self._make_scorer(loaded), optimizer, owner=owner)
        self._models[model_id] = model
        return model

    def _make_scorer(self, loaded: LoadedModel) -> TargetScorer:
        return TargetScorer(loaded, self._options)

    def _make_optimizer(self, loaded: LoadedModel) -> Optimizer:
        return Optimizer(
            find_trainable(loaded),
            self._find_matrices(loaded),
            is_8bit=self._options.optimizer == "adamw_8bit",
        )

    def _find_matrices(self, loaded: LoadedModel) -> list[str]:
        """The trained parameters that Muon updates, by name: none with another optimizer.

        Raises:
            ConfigError: Muon is asked for, and a trained tensor holds several matrices.
        """
        return find_trained_matrices(loaded) if self._options.optimizer == "muon" else []

    def _load_shared(self) -> LoadedModel:
        if self._base is None:
            self._base = self._load()
        return self._base

    def _load_own(self) -> LoadedModel:
        """Weights to train: the base weights themselves if no other model uses them."""
        is_shared = any(model.loaded is self._base for model in self._models.values())
        if self._base is None or is_shared:
            loaded = self._load()
        else:
            loaded, self._base = self._base, None
        own_weights(loaded)
        return loaded


def find_trainable(loaded: LoadedModel) -> dict[str, nn.Parameter]:
    """The parameters that a policy trains, by name."""
    named = loaded.module.named_parameters()
    return {name: parameter for name, parameter in named if parameter.requires_grad}


def find_trained_matrices(loaded: LoadedModel) -> list[str]:
    """The trained matrices of a model's layers, by name; embeddings and head are none of them.

    Raises:
        ConfigError: a trained tensor holds several matrices, as that of a layer's experts.
    """
    for name, parameter in find_trainable(loaded).items():
        if parameter.ndim > 2:
            raise ConfigError(
                f"optimizer must be 'adamw' for this model, got 'muon': {name!r} holds "
                f"{parameter.shape[0]} matrices in one tensor, and Muon updates single ones; take "
                "'adamw', or an adapter that leaves out mlp"
            )
    matrices = find_matrices(loaded.module)
    return [name for name, matrix in matrices.items() if matrix.requires_grad]


def unknown_model(model_id: str) -> NotFoundError:
    """The error for an id that no model here has."""
    return NotFoundError(
        f"model_id must name a model of this trainer, got {model_id!r}: the trainer may have been "
        "restarted"
    )


def require_trainable(model: Resident, operation: str) -> Optimizer:
    """The model's optimizer.

    Raises:
        ForwardOnlyError: it is frozen.
    """
    if model.optimizer is None:
        raise ForwardOnlyError(
            f"{operation} must run on a trainable model, got {model.model_id!r}, which is frozen: "
            "it only runs forward"
        )
    return model.optimizer
