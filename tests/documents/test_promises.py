"""Every promise of the documents, by its row in the semantics reference, has a test that exists."""

from __future__ import annotations

import ast
import functools
import os
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
DOCUMENTS = Path(os.environ.get("HEARTH_DOCUMENTS", REPOSITORY.parent / "shared" / "documents"))
REFERENCE = DOCUMENTS.parent / "reference" / "recipe_semantics.md"
PROMISES = Path(__file__).with_name("promises.toml")
ROWS = [f"T{number:03}" for number in range(1, 201)]


@functools.cache
def functions_of(path: Path) -> frozenset[str]:
    """The test functions of a file, which is not imported."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    body = ast.parse(path.read_text(encoding="utf-8")).body
    names = (one.name for one in body if isinstance(one, kinds))
    return frozenset(name for name in names if name.startswith("test_"))


def fault_of(node: str) -> str | None:
    """What is wrong with a ``file::test``; None where the test is there."""
    file, _, name = node.partition("::")
    path = REPOSITORY / file
    if not re.fullmatch(r"tests/[\w/]+/test_\w+\.py", file) or not path.is_file():
        return f"{file!r} must be a test file of the repository"
    if name not in functions_of(path):
        return f"{name!r} must be a test function of {file}"
    return None


def faults_of(entry: dict[str, Any]) -> list[str]:
    """What is wrong with a row's entry."""
    tests = entry.get("tests", [])
    found = [fault for node in tests if (fault := fault_of(node)) is not None]
    if not tests or len(set(tests)) < len(tests):
        found.append(f"tests must name at least one test, each once, got {tests}")
    if entry.keys() - {"tests", "note"} or not entry.get("note", "a note"):
        found.append(f"an entry must have tests and may have a note, got {entry}")
    return found


@pytest.fixture(scope="module")
def promises() -> dict[str, dict[str, Any]]:
    return tomllib.loads(PROMISES.read_text(encoding="utf-8"))


def test_every_row_has_an_entry_and_no_other_has(promises):
    assert list(promises) == ROWS


@pytest.mark.parametrize("row", ROWS)
def test_the_tests_of_a_row_exist(promises, row):
    assert faults_of(promises[row]) == []


def test_the_entries_are_the_rows_of_the_reference(promises):
    if not REFERENCE.exists():
        pytest.skip(f"needs {REFERENCE}, which is not part of the repository")
    section = re.search(r"^## 9\. .*?(?=^## 10\. )", REFERENCE.read_text(), re.M | re.S)
    assert section is not None
    rows = re.findall(r"^\| (T\d+) \|", section.group(), re.M)

    assert len(rows) == 200
    assert set(rows) == set(promises)


@pytest.mark.parametrize(
    ("entry", "fault"),
    [
        ({"tests": ["tests/documents/test_gone.py::test_x"]}, "must be a test file"),
        ({"tests": ["tests/documents/conftest.py::document"]}, "must be a test file"),
        ({"tests": ["tests/documents/test_promises.py::test_gone"]}, "must be a test function"),
        ({"tests": ["tests/documents/test_promises.py::faults_of"]}, "must be a test function"),
        ({"tests": ["tests/documents/test_promises.py"]}, "'' must be a test function"),
        ({"tests": []}, "at least one test"),
        ({"note": "nothing tests it"}, "at least one test"),
        (
            {"tests": ["tests/documents/test_promises.py::test_the_tests_of_a_row_exist"] * 2},
            "once",
        ),
        (
            {"tests": ["tests/documents/test_promises.py::test_the_tests_of_a_row_exist"], "x": 1},
            "may have a note",
        ),
    ],
)
def test_an_entry_that_proves_nothing_is_found(entry, fault):
    (found,) = faults_of(entry)

    assert fault in found
