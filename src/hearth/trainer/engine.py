"""One trainer: models on one set of base weights, and the operations on them. It knows no HTTP.

Losses are raw sums. Gradients add up over calls until ``optim_step`` divides, clips and steps, once
each. Operations run one at a time, whichever threads call them.
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

from torch import Tensor, nn

from hearth.errors import ClosedError, ConfigError, NumericsError, RequestError
from hearth.losses import BuiltinObjective, builtin_objective
from hearth.models.loading import (
    LoadedModel,
    base_tensors,
    describe_non_finite,
    export_pretrained,
    load_model,
)
from hearth.models.lora import LoraOptions, from_peft, merge_tensors, read_adapter
from hearth.sync.direct import Sender
from hearth.sync.store import FolderSnapshotStore, Snapshot, SnapshotStore
from hearth.trainer.checkpoint import (
    CheckpointFacts,
    CheckpointFolder,
    TrainerState,
    check_metadata,
    parse_reference,
    read_rng,
    restore_rng,
)
from hearth.trainer.datums import Datums, read_datums
from hearth.trainer.options import AdapterStore, TrainerOptions
from hearth.trainer.packing import Example, Limits
from hearth.trainer.passes import KeptGraph, Pass, PassResult
from hearth.trainer.ranks.publishing import Alone, Group, OwnPieces, PieceStore, take_pieces
from hearth.trainer.residents import Resident, Residents, require_trainable
from hearth.wire.tinker import AdamParams, CheckpointType, DatumColumns, Normalization

logger = logging.getLogger(__name__)

LossConfig = Mapping[str, float | int | str | bool]
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class ModelFacts:
    """Facts of a model for clients."""

    model_id: str
    arch: str
    """The model type as transformers names it, such as ``qwen3``."""
    lora_rank: int
    """0 for the base weights and for a model that trains all parameters."""


def _run_alone(
    method: Callable[Concatenate[TrainerEngine, P], R],
) -> Callable[Concatenate[TrainerEngine, P], R]:
    """Run a method under the engine's lock, and refuse it after ``close``."""

    @functools.wraps(method)
    def run(self: TrainerEngine, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.lock:
            if self.is_closed:
                raise ClosedError(f"trainer {self.name!r} must be running, got a call after close")
            with self.wrap_operation(method.__name__, *args, **kwargs):
                return method(self, *args, **kwargs)

    return run


class TrainerEngine:
    """Trains policies, one or ``max_policies``; frozen models beside them only run ``forward``.

    The base weights are loaded here, so that a bad model fails at once. The checkpoint folders of
    other jobs are siblings of ``checkpoint_dir``, named by the jobs' ids.

    Raises:
        ConfigError: the model cannot be loaded or trained, or an option breaks its rule.
    """

    keeps_graphs = True
    """Whether ``forward`` keeps a graph for which it is given a name."""

    _writers: Group = Alone()
    """The processes that write a snapshot together."""
    _sender: Sender | None = None
    """Made by the first snapshot that it sends."""

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
        self._limits = _make_limits(base, self.options.max_seq_len)
        loaded = [base]
        self._residents = self._make_residents(lambda: loaded.pop() if loaded else self.load_base())
        self._has_warned_dense = False
        self._graph: tuple[tuple[str, str], KeptGraph] | None = None
        """A forward pass kept for its backward pass: its model's id, its name, its graph."""

    @property
    def supports_router_replay(self) -> bool:
        """Whether datums can name the experts of their tokens."""
        return self._residents.routing is not None

    @property
    def max_seq_len(self) -> int:
        """Most input tokens of a datum."""
        return self._limits.max_seq_len

    @_run_alone
    def create_model(
        self,
        lora: LoraOptions | None = None,
        *,
        is_frozen: bool = False,
        owner: str | None = None,
        replace: bool = False,
    ) -> str:
        """Make a model; returns its id.

        A frozen model is the base weights: the LoRA policy's own with its adapter off, or a copy
        beside a policy that trains all parameters. On a forward-only trainer every model is frozen;
        one with an adapter has that adapter's rank, and the base's logprobs, as a new policy with
        this adapter has them. A new policy replaces its ``owner``'s earlier one, and without an
        owner one that has none: a client that does not say who it is takes it over. With
        ``replace`` it replaces also the models of other clients.

        Raises:
            RequestError: there is a policy of another owner.
            ConfigError: the adapter fits no layer, or memory is too small.
        """
        self._graph = None
        if is_frozen:
            model = self._residents.add_frozen(owner)
        elif self.options.forward_only:
            model = self._residents.add_frozen(owner, lora)
        else:
            self._make_room(owner, replace=replace)
            model = self._residents.add_policy(lora, owner)
        part = f"LoRA rank {model.lora_rank}" if model.lora_rank else "all parameters"
        logger.info("trainer %s: model %s, %s", self.name, model.model_id, part)
        return model.model_id

    @_run_alone
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

        With a name ``graph`` the graph of the pass is kept, up to a memory limit, until weights
        change or another graph is kept: ``forward_backward`` on the same data with the same name
        then needs no second forward pass.

        ``config`` holds the options of the loss, and ``temperature``, which divides the logits.
        Tokens go to the experts of a datum's ``routing_matrices``, except in a frozen model: a
        reference's logprobs must not depend on the experts that the sampler chose.

        Raises:
            RequestError: a datum or the config breaks a rule; the datum is named.
            ConfigError: as RequestError, where the objective checks the rule.
            NumericsError: an input or a logprob is unusable.
        """
        model = self._residents.get(model_id)
        work = self._prepare_pass(model, data, loss_fn, config)
        with model.weights():
            if graph is None or model.optimizer is None or not self.keeps_graphs:
                return work.forward()
            self._graph = None
            result, kept = work.forward_keeping_graph()
        self._graph = ((model_id, graph), kept)
        return result

    @_run_alone
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
            RequestError: as in ``forward``; the accumulated gradient stays.
            NumericsError: an input is unusable, and the accumulated gradient stays; or a logprob
                of the model is, and the whole accumulated gradient is dropped.
        """
        model = self._residents.get(model_id)
        optimizer = require_trainable(model, "forward_backward")
        work = self._prepare_pass(model, data, loss_fn, config)
        kept = self._take_graph(model_id, graph, work)
        try:
            result, counts = work.forward_backward(kept)
        except BaseException:
            # Part of this request's gradient is in the sum, and cannot be taken out again.
            optimizer.clear_gradient()
            raise
        optimizer.record_pass(counts)
        return result

    @_run_alone
    def optim_step(
        self,
        model_id: str,
        adam: AdamParams,
        normalization: Normalization | None = None,
        *,
        skip_zero_gradient: bool = False,
    ) -> dict[str, float]:
        """One AdamW step on the accumulated gradient; ``normalization`` None does not divide it.

        ``skip_zero_gradient`` drops a gradient of zeros: the metric ``skipped`` is then 1.

        Raises:
            ForwardOnlyError: the model is frozen.
            NumericsError: the gradient is not finite; it is dropped, nothing else changes.
        """
        self._graph = None
        model = self._residents.get(model_id)
        optimizer = require_trainable(model, "optim_step")
        metrics = optimizer.step(
            adam, normalization or "none", skip_zero_gradient=skip_zero_gradient
        )
        model.steps += metrics["skipped"] == 0
        return metrics | {"step": float(model.steps)}

    @_run_alone
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

        A model without an owner overwrites: clients that give none count on it.
        ``metadata`` are JSON values of the caller (``"pinned": true`` keeps the checkpoint);
        ``seq_id`` is this operation's number. Both become facts of the checkpoint.

        Raises:
            ForwardOnlyError: the model is frozen.
            RequestError: the name is invalid, or is taken and ``overwrite`` is False; or the
                metadata are no JSON or above 1 MiB.
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
        weights, moments = self._collect_stored(model), optimizer.state_tensors()
        state = TrainerState(facts, weights, moments, read_rng(model.loaded.device))
        self._write_checkpoint(name, state, overwrite=overwrite or model.owner is None)
        return name

    @_run_alone
    def load_state(self, model_id: str, name: str, *, with_optimizer: bool) -> str:
        """Load a checkpoint: its weights, optimizer, step count and RNG.

        ``cross_job://<job>/<name>`` names another job's. Without the optimizer only the weights
        are loaded; the optimizer starts at step 0. A mixture's adapter changes experts from then on
        if that of the checkpoint does.

        Raises:
            ForwardOnlyError: the model is frozen.
            NotFoundError: there is no such checkpoint; the message lists the names.
            RequestError: it is a sampler snapshot, or of another model or adapter.
            EngineError: it is damaged; the file is named.
        """
        self._graph = None
        model = self._residents.get(model_id)
        require_trainable(model, "load_weights")
        folder, own_name = self._find_checkpoint(name)
        state = self._read_checkpoint(folder, own_name, model)
        if state.facts.lora is not None:
            self._residents.match_experts(model, state.facts.lora)
        optimizer = require_trainable(model, "load_weights")
        model.load_tensors(dict(state.weights), f"checkpoint {name!r}")
        if with_optimizer:
            optimizer.load_state_tensors(state.optimizer)
            restore_rng(state.rng, model.loaded.device)
        else:
            optimizer.reset()
        model.steps = state.facts.steps if with_optimizer else 0
        return name

    @_run_alone
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
        model.load_tensors(from_peft(tensors, model.loaded), f"adapter {adapter_path!r}")
        optimizer.reset()
        model.steps = 0

    @_run_alone
    def save_for_sampler(
        self,
        model_id: str,
        identity: str,
        kind: CheckpointType = "base",
        metadata: Mapping[str, Any] | None = None,
    ) -> str:
        """Put a snapshot of the current weights into the store; returns its identity.

        Of a LoRA model it is the adapter, or with ``merged_base`` the whole model with the adapter
        merged in. A ``delta`` is the difference to this model's last snapshot. Where there is none,
        after weights were loaded, and for a LoRA model, the snapshot is whole, and so is its kind.
        ``direct`` has all weights and no files: while it is one of the newest, this trainer sends
        them to whoever loads it (``sync.direct``).

        Raises:
            NumericsError: a weight is not finite; it is named, and nothing is put.
            RequestError: the identity is an invalid name or is taken, or an adapter on a tied
                head cannot be merged, or ``direct`` is asked of an adapter or of a trainer whose
                snapshots stay in memory.
        """
        model = self._residents.get(model_id)
        facts: dict[str, Any] = {"step": model.steps, "user": dict(metadata or {})}
        if model.lora is None:
            if kind == "direct":
                self._send_weights(model, identity, facts)
            else:
                self._publish_weights(model, identity, facts, as_delta=kind == "delta")
            return identity
        if kind == "direct":
            raise RequestError(
                "checkpoint_type must be 'base' for an adapter, got 'direct': an adapter is small, "
                "and is sent by files"
            )
        is_merged = kind == "merged_base"
        tensors = self._merge_adapter(model) if is_merged else self._collect_whole(model)
        self._write_once(lambda: self._publish_adapter(model, identity, kind, tensors, facts))
        return identity

    @_run_alone
    def export(self, model_id: str, folder: Path) -> None:
        """Write the current weights as a Hugging Face folder; an adapter is merged in.

        Raises:
            NotFoundError: there is no such model.
        """
        model = self._residents.get(model_id)
        tensors = (
            self._merge_adapter(model) if model.lora is not None else self._collect_whole(model)
        )
        self._write_once(lambda: export_pretrained(model.loaded, tensors, folder))

    @_run_alone
    def unload(self, model_id: str) -> None:
        """Remove a model and free the memory that only it used.

        Raises:
            NotFoundError: no model has this id.
        """
        self._graph = None
        self._residents.remove(model_id)

    def list_checkpoints(self) -> list[str]:
        """Names of the resumable checkpoints, oldest first."""
        return self._checkpoints.names()

    def read_checkpoint_facts(self, name: str) -> CheckpointFacts:
        """Facts of a checkpoint, named as in ``load_state``; does not wait for a running operation.

        Raises:
            NotFoundError: there is no such checkpoint; the message lists the names.
            RequestError: it is a sampler snapshot.
        """
        folder, own_name = self._find_checkpoint(name)
        return folder.facts(own_name)

    def facts(self, model_id: str) -> ModelFacts:
        """Facts of a model; does not wait for a running operation.

        Raises:
            NotFoundError: no model has this id.
        """
        model = self._residents.get(model_id)
        return ModelFacts(model_id, self.architecture, model.lora_rank)

    def call_on_close(self, callback: Callable[[], None]) -> None:
        """Have ``close`` call this first, so that callers of the engine stop before it does."""
        self._closing.append(callback)

    def close(self) -> None:
        """Free all models after the running operation; later calls raise ClosedError."""
        while self._closing:
            self._closing.pop()()
        with self.lock:
            self.is_closed = True
            self._graph = None
            self._residents.clear()

    def load_base(self) -> LoadedModel:
        """A new copy of the base weights."""
        return self.read_base()

    def read_base(self, shard: Callable[[nn.Module], None] | None = None) -> LoadedModel:
        """Read the base weights; ``shard`` is of ``load_model``."""
        options = self.options
        return load_model(
            self.source,
            name=self.name,
            dtype=options.dtype,
            device=options.device,
            trust_remote_code=options.trust_remote_code,
            shard=shard,
            # A deployment beside it in this process has the same weights.
            share=shard is None and self._snapshots.shares_tensors,
        )

    def wrap_operation(
        self, operation: str, *args: Any, **kwargs: Any
    ) -> AbstractContextManager[None]:
        """A context manager around each operation, given its name and arguments."""
        return contextlib.nullcontext()

    def _make_residents(self, load: Callable[[], LoadedModel]) -> Residents:
        return Residents(load, self.options)

    def _collect_stored(self, model: Resident) -> Mapping[str, Tensor]:
        """A model's tensors for a checkpoint."""
        return model.tensors()

    def _collect_whole(self, model: Resident) -> Mapping[str, Tensor]:
        """A model's tensors for a snapshot: its adapter, or all weights."""
        return model.tensors()

    def _merge_adapter(self, model: Resident) -> Mapping[str, Tensor]:
        """All weights of a LoRA model, with the adapter merged in."""
        return merge_tensors(model.loaded)

    def _write_once(self, write: Callable[[], None]) -> None:
        """Call a function that writes files; where several ranks share a model, on one of them."""
        write()

    def _publish_weights(
        self, model: Resident, identity: str, facts: Mapping[str, Any], *, as_delta: bool
    ) -> None:
        tensors = self._collect_whole(model)
        check_finite(identity, tensors)
        model.published.publish(
            self._snapshots, identity, self.name, tensors, facts, as_delta=as_delta
        )

    def _send_weights(self, model: Resident, identity: str, facts: Mapping[str, Any]) -> None:
        """Offer all weights to whoever loads the snapshot."""
        if not isinstance(self._snapshots, FolderSnapshotStore):
            raise RequestError(
                "checkpoint_type must be 'base' where snapshots stay in memory, got 'direct': "
                "choose placement 'process' or 'ray', without snapshot_store 'ray'"
            )
        own = self._take_pieces(model)
        self._writers.run_on_all(lambda: check_finite(identity, own.tensors))
        if self._sender is None:
            self._sender = self._make_sender()
            self._closing.append(self._sender.close)
        store = PieceStore(self._snapshots, self._writers, own.layout, self._sender)
        model.published.publish(store, identity, self.name, own.tensors, facts, as_delta=False)
        # A delta would change the tensors that are sent.
        model.published.forget()

    def _take_pieces(self, model: Resident) -> OwnPieces:
        """This rank's part of a model's weights, as snapshots have them."""
        return take_pieces(model.tensors(), {}, self._writers)

    def _make_sender(self) -> Sender:
        return Sender("127.0.0.1", None, 0, 1)

    def _publish_adapter(
        self,
        model: Resident,
        identity: str,
        kind: CheckpointType,
        tensors: Mapping[str, Tensor],
        facts: Mapping[str, Any],
    ) -> None:
        check_finite(identity, tensors)
        assert model.lora is not None, "it has an adapter"
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
        leaving = self._residents.find_others(owner) if replace else []
        # Who does not say who it is may be anyone where several clients train.
        is_known = owner is not None or self.options.max_policies == 1
        for policy in self._residents.find_policies():
            if is_known and policy.owner == owner and policy.model_id not in leaving:
                leaving.append(policy.model_id)
        for model_id in leaving:
            logger.warning("trainer %s: model %s is removed for a new policy", self.name, model_id)
            self._residents.remove(model_id)

    def _find_checkpoint(self, path: str) -> tuple[CheckpointFolder, str]:
        """The checkpoint folder of a reference, and the name in it."""
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

    def _prepare_pass(
        self, model: Resident, data: Datums, loss_fn: str, config: LossConfig | None
    ) -> Pass:
        objective, temperature = _parse_objective(loss_fn, config)
        is_replayed = model.optimizer is not None
        limits = replace(self._limits, routing=model.scorer.routing if is_replayed else None)
        self._warn_if_dense(data)
        return self._make_pass(
            scorer=model.scorer,
            objective=objective,
            examples=self._read_datums(data, objective, limits),
            limits=limits,
            token_budget=self.options.micro_batch_tokens,
            temperature=temperature,
        )

    def _read_datums(
        self, data: Datums, objective: BuiltinObjective, limits: Limits
    ) -> list[Example]:
        return read_datums(data, objective, limits)

    def _make_pass(self, **fields: Any) -> Pass:
        return Pass(**fields)

    def _take_graph(self, model_id: str, name: str | None, work: Pass) -> KeptGraph | None:
        """Take the graph that an earlier pass kept for this one."""
        kept_name, kept = self._graph or (None, None)
        if kept is None or kept_name != (model_id, name):
            return None
        self._graph = None
        return kept if kept.fits(work.examples, work.temperature) else None

    def _warn_if_dense(self, data: Datums) -> None:
        """Log once that datums name experts, and that the model has none."""
        if self.supports_router_replay or self._has_warned_dense or isinstance(data, DatumColumns):
            return
        if any(datum.model_input.routing_matrices for datum in data):
            self._has_warned_dense = True
            logger.warning(
                "trainer %s: datums name experts, and the model has none that can be replayed: "
                "routing_matrices are ignored",
                self.name,
            )


def _parse_objective(loss_fn: str, config: LossConfig | None) -> tuple[BuiltinObjective, float]:
    """The loss with its options, and the temperature, which the scorer applies."""
    options: dict[str, Any] = dict(config or {})
    temperature = options.pop("temperature", 1.0)
    is_number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
    if not is_number or not (math.isfinite(temperature) and temperature > 0):
        raise RequestError(
            f"loss_fn_config.temperature must be finite and > 0, got {temperature!r}"
        )
    return builtin_objective(loss_fn, options), float(temperature)


def check_finite(identity: str, tensors: Mapping[str, Tensor]) -> None:
    """Refuse weights that nobody can sample from."""
    if (found := describe_non_finite(tensors)) is not None:
        raise NumericsError(
            f"weights of snapshot {identity!r} must be finite, got {found}: the last optimizer "
            "steps diverged; load an older checkpoint and train on with a smaller learning_rate"
        )


def _make_limits(base: LoadedModel, max_seq_len: int | None) -> Limits:
    if max_seq_len is not None and not 0 < max_seq_len <= base.max_position:
        raise ConfigError(
            f"max_seq_len must be in [1, {base.max_position}], the positions of {base.name!r}, "
            f"got {max_seq_len}"
        )
    return Limits(base.vocab_size, max_seq_len or base.max_position, base.max_position)
