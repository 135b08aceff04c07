"""A trainer's engine as one of several ranks: all run the same operations in the same order.

Rank 0 is called like any engine, and sends the call to the other ranks. It alone reads all datums
of a pass; every other rank is sent those that it computes. At the end of an operation
all ranks exchange its outcome. A HearthError must be raised on all ranks; the trainer ends if it is
not, and after any other exception, since the other ranks may then wait for a collective forever.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hearth.errors import HearthError
from hearth.losses import BuiltinObjective
from hearth.models.loading import DTYPES, LoadedModel, base_tensors
from hearth.models.lora import merge_tensors
from hearth.models.parallel import ShardedModel, Sharding, gather_tensors, return_freed_memory
from hearth.planning.gradients import TRAINED_BYTES, fits_one_machine
from hearth.sync.direct import Sender
from hearth.sync.store import FolderSnapshotStore
from hearth.trainer.checkpoint import (
    DATA,
    CheckpointFolder,
    TrainerState,
    parse_facts,
    write_manifest,
)
from hearth.trainer.datums import Datums
from hearth.trainer.dcp import describe_tensors, load_into, save_tensors
from hearth.trainer.engine import LossConfig, TrainerEngine, check_finite
from hearth.trainer.options import TrainerWorkerOptions
from hearth.trainer.packing import Example, Limits
from hearth.trainer.passes import Pass
from hearth.trainer.ranks.group import RankGroup, decode, encode
from hearth.trainer.ranks.passes import RankPass
from hearth.trainer.ranks.publishing import OwnPieces, PieceStore, take_pieces
from hearth.trainer.ranks.residents import RankResidents, require_sharded
from hearth.trainer.residents import Resident, Residents, find_trainable
from hearth.wire.tinker import DatumColumns

logger = logging.getLogger(__name__)

_CLOSE = "close"
_PASSES = ("forward", "forward_backward")
"""Operations on datums."""


class RankEngine(TrainerEngine):
    """``TrainerEngine`` on this rank's part of the weights; all ranks make theirs at the same time.

    ``on_broken`` is called with the reason why the ranks cannot continue; it need not return.
    ``memory`` are the bytes that each rank may take; None takes what its device has.
    Graphs are not kept between operations: a custom loss costs a second forward pass.

    Raises:
        ConfigError: as ``TrainerEngine``.
    """

    keeps_graphs = False

    def __init__(
        self,
        options: TrainerWorkerOptions,
        group: RankGroup,
        on_broken: Callable[[str], None],
        *,
        memory: int | None = None,
    ) -> None:
        self._writers = self._group = group
        self._memory = group.find_memory() if memory is None else memory
        self._offload = options.offload_optimizer
        self._on_broken = on_broken
        with return_freed_memory():
            super().__init__(**options.engine_arguments())

    @contextlib.contextmanager
    def wrap_operation(
        self, operation: str, *args: Any, **kwargs: Any
    ) -> Generator[None, None, None]:
        """Send an operation to the other ranks before it runs; compare its outcomes after it."""
        try:
            if self._group.rank == 0:
                self._group.broadcast(encode(operation, *_leave_data_out(operation, args, kwargs)))
            try:
                yield
            except HearthError as error:
                self._compare(operation, type(error).__name__)
                raise
            self._compare(operation, "done")
        except HearthError:
            raise
        except Exception as error:
            self._on_broken(f"{operation} failed: {type(error).__name__}: {error}")
            raise

    def follow(self) -> None:
        """Run the operations that rank 0 sends, until it closes; for every other rank."""
        while True:
            operation, args, kwargs = decode(self._group.receive())
            if operation == _CLOSE:
                self.close()
                return
            # Rank 0 raises the same error to its caller.
            with contextlib.suppress(HearthError):
                getattr(self, operation)(*args, **kwargs)

    def close(self) -> None:
        """Free all models, and have the other ranks end."""
        is_first = not self.is_closed
        super().close()
        if not is_first:
            return
        if self._group.rank == 0:
            with contextlib.suppress(RuntimeError):  # they have ended already
                self._group.broadcast(encode(_CLOSE, [], {}))
        self._group.leave()

    def _compare(self, operation: str, outcome: str) -> None:
        outcomes = self._group.gather(outcome)
        if len(set(outcomes)) > 1:
            self._on_broken(f"{operation} must have the same outcome on all ranks, got {outcomes}")

    def load_base(self) -> ShardedModel:
        """This rank's part of the base weights, frozen; all ranks load theirs at the same time."""
        return self._load_parts(is_trained=False)

    def _load_parts(self, *, is_trained: bool) -> ShardedModel:
        sharding = Sharding(
            lambda parameters: self._choose_mesh(parameters, is_trained=is_trained),
            self._group.device,
            DTYPES[self.options.dtype],
            is_trained=is_trained,
            offload=self._offload,
        )
        loaded = sharding.load(self.read_base)
        # Ranks may read at different speeds, and the next collective has a request's time limit.
        self._group.meet()
        return loaded

    def _choose_mesh(self, parameters: int, *, is_trained: bool) -> DeviceMesh:
        """All ranks, or where the ranks of one machine have room for the model, those of each."""
        mesh = self._group.machines_mesh
        if mesh is None or self._offload:
            return self._group.mesh
        size = TRAINED_BYTES if is_trained else DTYPES[self.options.dtype].itemsize
        machines, ranks = mesh.shape
        if not fits_one_machine(parameters, ranks=ranks, bytes_each=size, memory=self._memory):
            return self._group.mesh
        logger.info(
            "%s weights are divided over the %d ranks of each of %d machines, which hold copies",
            "trained" if is_trained else "frozen",
            ranks,
            machines,
        )
        return mesh

    def _make_residents(self, load: Callable[[], LoadedModel]) -> Residents:
        return RankResidents(
            load,
            lambda: self._load_parts(is_trained=True),
            self.options,
            self._group,
            memory=self._memory,
            offload=self._offload,
        )

    def _prepare_pass(
        self, model: Resident, data: Datums, loss_fn: str, config: LossConfig | None
    ) -> Pass:
        """On rank 0 the whole pass, on every other one that of the datums that it is sent."""
        group, prepare = self._group, super()._prepare_pass
        made: list[Pass] = []
        # What is wrong with a datum is raised on all ranks.
        group.run_on_first(lambda: made.append(prepare(model, data, loss_fn, config)))
        if group.rank:
            _, (own,), _ = decode(group.receive_from(0))
            return prepare(model, own, loss_fn, config)
        (work,) = made
        assert isinstance(work, RankPass), "_make_pass makes it"
        for rank, own in enumerate(_cut(data, work.shares)):
            if rank:
                group.send(rank, encode("take", [own], {}))
        return work

    def _read_datums(
        self, data: Datums, objective: BuiltinObjective, limits: Limits
    ) -> list[Example]:
        has_none = self._group.rank and isinstance(data, Sequence) and not data
        return [] if has_none else super()._read_datums(data, objective, limits)

    def _make_pass(self, **fields: Any) -> Pass:
        return RankPass(**fields, group=self._group)

    def _collect_stored(self, model: Resident) -> Mapping[str, Tensor]:
        dtypes = require_sharded(model.loaded).stored
        return {
            name: tensor.detach().to(dtypes.get(name, tensor.dtype))
            for name, tensor in model.tensors().items()
        }

    def _collect_whole(self, model: Resident) -> Mapping[str, Tensor]:
        keep = self._group.rank == 0
        return gather_tensors(model.tensors(), require_sharded(model.loaded).stored, keep=keep)

    def _merge_adapter(self, model: Resident) -> Mapping[str, Tensor]:
        loaded, keep = require_sharded(model.loaded), self._group.rank == 0
        whole = gather_tensors(base_tensors(loaded.module), loaded.stored, keep=keep)
        return merge_tensors(loaded, whole) if keep else {}

    def _publish_weights(
        self, model: Resident, identity: str, facts: Mapping[str, Any], *, as_delta: bool
    ) -> None:
        group, snapshots = self._group, self._snapshots
        assert isinstance(snapshots, FolderSnapshotStore), "ranks are given a folder of buckets"
        own = self._take_pieces(model)
        group.run_on_all(lambda: check_finite(identity, own.tensors))
        store = PieceStore(snapshots, group, own.layout)
        can_follow = as_delta and model.published.can_follow(store, identity, own.tensors)
        model.published.publish(
            store,
            identity,
            self.name,
            own.tensors,
            facts,
            # What its own deltas sum up to differs by rank.
            as_delta=all(group.gather(can_follow)),
        )

    def _take_pieces(self, model: Resident) -> OwnPieces:
        return take_pieces(model.tensors(), require_sharded(model.loaded).stored, self._group)

    def _make_sender(self) -> Sender:
        group = self._group
        first = Sender(group.address, None, 0, group.ranks) if group.rank == 0 else None
        host = group.run_on_first(lambda: group.address)
        port = group.run_on_first(lambda: first.port if first else 0)
        return first or Sender(host, port, group.rank, group.ranks)

    def _write_once(self, write: Callable[[], None]) -> None:
        self._group.run_on_first(write)

    def _write_checkpoint(self, name: str, state: TrainerState, *, overwrite: bool) -> None:
        """Write a checkpoint, each rank its own parts of the tensors into the same folder."""
        group = self._group
        with contextlib.ExitStack() as stack:
            place = group.run_on_first(
                lambda: str(
                    stack.enter_context(
                        self._checkpoints.draft(name, state.facts, overwrite=overwrite)
                    )
                )
            )
            draft = Path(place)
            parts = group.gather(save_tensors(draft / DATA, state.tensors()))

            def finish() -> None:
                files = {file: entry for part in parts for file, entry in part.items()}
                write_manifest(draft, state, files)
                stack.close()

            group.run_on_first(finish)

    def _read_checkpoint(
        self, folder: CheckpointFolder, name: str, model: Resident
    ) -> TrainerState:
        """A checkpoint of any number of ranks; of sharded tensors it has this rank's part."""

        def verify() -> tuple[str, dict[str, Any], Mapping[str, str]]:
            data, facts, rng = folder.verify(name, base_model=self.name, lora=model.lora)
            return str(data), asdict(facts), rng

        place, manifest, rng = self._group.run_on_first(verify)
        data, facts = Path(place), parse_facts(manifest)
        weights = {f"weights/{name}": tensor for name, tensor in model.tensors().items()}
        parameters = find_trainable(model.loaded)
        tensors: dict[str, Tensor] = {}
        for key, stored in describe_tensors(data).items():
            own = weights.get(key, parameters.get(key.split("/", 2)[-1]))  # optimizer/KIND/NAME
            tensors[key] = _make_target(stored, own)
        load_into(data, tensors)
        return TrainerState.from_tensors(facts, tensors, rng)


def _leave_data_out(
    operation: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of an operation without a pass's datums, of which each rank gets its own."""
    left, named = list(args), dict(kwargs)
    if operation in _PASSES and len(left) > 1:
        left[1] = []
    elif operation in _PASSES:
        named["data"] = []
    return left, named


def _cut(data: Datums, shares: Sequence[Sequence[int]]) -> list[Datums]:
    """Each rank's datums; an empty list where it has none."""
    if isinstance(data, DatumColumns):
        cut = data.cut(shares)
        return [own if places else [] for own, places in zip(cut, shares, strict=True)]
    return [[data[place] for place in places] for places in shares]


def _make_target(stored: Tensor, own: Tensor | None) -> Tensor:
    """An empty tensor to load into: sharded as the model's own, or whole on the CPU."""
    if own is None or own.shape != stored.shape:
        return torch.empty_like(stored, device="cpu")
    return torch.empty_like(own.detach(), dtype=stored.dtype)
