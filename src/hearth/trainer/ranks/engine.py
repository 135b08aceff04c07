"""A trainer's engine as one of several ranks: all run the same operations in the same order.

Rank 0 is called as any engine is; what it is called with, it tells the others. Each operation ends
with a word from every rank of how it went. An error of ours is everybody's, or the trainer is
broken: so it is after any other exception, for nobody knows what the others are waiting for then.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Callable, Generator, Mapping
from typing import Any

from torch import Tensor

from hearth.errors import HearthError
from hearth.models.loading import LoadedModel, base_tensors
from hearth.models.lora import merged_tensors
from hearth.models.parallel import ShardedModel, gathered
from hearth.trainer.checkpoint import CheckpointFolder, TrainerState
from hearth.trainer.engine import TrainerEngine
from hearth.trainer.options import TrainerWorkerOptions
from hearth.trainer.passes import Pass
from hearth.trainer.ranks.calls import decode, encode
from hearth.trainer.ranks.checkpoints import read_together, write_together
from hearth.trainer.ranks.group import RankGroup
from hearth.trainer.ranks.passes import RankPass
from hearth.trainer.ranks.residents import RankResidents
from hearth.trainer.residents import Resident, Residents, trainable

logger = logging.getLogger(__name__)

_CLOSE = "close"


class RankEngine(TrainerEngine):
    """``TrainerEngine`` on this rank's part of the weights.

    ``on_broken`` hears why the ranks cannot go on together; it is not expected to return. Graphs
    are not kept from one operation to the next: a custom loss costs a second forward pass.

    Raises:
        ConfigError: as ``TrainerEngine``.
    """

    keeps_graphs = False

    def __init__(
        self, options: TrainerWorkerOptions, group: RankGroup, on_broken: Callable[[str], None]
    ) -> None:
        self._group = group
        self._offload = options.offload_optimizer
        self._on_broken = on_broken
        super().__init__(**options.engine_arguments())

    @contextlib.contextmanager
    def running(self, operation: str, *args: Any, **kwargs: Any) -> Generator[None, None, None]:
        """Around an operation: the other ranks are told of it, and how it ends is compared."""
        try:
            if self._group.rank == 0:
                self._group.tell(encode(operation, args, kwargs))
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
        """Run what rank 0 tells, until it closes; for every other rank."""
        while True:
            operation, args, kwargs = decode(self._group.listen())
            if operation == _CLOSE:
                self.close()
                return
            # The same error is rank 0's answer.
            with contextlib.suppress(HearthError):
                getattr(self, operation)(*args, **kwargs)

    def close(self) -> None:
        """Free all models, and let the other ranks end."""
        is_first = not self.is_closed
        super().close()
        if not is_first:
            return
        if self._group.rank == 0:
            with contextlib.suppress(RuntimeError):  # they have ended already
                self._group.tell(encode(_CLOSE, [], {}))
        self._group.leave()

    def _compare(self, operation: str, outcome: str) -> None:
        outcomes = self._group.collect(outcome)
        if len(set(outcomes)) > 1:
            self._on_broken(f"{operation} must end alike on all ranks, got {outcomes}")

    def _make_residents(self, load: Callable[[], LoadedModel]) -> Residents:
        return RankResidents(
            load,
            self.options,
            self._group,
            process=self._group.on_first(lambda: secrets.token_hex(4)),
            offload=self._offload,
        )

    def _make_pass(self, **fields: Any) -> Pass:
        return RankPass(**fields, group=self._group)

    def _stored(self, model: Resident) -> Mapping[str, Tensor]:
        dtypes = _sharded(model).stored
        return {
            name: one.detach().to(dtypes.get(name, one.dtype))
            for name, one in model.tensors().items()
        }

    def _whole(self, model: Resident) -> Mapping[str, Tensor]:
        keep = self._group.rank == 0
        return gathered(model.tensors(), _sharded(model).stored, keep=keep)

    def _merged(self, model: Resident) -> Mapping[str, Tensor]:
        loaded, keep = _sharded(model), self._group.rank == 0
        whole = gathered(base_tensors(loaded.module), loaded.stored, keep=keep)
        return merged_tensors(loaded, whole) if keep else {}

    def _alone(self, write: Callable[[], None]) -> None:
        self._group.on_first(write)

    def _write_checkpoint(self, name: str, state: TrainerState, *, overwrite: bool) -> None:
        write_together(self._group, self._checkpoints, name, state, overwrite=overwrite)

    def _read_checkpoint(
        self, folder: CheckpointFolder, name: str, model: Resident
    ) -> TrainerState:
        return read_together(
            self._group,
            folder,
            name,
            base_model=self.name,
            lora=model.lora,
            weights=model.tensors(),
            parameters=trainable(model.loaded),
        )


def _sharded(model: Resident) -> ShardedModel:
    assert isinstance(model.loaded, ShardedModel), "every resident of a rank is"
    return model.loaded
