"""One trainer: models on one set of base weights, and the operations on them. Knows no HTTP.

Losses are raw sums. Gradients add up over calls until ``optim_step`` divides once, clips once and
steps once. Operations run one at a time, whatever thread calls.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from torch import Tensor

from hearth.errors import ClosedError, ConfigError, ForwardOnlyError, RequestError
from hearth.losses import BuiltinObjective, builtin_objective
from hearth.models.loading import LoadedModel, base_tensors, export_pretrained, load_model
from hearth.models.lora import LoraOptions, merged_tensors, read_adapter
from hearth.sync.store import Snapshot, SnapshotStore
from hearth.trainer.adapters import AdapterStore
from hearth.trainer.checkpoint import (
    CheckpointFacts,
    CheckpointFolder,
    TrainerState,
    check_metadata,
    parse_reference,
    restore_rng,
    rng_state,
)
from hearth.trainer.datums import Datums, read_datums
from hearth.trainer.options import TrainerOptions
from hearth.trainer.packing import Limits
from hearth.trainer.passes import KeptGraph, Pass, PassResult
from hearth.trainer.residents import Resident, Residents, require_trainable
from hearth.wire.tinker import AdamParams, CheckpointType, DatumColumns, Normalization

logger = logging.getLogger(__name__)

LossConfig = Mapping[str, float | int | str | bool]
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class ModelFacts:
    """What a client may ask about a model."""

    model_id: str
    arch: str
    """The model type in transformers' words, such as ``qwen3``."""
    lora_rank: int
    """0 for a frozen model or one that trains all parameters."""


