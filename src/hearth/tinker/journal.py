"""A run's operations on disk, so that a restart of the platform or of the trainer loses none.

A folder per run: ``ops/N`` has operation N as it came, ``results/N`` its result, and ``log`` says
line by line which models the trainer has had for the run, and under which number each got which
operation. The lines are written before what they say is done. Each file, and each line of the log,
begins with its own checksum: what is damaged is an error, never another operation.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from hearth.errors import EngineError
from hearth.files import explain_refusals, write_file

_MARK = b"#"
"""Begins what has a checksum."""
_UNMARKED = (b"{", b"J", b"P")
"""What began a file or a line before there were checksums."""
_CHECKSUM_BYTES = 16
"""Of its hexadecimal text."""
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

    Every method raises ``StorageError`` where the disk refuses, and those that read ``EngineError``
    where a file is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write_operation(self, number: int, head: dict[str, Any], body: bytes) -> None:
        """Keep an operation: its JSON head and its body."""
        self._write(self._folder / "ops" / str(number), orjson.dumps(head) + b"\n" + body)

    def read_operation(self, number: int) -> tuple[dict[str, Any], bytes]:
        """An operation's head and body."""
        file = self._folder / "ops" / str(number)
        head, _, body = _unseal(file.read_bytes(), file).partition(b"\n")
        return _parse(head, file), body

    def write_result(self, number: int, result: bytes) -> None:
        """Keep an operation's result."""
        self._write(self._folder / "results" / str(number), result)

    def log(self, **line: Any) -> None:
        """Add a line to the log, whole or not at all."""
        path = self._folder / "log"
        content = memoryview(_seal(orjson.dumps(line)) + b"\n")
        with explain_refusals(path):
            self._folder.mkdir(parents=True, exist_ok=True)
            end = _find_end(path)
            with path.open("ab", buffering=0) as file:
                try:
                    file.truncate(end)
                    while content:
                        content = content[file.write(content) or 0 :]
                except OSError:
                    file.truncate(end)
                    raise

    def read(self) -> History:
        """What the journal says; a last line that is not whole counts as not written."""
        history = History()
        for number in sorted(int(path.name) for path in self._files("ops")):
            head, _ = self.read_operation(number)
            file = self._folder / "results" / str(number)
            result = _unseal(file.read_bytes(), file) if file.exists() else None
            history.operations.append(KeptOperation(number, head, result))
        log = self._folder / "log"
        try:
            lines = log.read_bytes().split(b"\n")[:-1]
        except FileNotFoundError:
            return history
        for text in lines:
            line = _parse(_unseal(text, log), log)
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
        write_file(file, _seal(content), durable=False)


def _find_end(log: Path) -> int:
    """Where the last whole line ends: a kill may have cut the one behind it."""
    if not log.exists():
        return 0
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        if file.read(1) in (b"\n", b""):
            return size
        file.seek(0)
        return file.read().rfind(b"\n") + 1


def _seal(content: bytes) -> bytes:
    return _MARK + _checksum(content) + content


def _unseal(content: bytes, file: Path) -> bytes:
    if content.startswith(_UNMARKED):
        return content
    start = len(_MARK) + _CHECKSUM_BYTES
    if content[:start] != _MARK + _checksum(content[start:]):
        raise EngineError(f"{file} must match its own checksum, got another one: it is damaged")
    return content[start:]


def _checksum(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_CHECKSUM_BYTES // 2).hexdigest().encode()


def _parse(text: bytes, file: Path) -> dict[str, Any]:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise EngineError(f"{file} must be a journal's, got {text[:40]!r}: {error}") from None
