"""Files of JSON lines that other processes append to, read on from where the last look ended."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import orjson

LONGEST_LINE = 32 * 2**20
"""Bytes of a line; a longer one is skipped, so that memory is bounded."""
_BLOCK = 4 * 2**20
_EXACT = 2**53
"""JavaScript has not every whole number from here on."""


class Line(NamedTuple):
    """A JSON object, and where its line begins in the file."""

    place: int
    content: dict[str, Any]


class GrowingFile:
    """The lines of one file. What is no JSON object, or has no end yet, is no line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.skipped = 0
        """Lines that were no JSON objects."""
        self._file_id: tuple[int, int] | None = None
        self._offset = 0

    def read_new(self) -> tuple[bool, list[Line]]:
        """The lines since the last call, and whether the file was replaced, so that those before
        do not count any more. A file that cannot be read has none."""
        try:
            with self.path.open("rb") as file:
                return self._read(file)
        except OSError:
            is_gone = self._file_id is not None
            self._file_id, self._offset = None, 0
            return is_gone, []

    def _read(self, file: BinaryIO) -> tuple[bool, list[Line]]:
        status = os.fstat(file.fileno())
        file_id = (status.st_dev, status.st_ino)
        is_new = self._file_id is not None and (
            file_id != self._file_id or status.st_size < self._offset
        )
        if is_new:
            self._offset, self.skipped = 0, 0
        self._file_id = file_id
        lines: list[Line] = []
        file.seek(self._offset)
        pending = b""
        while block := file.read(_BLOCK):
            pending += block
            complete, newline, pending = pending.rpartition(b"\n")
            if newline:
                lines += self._parse_all(complete, self._offset)
                self._offset += len(complete) + 1
            elif len(pending) > LONGEST_LINE:
                self._offset += self._skip_line(file, len(pending))
                file.seek(self._offset)
                pending = b""
        return is_new, lines

    def _skip_line(self, file: BinaryIO, length: int) -> int:
        """Bytes of a line that is too long; those that there are, where it has no end yet."""
        self.skipped += 1
        while block := file.read(_BLOCK):
            end = block.find(b"\n")
            if end >= 0:
                return length + end + 1
            length += len(block)
        return length

    def _parse_all(self, content: bytes, place: int) -> list[Line]:
        lines: list[Line] = []
        for text in content.split(b"\n"):
            parsed = parse_object(text)
            if parsed is not None:
                lines.append(Line(place, parsed))
            elif text.strip():
                self.skipped += 1
            place += len(text) + 1
        return lines


def parse_object(text: bytes) -> dict[str, Any] | None:
    """The JSON object of a line; None where it is none. NaN and infinities are numbers here."""
    try:
        content = orjson.loads(text)
    except orjson.JSONDecodeError:
        try:
            content = json.loads(text)
            orjson.dumps(content)  # or it could not be answered: half a surrogate pair
        except (ValueError, TypeError, RecursionError):
            return None
    return content if isinstance(content, dict) else None


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object of a whole file; {} where there is none."""
    try:
        if path.stat().st_size > LONGEST_LINE:
            return {}
        return parse_object(path.read_bytes()) or {}
    except OSError:
        return {}


def keep_exact(value: Any) -> Any:
    """The value with whole numbers as texts where JavaScript has no such number."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= _EXACT:
        return str(value)
    if isinstance(value, list):
        return [keep_exact(entry) for entry in value]
    if isinstance(value, dict):
        return {name: keep_exact(entry) for name, entry in value.items()}
    return value
