"""Fenced blocks of a page, each with its language and, where it is not run, the reason why not."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

_OPENING = re.compile(r"^ *```(\w*)")
_REASON = re.compile(r"^ *<!-- not run: (.+) -->$")


@dataclass(frozen=True)
class Block:
    """A fenced block; ``line`` is that of its fence, counted from 1."""

    language: str
    text: str
    line: int
    reason: str | None
    """Why it is not run, from a comment in the line before."""


def read_blocks(page: str) -> Iterator[Block]:
    """The fenced blocks of a page, in order; directives (``{name}``) are none."""
    lines = page.splitlines()
    number = 0
    while number < len(lines):
        opening = _OPENING.match(lines[number])
        if opening is None:
            number += 1
            continue
        end = next(
            place for place in range(number + 1, len(lines)) if lines[place].strip() == "```"
        )
        if "{" not in lines[number]:
            before = _REASON.match(lines[number - 1]) if number else None
            text = textwrap.dedent("\n".join(lines[number + 1 : end])) + "\n"
            yield Block(opening[1], text, number + 1, before[1] if before else None)
        number = end + 1
