"""The models of one trainer: which weights are in memory, and who uses them."""

from __future__ import annotations

import contextlib
import itertools
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hearth.errors import EngineError, ForwardOnlyError, NotFoundError, RequestError
from hearth.models.loading import LoadedModel, base_tensors, load_base_tensors
from hearth.models.lora import (
    LoraOptions,
    adapter_tensors,
    attach_lora,
    base_only,
    detach_lora,
    load_adapter_tensors,
)
from hearth.sync.chain import Published
from hearth.trainer.logprobs import TargetScorer
from hearth.trainer.optim import Optimizer
from hearth.trainer.options import TrainerOptions


@dataclass(eq=False)
class Resident:
    """A model that operations name. A frozen one has no optimizer and is always the base."""

    model_id: str
    loaded: LoadedModel
    scorer: TargetScorer
    optimizer: Optimizer | None = None
    steps: int = 0
    """Optimizer steps taken."""
    owner: str | None = None
    """The client that made it, where it said who it is."""
    published: Published = field(default_factory=Published)
    """Its last snapshot for a sampler."""

    @property
    def lora(self) -> LoraOptions | None:
        """The adapter that it trains."""
        return self.loaded.lora if self.optimizer is not None else None

    def weights(self) -> contextlib.AbstractContextManager[None]:
        """Inside the ``with`` the module computes as this model."""
        if self.optimizer is not None:
            return contextlib.nullcontext()
        return base_only(self.loaded)

    def tensors(self) -> dict[str, Tensor]:
        """The live tensors that make this model: its adapter's, or all weights."""
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
    """At most one policy, and frozen models beside it.

    Frozen models share one copy of the base weights; a LoRA policy shares it too, a policy that
    trains all parameters has its own.
    """

    def __init__(self, load: Callable[[], LoadedModel], options: TrainerOptions) -> None:
        self._load = load
        self._options = options
        self._models: dict[str, Resident] = {}
        self._numbers = itertools.count(1)
        # After a restart an id of before must not name another model.
        self._process = secrets.token_hex(4)
        self._base: LoadedModel | None = load()
        # A model that cannot be trained or scored is refused when the trainer starts.
        self.routing = TargetScorer(self._base, options).routing
        """What the model's routers choose from; None for a dense model."""

    def get(self, model_id: str) -> Resident:
        """The model of an id.

        Raises:
            NotFoundError: there is none.
        """
        model = self._models.get(model_id)
        if model is None:
            raise unknown_model(model_id)
        return model

    def policy(self) -> Resident | None:
        """The trainable model, where there is one."""
        return next((model for model in self._models.values() if model.optimizer is not None), None)

    def others(self, owner: str | None) -> list[str]:
        """Ids of the models that another client has made."""
        return [model.model_id for model in self._models.values() if model.owner != owner]

    def add_policy(self, lora: LoraOptions | None, owner: str | None = None) -> Resident:
        """A trainable model on the base weights.

        Raises:
            RequestError: there is a policy already.
            ConfigError: there is nothing for the adapter to adapt, or no memory.
        """
        policy = self.policy()
        if policy is not None:
            raise RequestError(
                f"a trainer must have one policy at most, got a second beside {policy.model_id!r}, "
                "which another client has made: unload that one first, or ask to replace it"
            )
        loaded = self._own_weights() if lora is None else self._shared_weights()
        if lora is not None:
            attach_lora(loaded, lora)
        return self._add("policy", loaded, self._optimizer(loaded), owner)

    def add_frozen(self, owner: str | None = None) -> Resident:
        """A model that is the base weights and stays so."""
        return self._add("frozen", self._shared_weights(), None, owner)

    def remove(self, model_id: str) -> None:
        """Free a model. The base weights stay in memory for the next one.

        Raises:
            NotFoundError: there is none of that id.
        """
        model = self.get(model_id)
        del self._models[model_id]
        if model.optimizer is not None:
            model.optimizer.close()
            if model.loaded.lora is not None:
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
        model = Resident(model_id, loaded, self._scorer(loaded), optimizer, owner=owner)
        self._models[model_id] = model
        return model

    def _scorer(self, loaded: LoadedModel) -> TargetScorer:
        return TargetScorer(loaded, self._options)

    def _optimizer(self, loaded: LoadedModel) -> Optimizer:
        return Optimizer(trainable(loaded))

    def _shared_weights(self) -> LoadedModel:
        if self._base is None:
            self._base = self._load()
        return self._base

    def _own_weights(self) -> LoadedModel:
        """Weights that may change: the base's own when nobody else uses them."""
        is_shared = any(model.loaded is self._base for model in self._models.values())
        if self._base is None or is_shared:
            return self._load()
        loaded, self._base = self._base, None
        return loaded


def trainable(loaded: LoadedModel) -> dict[str, nn.Parameter]:
    """The parameters that a policy trains, by name."""
    return {name: one for name, one in loaded.module.named_parameters() if one.requires_grad}


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