def _exclusive(
    method: Callable[Concatenate[TrainerEngine, P], R],
) -> Callable[Concatenate[TrainerEngine, P], R]:
    """Run a method alone, and not after ``close``."""

    @functools.wraps(method)
    def run(self: TrainerEngine, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.lock:
            if self.is_closed:
                raise ClosedError(f"trainer {self.name!r} must be running, got a call after close")
            with self.running(method.__name__, *args, **kwargs):
                return method(self, *args, **kwargs)

    return run


class TrainerEngine:
    """Trains at most one policy; frozen models beside it only run ``forward``.

    The base weights are loaded at once, so that a bad model fails here. The checkpoint folders of
    other jobs are siblings of ``checkpoint_dir``, named by the jobs' ids.

    Raises:
        ConfigError: the model cannot be loaded or trained, or an option breaks its rule.
    """

    keeps_graphs = True
    """Whether ``forward`` keeps the graph that it is told to."""

    def __init__(
        self,
        source: str | Path,
        *,
        name: str | None = None,
        snapshots: SnapshotStore,
        checkpoint_dir: Path,
        options: TrainerOptions | None = None,
        adapters: AdapterStore | None = None,
    ) -> None:
        self.source = str(source)
        self.name = name or self.source
        self.options = options or TrainerOptions()
        self.lock = threading.RLock()
        self.is_closed = False
        self._snapshots = snapshots
        self._checkpoints = CheckpointFolder(checkpoint_dir, keep=self.options.keep_checkpoints)
        self._jobs_dir = checkpoint_dir.parent
        self._adapters = adapters or AdapterStore()
        self._closing: list[Callable[[], None]] = []
        self.options.check()
        base = self.load_base()
        self.architecture = str(base.config.model_type)
        self._limits = _limits(base, self.options.max_seq_len)
        first = [base]
        self._residents = self._make_residents(lambda: first.pop() if first else self.load_base())
        self._has_told_dense = False
        self._graph: tuple[str, KeptGraph] | None = None
        """The pass that waits for its backward pass, by its name."""

    @property
    def supports_router_replay(self) -> bool:
        """Whether tokens go to experts, and to given ones where a datum says so."""
        return self._residents.routing is not None

    @property
    def max_seq_len(self) -> int:
        """Most input tokens of a datum."""
        return self._limits.max_seq_len

    @_exclusive
    def create_model(
        self,
        lora: LoraOptions | None = None,
        *,
        is_frozen: bool = False,
        owner: str | None = None,
        replace: bool = False,
    ) -> str:
        """A new model's id.

        A frozen model is the base weights: the LoRA policy's own with its adapter off, or a copy
        beside a policy that trains all parameters. A forward-only trainer makes every model
        without an adapter frozen. A new policy takes the place of its ``owner``'s earlier one;
        with ``replace``, of whatever other clients have left here.

        Raises:
            ForwardOnlyError: an adapter was asked of a forward-only trainer.
            RequestError: there is a policy already.
        """
        self._graph = None
        if self.options.forward_only and lora is not None and not is_frozen:
            raise ForwardOnlyError(
                "lora_config must be absent on a forward-only trainer, got an adapter: it has "
                "nothing to learn there"
            )
        if is_frozen or self.options.forward_only:
            model = self._residents.add_frozen(owner)
        else:
            self._make_room(owner, replace=replace)
            model = self._residents.add_policy(lora, owner)
        logger.info("trainer %s: model %s, lora %s", self.name, model.model_id, model.lora)
        return model.model_id

    @_exclusive
    def forward(
        self,
        model_id: str,
        data: Datums,
        loss_fn: str = "cross_entropy",
        config: LossConfig | None = None,
        *,
        graph: str | None = None,
    ) -> PassResult:
        """Logprobs and loss without a gradient.

        The graph of the pass is kept under the name ``graph``, as far as it has room, until the
        weights or another pass of that kind come: ``forward_backward`` on the same data that
        names it costs no second forward pass.

        ``config`` holds the options of the loss, and ``temperature``, which divides the logits.
        Tokens go to the experts of a datum's ``routing_matrices``, but for a frozen model: what a
        reference says of a token does not hang on who drew it.

        Raises:
            RequestError: a datum or the config breaks a rule; the datum is named.
            ConfigError: the same, found by the objective.
            NumericsError: an input or a logprob is unusable.
        """
        model = self._residents.get(model_id)
        work = self._pass(model, data, loss_fn, config)
        with model.weights():
            if graph is None or model.optimizer is None or not self.keeps_graphs:
                return work.forward()
            self._graph = None
            result, kept = work.forward_keeping()
        self._graph = (graph, kept)
        return result

    @_exclusive
    def forward_backward(
        self,
        model_id: str,
        data: Datums,
        loss_fn: str = "cross_entropy",
        config: LossConfig | None = None,
        *,
        graph: str | None = None,
    ) -> PassResult:
        """Logprobs and loss, and the gradient of the raw loss sum added to what has accumulated.

        Raises:
            ForwardOnlyError: the model is frozen.
            RequestError: as in ``forward``; what had accumulated stays.
            NumericsError: an input is unusable, and what had accumulated stays. Or a logprob of
                the model is, and the whole accumulated gradient is dropped.
        """
        model = self._residents.get(model_id)
        optimizer = require_trainable(model, "forward_backward")
        work = self._pass(model, data, loss_fn, config)
        kept = self._kept_graph(graph, work)
        try:
            result, counts = work.forward_backward(kept)
        except BaseException:
            # Half of a request's gradient cannot be told from the whole of another.
            optimizer.clear_gradient()
            raise
        optimizer.record_pass(counts)
        return result

    @_exclusive
    def optim_step(
        self, model_id: str, adam: AdamParams, normalization: Normalization | None = None
    ) -> dict[str, float]:
        """One AdamW step on the accumulated gradient; None normalizes by nothing.

        Raises:
            ForwardOnlyError: the model is frozen.
            NumericsError: the gradient is not finite; it is dropped, nothing else changes.
        """
        self._graph = None
        model = self._residents.get(model_id)
        optimizer = require_trainable(model, "optim_step")
        metrics = optimizer.step(adam, normalization or "none")
        model.steps += metrics["skipped"] == 0
        return metrics | {"step": float(model.steps)}

    @_exclusive
    def save_state(
        self,
        model_id: str,
        name: str,
        *,
        overwrite: bool = False,
        metadata: Mapping[str, Any] | None = None,
        seq_id: int | None = None,
    ) -> str:
        """Write a resumable checkpoint; an accumulated gradient is not part of it.

        ``metadata`` are the caller's own JSON values (``"pinned": true`` keeps the checkpoint);
        ``seq_id`` is this operation's number. Both are in the checkpoint's facts.

        Raises:
            ForwardOnlyError: the model is frozen.
            RequestError: the name is no valid one, or is taken and ``overwrite`` is False; or
                the metadata are no JSON or above 1 MiB.
        """
        created_s = time.time()
        model = self._residents.get(model_id)
        optimizer = require_trainable(model, "save_weights")
        check_metadata(metadata or {})
        facts = CheckpointFacts(
            base_model=self.name,
            lora=model.lora,
            steps=model.steps,
            created_s=created_s,
            seq_id=seq_id,
            metadata=dict(metadata or {}),
        )
        state = TrainerState(
            facts=facts,
            weights=self._stored(model),
            optimizer=optimizer.state_tensors(),
            rng=rng_state(model.loaded.device),
        )
        self._write_checkpoint(name, state, overwrite=overwrite)
        return name

    @_exclusive
    def load_state(self, model_id: str, name: str, *, with_optimizer: bool) -> str:
        """Go on from a checkpoint: its weights, optimizer, step count and RNG.

        ``cross_job://<job>/<name>`` names another job's. Without the optimizer only the weights
        are taken, with a fresh optimizer at step 0.

        Raises:
            ForwardOnlyError: the model is frozen.
            NotFoundError: there is no such checkpoint; the message lists the names.
            RequestError: it is a sampler snapshot, or of another model or adapter.
            EngineError: it is damaged; the file is named.
        """
        self._graph = None
        model = self._residents.get(model_id)
        optimizer = require_trainable(model, "load_weights")
        folder, own_name = self._find_checkpoint(name)
        state = self._read_checkpoint(folder, own_name, model)
        model.load_tensors(dict(state.weights), f"checkpoint {name!r}")
        if with_optimizer:
            optimizer.load_state_tensors(state.optimizer)
            restore_rng(state.rng, model.loaded.device)
        else:
            optimizer.reset()
        model.steps = state.facts.steps if with_optimizer else 0
        return name

    @_exclusive
    def load_adapter(self, model_id: str, adapter_path: str) -> None:
        """Start a LoRA policy from a PEFT adapter's folder, with a fresh optimizer.

        Raises:
            ForwardOnlyError: the model is frozen.
            RequestError: the model has no adapter, or the folder's does not fit it.
            ConfigError: the folder holds no adapter.
        """
        self._graph = None
        model = self._residents.get(model_id)
        optimizer = require_trainable(model, "load_adapter")
        if model.lora is None:
            raise RequestError(
                f"load_adapter must run on a LoRA model, got {model_id!r}, which trains all "
                "parameters"
            )
        config, tensors = read_adapter(self._adapters.find_folder(adapter_path))
        if float(config.get("lora_alpha", 0)) != model.lora.alpha:
            raise RequestError(
                f"adapter must have the model's lora_alpha, {model.lora.alpha:g}, got "
                f"{config.get('lora_alpha')} in {adapter_path!r}"
            )
        model.load_tensors(tensors, f"adapter {adapter_path!r}")
        optimizer.reset()
        model.steps = 0

    @_exclusive
    def save_for_sampler(
        self,
        model_id: str,
        identity: str,
        kind: CheckpointType = "base",
        metadata: Mapping[str, Any] | None = None,
    ) -> str:
        """Put a snapshot of the current weights into the store; returns its identity.

        Of a LoRA model it is the adapter, or with ``merged_base`` the whole model with the adapter
        merged in. A ``delta`` is what differs from this model's last snapshot; without one, after
        weights were loaded, and for a LoRA model, the snapshot is whole and its kind says so.

        Raises:
            RequestError: the identity is no valid name or is taken, or a tied head with an
                adapter was to be merged.
        """
        model = self._residents.get(model_id)
        facts: dict[str, Any] = {"step": model.steps, "user": dict(metadata or {})}
        is_merged = model.lora is not None and kind == "merged_base"
        tensors = self._merged(model) if is_merged else self._whole(model)
        self._alone(lambda: self._publish(model, identity, kind, tensors, facts))
        return identity

    @_exclusive
    def export(self, model_id: str, folder: Path) -> None:
        """Write the current weights as a Hugging Face folder; an adapter is merged in.

        Raises:
            NotFoundError: there is no such model.
        """
        model = self._residents.get(model_id)
        tensors = self._merged(model) if model.lora is not None else self._whole(model)
        self._alone(lambda: export_pretrained(model.loaded, tensors, folder))

    @_exclusive
    def unload(self, model_id: str) -> None:
        """Forget a model and free what only it used.

        Raises:
            NotFoundError: there is none of that id.
        """
        self._graph = None
        self._residents.remove(model_id)

    def list_checkpoints(self) -> list[str]:
        """Names of the resumable checkpoints, oldest first."""
        return self._checkpoints.names()

    def checkpoint_facts(self, name: str) -> CheckpointFacts:
        """What a checkpoint is, named as in ``load_state``; answers while an operation runs.

        Raises:
            NotFoundError: there is no such checkpoint; the message lists the names.
            RequestError: it is a sampler snapshot.
        """
        folder, own_name = self._find_checkpoint(name)
        return folder.facts(own_name)

    def facts(self, model_id: str) -> ModelFacts:
        """What a model is; answers while an operation runs.

        Raises:
            NotFoundError: there is none of that id.
        """
        lora = self._residents.get(model_id).lora
        return ModelFacts(model_id, self.architecture, lora.rank if lora is not None else 0)

    def call_on_close(self, callback: Callable[[], None]) -> None:
        """Have ``close`` call this first: whoever feeds the engine stops before it does."""
        self._closing.append(callback)

    def close(self) -> None:
        """Free all models, after the running operation; later calls are ClosedError."""
        while self._closing:
            self._closing.pop()()
        with self.lock:
            self.is_closed = True
            self._graph = None
            self._residents.clear()

    def load_base(self) -> LoadedModel:
        """A new copy of the base weights."""
        options = self.options
        return load_model(
            self.source,
            name=self.name,
            dtype=options.dtype,
            device=options.device,
            attn_implementation=options.attn_implementation,
            trust_remote_code=options.trust_remote_code,
        )

    def running(self, operation: str, *args: Any, **kwargs: Any) -> AbstractContextManager[None]:
        """Around an operation that runs alone, with what it was called with."""
        return contextlib.nullcontext()

    def _make_residents(self, load: Callable[[], LoadedModel]) -> Residents:
        return Residents(load, self.options)

    def _stored(self, model: Resident) -> Mapping[str, Tensor]:
        """What makes a model, as a checkpoint has it."""
        return model.tensors()

    def _whole(self, model: Resident) -> Mapping[str, Tensor]:
        """What makes a model, as a snapshot has it: its adapter, or all weights."""
        return model.tensors()

    def _merged(self, model: Resident) -> Mapping[str, Tensor]:
        """All weights of a LoRA model, with the adapter merged in."""
        return merged_tensors(model.loaded)

    def _alone(self, write: Callable[[], None]) -> None:
        """Have something written that is written once."""
        write()

    def _publish(
        self,
        model: Resident,
        identity: str,
        kind: CheckpointType,
        tensors: Mapping[str, Tensor],
        facts: Mapping[str, Any],
    ) -> None:
        if model.lora is None:
            model.published.publish(
                self._snapshots, identity, self.name, tensors, facts, as_delta=kind == "delta"
            )
            return
        if kind != "merged_base":
            lora = {**facts, **model.lora.as_metadata()}
            self._snapshots.put(Snapshot.capture(identity, "lora", self.name, tensors, lora))
            return
        if tensors.keys() != base_tensors(model.loaded.module).keys():
            raise RequestError(
                "checkpoint_type must be 'base' for an adapter on a tied head, got 'merged_base': "
                "merging would untie it"
            )
        self._snapshots.put(Snapshot.capture(identity, "base", self.name, tensors, facts))

    def _write_checkpoint(self, name: str, state: TrainerState, *, overwrite: bool) -> None:
        self._checkpoints.write(name, state, overwrite=overwrite)

    def _read_checkpoint(
        self, folder: CheckpointFolder, name: str, model: Resident
    ) -> TrainerState:
        return folder.read(name, base_model=self.name, lora=model.lora)

    def _make_room(self, owner: str | None, *, replace: bool) -> None:
        policy = self._residents.policy()
        leaving = self._residents.others(owner) if replace else []
        if policy is not None and owner is not None and policy.owner == owner:
            leaving.append(policy.model_id)
        for model_id in leaving:
            logger.warning("trainer %s: model %s makes room for another", self.name, model_id)
            self._residents.remove(model_id)

    def _find_checkpoint(self, path: str) -> tuple[CheckpointFolder, str]:
        """The folder that a reference means, and the name in it."""
        job, name = parse_reference(path)
        folder = self._checkpoints if job is None else CheckpointFolder(self._jobs_dir / job)
        known = folder.names()
        if name not in known and name in self._snapshots.names():
            raise RequestError(
                f"path must name a resumable checkpoint, got the sampler snapshot {name!r}: a "
                "snapshot (save_weights_for_sampler) has no optimizer, a checkpoint "
                f"(save_weights) has; checkpoints here are {known}"
            )
        return folder, name

    def _pass(self, model: Resident, data: Datums, loss_fn: str, config: LossConfig | None) -> Pass:
        objective, temperature = _objective(loss_fn, config)
        is_replayed = model.optimizer is not None
        limits = replace(self._limits, routing=model.scorer.routing if is_replayed else None)
        self._note_dense(data)
        return self._make_pass(
            scorer=model.scorer,
            objective=objective,
            examples=read_datums(data, objective, limits),
            limits=limits,
            token_budget=self.options.micro_batch_tokens,
            temperature=temperature,
        )

    def _make_pass(self, **fields: Any) -> Pass:
        return Pass(**fields)

    def _kept_graph(self, name: str | None, work: Pass) -> KeptGraph | None:
        """The graph that an earlier pass has left for this one; it is used up."""
        known, kept = self._graph or (None, None)
        if kept is None or name != known:
            return None
        self._graph = None
        return kept if kept.fits(work.examples, work.temperature) else None

    def _note_dense(self, data: Datums) -> None:
        """Say once that experts are given to a model that has none."""
        if self.supports_router_replay or self._has_told_dense:
            return
        if isinstance(data, DatumColumns):
            return
        if any(datum.model_input.routing_matrices for datum in data):
            self._has_told_dense = True
            logger.warning(
                "trainer %s: datums name experts, and the model has none that can be replayed: "
                "routing_matrices are left out",
                self.name,
            )


def _objective(loss_fn: str, config: LossConfig | None) -> tuple[BuiltinObjective, float]:
    """The loss with its options, and the temperature, which belongs to the model's side."""
    options: dict[str, Any] = dict(config or {})
    temperature = options.pop("temperature", 1.0)
    is_number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
    if not is_number or not (math.isfinite(temperature) and temperature > 0):
        raise RequestError(
            f"loss_fn_config.temperature must be finite and > 0, got {temperature!r}"
        )
    return builtin_objective(loss_fn, options), float(temperature)


def _limits(base: LoadedModel, max_seq_len: int | None) -> Limits:
    if max_seq_len is not None and not 0 < max_seq_len <= base.max_position:
        raise ConfigError(
            f"max_seq_len must be in [1, {base.max_position}], the positions of {base.name!r}, "
            f"got {max_seq_len}"
        )
    return Limits(base.vocab_size, max_seq_len or base.max_position, base.max_position)
