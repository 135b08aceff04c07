"""The operations that a restarted trainer must get again, in order.

These are the operations that have changed the model since its last checkpoint, and those whose
result has not arrived yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import orjson

from hearth.errors import HearthError

JOURNAL_BYTES = 2**28
"""Most bytes of operations kept since the last checkpoint."""

_CHANGING = frozenset({"forward_backward", "optim_step", "load_weights", "load_adapter"})
_LARGE = frozenset({"forward", "forward_backward"})
_STARTS = frozenset({"save_weights", "load_weights"})


@dataclass(eq=False)
class JournalEntry:
    """One operation of a model."""

    name: str
    content: bytes | None
    """Its JSON object, without model and number. None: dropped, since the journal was too large."""
    request_id: str | None = None
    """That of its last submission."""
    has_succeeded: bool | None = None
    """None until its result is known."""
    restarts: int = 0
    """How often the trainer was lost over it."""
    reconnects: int = 0
    """How often only the connection was lost over it."""
    loss: HearthError | None = None
    """The last loss of the trainer over it."""

    @property
    def is_start(self) -> bool:
        """Whether a journal can begin with it: a checkpoint was written or loaded."""
        return bool(self.has_succeeded) and self.name in _STARTS

    def build_body(self, model_id: str, seq_id: int) -> bytes:
        """The body of its request."""
        assert self.content is not None, "an operation that is sent is whole"
        head = orjson.dumps({"model_id": model_id, "seq_id": seq_id})
        return head if self.content == b"{}" else head[:-1] + b"," + self.content[1:]

    def allow_overwrite(self) -> None:
        """Let a save replace what it may have written before."""
        assert self.content is not None, "an operation that is sent is whole"
        self.content = orjson.dumps({**orjson.loads(self.content), "overwrite": True})


class Journal:
    """The operations to send again after loading ``checkpoint``. Adding one takes constant time."""

    def __init__(self, limit: int = JOURNAL_BYTES) -> None:
        self.limit = limit
        self.checkpoint: str | None = None
        """None is the model as it was created."""
        self.size = 0
        """Bytes that are kept."""
        self._kept: dict[JournalEntry, int] = {}
        """Bytes by operation, in the order in which they were sent."""
        self._may_rebase = False
        """Whether a checkpoint follows other operations."""

    @property
    def operations(self) -> list[JournalEntry]:
        """What to send again, in order."""
        return list(self._kept)

    @property
    def is_complete(self) -> bool:
        """Whether sending it again gives the same weights."""
        return all(operation.content is not None for operation in self._kept)

    def add(self, operation: JournalEntry) -> None:
        """Keep an operation that is about to be sent, if it is not kept already."""
        if operation in self._kept:
            return
        self._keep(operation)
        if self.size > self.limit:
            self._shrink()

    def remove(self, operation: JournalEntry) -> None:
        """Drop an operation that was refused."""
        self.size -= self._kept.pop(operation, 0)

    def record_result(self, operation: JournalEntry, *, succeeded: bool) -> None:
        """Note that an operation has its result."""
        operation.has_succeeded = succeeded
        if operation not in self._kept:
            return
        if operation.is_start:  # a save stays until its predecessors' results are known
            self._may_rebase = True
        elif operation.name not in _CHANGING:
            self.remove(operation)
        if self._may_rebase:
            self._rebase()

    def _keep(self, operation: JournalEntry) -> None:
        size = len(operation.content or b"")
        self._kept[operation] = size
        self.size += size

    def _replace(self, operations: Sequence[JournalEntry]) -> None:
        self._kept, self.size = {}, 0
        for operation in operations:
            self._keep(operation)

    def _rebase(self) -> None:
        """Start from the newest checkpoint before which every result is known."""
        operations = self.operations
        answered = list(
            takewhile(lambda operation: operation.has_succeeded is not None, operations)
        )
        starts = [place for place, operation in enumerate(answered) if operation.is_start]
        if not starts:
            return
        place = starts[-1]
        start, later = operations[place], operations[place + 1 :]
        if start.name == "save_weights":
            assert start.content is not None, "only what is large is dropped"
            self.checkpoint = orjson.loads(start.content)["path"]
            self._replace([*self._find_gradient(place), *later])
        else:
            self.checkpoint = None
            self._replace([start, *later])
        self._may_rebase = any(operation.is_start for operation in later)

    def _find_gradient(self, end: int) -> list[JournalEntry]:
        """The accumulated gradient up to a save, which does not hold it."""
        pending: list[JournalEntry] = []
        for operation in self.operations[:end]:
            if operation.name == "forward_backward" or (
                operation.name in _CHANGING and not operation.has_succeeded
            ):
                pending.append(operation)
            elif operation.name in _CHANGING:
                pending.clear()
        return pending

    def _shrink(self) -> None:
        """Drop all data but the newest's; an entry without content marks the gap."""
        operations = self.operations
        for operation in operations[:-1]:
            if operation.name in _LARGE:
                operation.content = None
        ends = [
            place
            for place, operation in enumerate(operations)
            if operation.has_succeeded
            and operation.name in _CHANGING
            and operation.name not in _LARGE
        ]
        if ends:
            last = ends[-1]
            # Nothing before it is in the gradient any more, so it marks the gap for all of them.
            operations[last].content = None
            kept = [operation for operation in operations[:last] if operation.has_succeeded is None]
            operations = [*kept, *operations[last:]]
        self._replace(operations)
