from __future__ import annotations

import textwrap
from pathlib import Path

from tests.documents import extraction


def dedented(text: str) -> str:
    return textwrap.dedent(text).lstrip("\n")


def test_code_is_told_from_the_prose_around_it():
    text = dedented("""
        Overview
        Call it like this:
        import os

        # A comment.
        value = max(
            1,
            2,
        )
        Then go on.
        def double(x):
            return 2 * x
        And that was it.
        """)

    found = list(extraction.runs(text))

    assert [block.line for block in found] == [3, 11]
    assert found[0].text.startswith("import os\n")
    assert found[0].text.endswith("    2,\n)\n")
    assert found[1].text == "def double(x):\n    return 2 * x\n"


def test_only_fenced_python_is_taken_from_markdown():
    text = "# A\n```sh\nls\n```\n## B\n  ```python title\n  x = 1\n  ```\n"

    document = extraction.Document(Path("d.md"), text, tuple(extraction.fenced(text)))

    assert [snippet.text for snippet in document.snippets] == ["x = 1\n"]
    assert document.after("B").line == 7


def test_lost_indentation_is_found_again():
    lines = dedented("""
        @dataclass
        class Sums:
        total: int = 0
        def add(self, rows):
        self.count = 0
        for row in rows:
        values = [
        one for one in row
        ]
        self.total += sum(values)
        mean = self.total / len(rows)
        return mean
        def clear(self):
        self.total = 0
        """).splitlines()
    names: dict = {}

    code = extraction.reindented(lines)
    extraction.execute("from dataclasses import dataclass\n" + code, names)

    sums = names["Sums"](5)
    assert sums.add([[1, 2], [4]]) == 6
    sums.clear()
    assert sums.total == 0
