"""Python snippets of a text: fenced blocks of Markdown, or runs of lines that parse in plain text.

A snippet is found by the heading that it stands behind, so that nothing of a text but its headings
is written here.
"""

from __future__ import annotations

import ast
import codeop
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FENCE = re.compile(r"^ *```python[^\n]*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
_SUBSTANCE = (ast.Import, ast.ImportFrom, ast.Assign, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Snippet:
    """Code of a text; ``line`` is where it begins there, counted from 1."""

    text: str
    line: int


@dataclass(frozen=True)
class Document:
    """A text and its snippets, in order."""

    path: Path
    text: str
    snippets: tuple[Snippet, ...]

    @classmethod
    def read(cls, path: Path) -> Document:
        """The document in a file."""
        text = path.read_text(encoding="utf-8")
        found = fenced(text) if "```" in text else runs(text)
        return cls(path, text, tuple(found))

    def after(self, heading: str, number: int = 0) -> Snippet:
        """The first snippet behind a heading, or the one ``number`` further on."""
        lines = [line.strip().strip("#").strip() for line in self.text.splitlines()]
        start = lines.index(heading) + 1
        return [snippet for snippet in self.snippets if snippet.line > start][number]


def execute(code: str | ast.Module, names: dict[str, Any]) -> None:
    """Run a snippet in a namespace, free of the ``from __future__`` imports of who asks for it."""
    exec(compile(code, "<snippet>", "exec", dont_inherit=True), names)


def fenced(text: str) -> Iterator[Snippet]:
    """The fenced Python blocks of Markdown."""
    for found in _FENCE.finditer(text):
        line = text.count("\n", 0, found.start(1)) + 1
        yield Snippet(textwrap.dedent(found.group(1)), line)


def runs(text: str) -> Iterator[Snippet]:
    """The longest runs of lines that are Python, where more stands than names and numbers."""
    lines = text.splitlines()
    start = 0
    while start < len(lines):
        length = _run(lines, start) if lines[start].strip() else 0
        code = "\n".join(lines[start : start + length])
        if length and _has_substance(code):
            yield Snippet(code.rstrip() + "\n", start + 1)
        start += max(1, length)


def _run(lines: list[str], start: int) -> int:
    """How many lines from ``start`` on are Python; 0 where none is."""
    longest = 0
    for end in range(start + 1, len(lines) + 1):
        code = "\n".join(lines[start:end]) + "\n"
        try:
            ast.parse(code)
            longest = end - start
        except SyntaxError:
            if not _may_go_on(code):
                break
    return longest


def _may_go_on(code: str) -> bool:
    try:
        return codeop.compile_command(code, symbol="exec") is None
    except (SyntaxError, ValueError, OverflowError):
        return False


def _has_substance(code: str) -> bool:
    body = ast.parse(code).body
    is_class = any(isinstance(statement, ast.ClassDef) for statement in body)
    return is_class or any(isinstance(statement, _SUBSTANCE) for statement in body)


def one_block(provision: str, loop: str) -> str:
    """Two snippets as one, with all that stands behind the first one's ``with`` moved into it."""
    lines = provision.splitlines()
    block = next(
        statement for statement in ast.parse(provision).body if isinstance(statement, ast.With)
    )
    behind = "\n".join([*lines[block.end_lineno :], loop])
    return "\n".join([*lines[: block.end_lineno], textwrap.indent(behind, "    ")])


def between(text: str, first: str, last: str) -> list[str]:
    """The lines behind the line ``first`` and before the line ``last``."""
    lines = text.splitlines()
    start = lines.index(first) + 1
    return lines[start : lines.index(last, start)]


def reindented(lines: list[str]) -> str:
    """Code whose indentation was lost, with the one that it must have had.

    A class or an import stands at the margin, a method one level in, and what follows a colon one
    level deeper. A loop ends at the first line that uses nothing which its turns bind.
    """
    code: list[str] = []
    level = 0
    loop: tuple[int, set[str]] | None = None
    for statement in _statements(lines):
        if statement.startswith(("@", "class ", "import ", "from ")):
            level, loop = 0, None
        elif statement.startswith("def "):
            level, loop = int("(self" in statement), None
        elif loop is not None and not _used(statement) & loop[1]:
            level, loop = loop[0], None
        code.append(textwrap.indent(statement, "    " * level))
        if statement.startswith("for "):
            loop = (level, _bound(statement + " pass"))
        elif loop is not None:
            loop[1].update(_bound(statement))
        level += statement.endswith(":")
    return "\n".join(code) + "\n"


def _statements(lines: list[str]) -> Iterator[str]:
    """Lines joined until their brackets are closed."""
    parts: list[str] = []
    for line in lines:
        parts.append(line)
        joined = "\n".join(parts)
        if sum(joined.count(bracket) for bracket in "([{") == sum(
            joined.count(bracket) for bracket in ")]}"
        ):
            yield joined
            parts = []


def _names(code: str) -> list[ast.Name]:
    return [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)]


def _used(statement: str) -> set[str]:
    if statement.startswith("return"):
        return set()
    return {name.id for name in _names(statement) if isinstance(name.ctx, ast.Load)}


def _bound(statement: str) -> set[str]:
    """Names that a statement gives a new value; one that it only adds to is older than a turn."""
    tree = ast.parse(statement).body[0]
    if isinstance(tree, ast.AugAssign):
        return set()
    return {name.id for name in _names(statement) if isinstance(name.ctx, ast.Store)}
