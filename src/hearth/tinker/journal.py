"""A run's operations on disk, so that a restart of the platform or of the trainer loses none.

A folder per run: ``ops/N`` has operation N as it came, ``results/N`` its result, and ``log`` says
line by line which models the trainer has had for the run, and under which number each got which
operation. The lines are written before what they say is done.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from hearth.files import explain_refusals, write_file

_KEPT_RESULTS = 256
"""Results of operations from before the last checkpoint that stay, since clients ask again."""


@dataclass(frozen=True)
class Incarnation:
    """A model of the trainer that a run has, or had."""

    model_id: str
    checkpoint: str | None
    """What was loaded into it first."""
    first: int
    """The first operation that it got after that."""


@dataclass(frozen=True)
class KeptOperation:
    """An operation that a journal keeps."""

    number: int
    head: dict[str, Any]
    result: bytes | None


@dataclass
class History:
    """What a journal says."""

    incarnation: Incarnation | None = None
    """The newest."""
    numbers: dict[int, int] = field(default_factory=lambda: {})
    """The trainer's number of each operation that the newest model got."""
    start: int = 1
    """The first operation to send again to a new model, once ``checkpoint`` is loaded."""
    checkpoint: str | None = None
    operations: list[KeptOperation] = field(default_factory=lambda: [])
    """In their order."""


class RunJournal:
    """The journal in ``folder``, which is made when something is first written.

    Every method raises ``StorageError`` where the disk refuses.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write_operation(self, number: int, head: dict[str, Any], body: bytes) -> None:
        """Keep an operation: its JSON head and its body."""
        self._write(self._folder / "ops" / str(number), orjson.dumps(head) + b"\n" + body)

    def read_operation(self, number: int) -> tuple[dict[str, Any], bytes]:
        """An operation's head and body."""
        head, _, body = (self._folder / "ops" / str(number)).read_bytes().partition(b"\n")
        return orjson.loads(head), body

    def write_result(self, number: int, result: bytes) -> None:
        """Keep an operation's result."""
        self._write(self._folder / "results" / str(number), result)

    def log(self, **line: Any) -> None:
        """Add a line to the log."""
        with explain_refusals(self._folder / "log"):
            self._folder.mkdir(parents=True, exist_ok=True)
            with (self._folder / "log").open("ab") as file:
                file.write(orjson.dumps(line) + b"\n")

    def read(self) -> History:
        """What the journal says; a last line that is not whole counts as not written."""
        history = History()
        for number in sorted(int(path.name) for path in self._files("ops")):
            head, _ = self.read_operation(number)
            file = self._folder / "results" / str(number)
            result = file.read_bytes() if file.exists() else None
            history.operations.append(KeptOperation(number, head, result))
        try:
            lines = (self._folder / "log").read_bytes().split(b"\n")[:-1]
        except FileNotFoundError:
            return history
        for line in map(orjson.loads, lines):
            if "model_id" in line:
                history.incarnation = Incarnation(**line)
                history.numbers = {}
            elif "sent" in line:
                history.numbers[line["sent"]] = line["number"]
            else:
                history.start, history.checkpoint = line["start"], line["checkpoint"]
        return history

    def prune(self, start: int) -> None:
        """Drop the bodies of operations before ``start``, and of the older ones everything."""
        for file in self._files("ops"):
            number = int(file.name)
            if number < start - _KEPT_RESULTS:
                file.unlink()
                (self._folder / "results" / file.name).unlink(missing_ok=True)
            elif number < start:
                head, _ = self.read_operation(number)
                self.write_operation(number, head, b"")

    def remove(self) -> None:
        """Drop everything."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _files(self, name: str) -> list[Path]:
        return [path for path in (self._folder / name).glob("*") if path.name.isdigit()]

    @staticmethod
    def _write(file: Path, content: bytes) -> None:
        with explain_refusals(file):
            file.parent.mkdir(parents=True, exist_ok=True)
        write_file(file, content, durable=False)
