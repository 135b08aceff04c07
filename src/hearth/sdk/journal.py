"""What must be done again on a trainer that was started anew, in order.

Kept are the operations that have changed the model since its last checkpoint, and those whose
result nobody has seen yet.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import orjson

from hearth.errors import HearthError

JOURNAL_BYTES = 2**28
"""Most bytes of operations kept since the last checkpoint."""

_CHANGING = frozenset({"forward_backward", "optim_step", "load_weights", "load_adapter"})
_LARGE = frozenset({"forward", "forward_backward"})


@dataclass(eq=False)
class Operation:
    """One operation of a model."""

    name: str
    content: bytes | None
    """Its JSON object, without model and number. None: too much was kept, and it was dropped."""
    request_id: str | None = None
    """That of its last submission."""
    has_succeeded: bool | None = None
    """None until its result is known."""
    restarts: int = 0
    """How often the trainer was lost over it."""
    reconnects: int = 0
    """How often only the way to the trainer was."""
    loss: HearthError | None = None
    """How the trainer was lost last."""

    def numbered(self, model_id: str, seq_id: int) -> bytes:
        """The body of its request."""
        assert self.content is not None, "an operation that is sent is whole"
        head = orjson.dumps({"model_id": model_id, "seq_id": seq_id})
        return head if self.content == b"{}" else head[:-1] + b"," + self.content[1:]

    def allow_overwrite(self) -> None:
        """Let a save take the place of what it may have written before."""
        assert self.content is not None, "an operation that is sent is whole"
        self.content = orjson.dumps({**orjson.loads(self.content), "overwrite": True})


@dataclass
class Journal:
    """The operations to be sent again, after ``checkpoint`` was loaded."""

    limit: int = JOURNAL_BYTES
    checkpoint: str | None = None
    """None is the model as it was created."""
    operations: list[Operation] = field(default_factory=lambda: [])

    @property
    def is_complete(self) -> bool:
        """Whether sending it again gives the same weights."""
        return all(one.content is not None for one in self.operations)

    @property
    def size(self) -> int:
        """Bytes that are kept."""
        return sum(len(one.content) for one in self.operations if one.content is not None)

    def add(self, operation: Operation) -> None:
        """Keep an operation that is about to be sent, if it is not kept already."""
        if operation in self.operations:
            return
        self.operations.append(operation)
        if self.size > self.limit:
            self._shrink()

    def remove(self, operation: Operation) -> None:
        """Drop an operation that was refused."""
        if operation in self.operations:
            self.operations.remove(operation)

    def settle(self, operation: Operation, *, succeeded: bool) -> None:
        """An operation has its result."""
        operation.has_succeeded = succeeded
        if operation in self.operations:
            self._rebase()
            self.operations = [
                one
                for one in self.operations
                if one.name in _CHANGING or one.has_succeeded is None
                # A save whose predecessors' results are still on their way.
                or (one.name == "save_weights" and one.has_succeeded)
            ]  # fmt: skip

    def _rebase(self) -> None:
        """Start from the newest checkpoint before which every result is known."""
        settled = 0
        while settled < len(self.operations) and self.operations[settled].has_succeeded is not None:
            settled += 1
        for place in reversed(range(settled)):
            one = self.operations[place]
            if not one.has_succeeded:
                continue
            if one.name == "save_weights" and one.content is not None:
                self.checkpoint = orjson.loads(one.content)["path"]
                self.operations = [*self._gradient(place), *self.operations[place + 1 :]]
                return
            if one.name == "load_weights":
                self.checkpoint = None
                self.operations = self.operations[place:]
                return

    def _gradient(self, end: int) -> list[Operation]:
        """What has accumulated up to a save, which does not hold it."""
        pending: list[Operation] = []
        for one in self.operations[:end]:
            if one.name == "forward_backward" or (one.name in _CHANGING and not one.has_succeeded):
                pending.append(one)
            elif one.name in _CHANGING:
                pending.clear()
        return pending

    def _shrink(self) -> None:
        """Drop all data but the newest's; what is left of it says that something is missing."""
        for one in self.operations[:-1]:
            if one.name in _LARGE:
                one.content = None
        ends = [
            place
            for place, one in enumerate(self.operations)
            if one.has_succeeded and one.name in _CHANGING and one.name not in _LARGE
        ]
        if ends:
            last = ends[-1]
            # Nothing before it is in the gradient any more, so that one says it for all of them.
            self.operations[last].content = None
            kept = [one for one in self.operations[:last] if one.has_succeeded is None]
            self.operations = [*kept, *self.operations[last:]]
