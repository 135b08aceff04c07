"""Every promise of the documents, by its row in the semantics reference, has a test that exists."""

from __future__ import annotations

import ast
import functools
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
DOCUMENTS = Path(os.environ.get("HEARTH_DOCUMENTS", REPOSITORY.parent / "shared" / "documents"))
REFERENCE = DOCUMENTS.parent / "reference" / "recipe_semantics.md"
PROMISES = Path(__file__).with_name("promises.toml")
ROWS = [f"T{number:03}" for number in range(1, 201)]
NEEDS_DOCUMENTS = "tests/documents/test_document_"
CONDITIONAL = {"skip", "skipif", "xfail", "gpu", "network"}
"""Marks of tests that do not run, or may fail, somewhere."""


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """A file's syntax; no test is imported, which would take seconds."""
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def functions_of(path: Path) -> Mapping[str, frozenset[str]]:
    """The test functions of a file, and the marks of each."""
    body = tree_of(path).body
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    everywhere = {
        name
        for entry in body
        if isinstance(entry, ast.Assign) and ast.unparse(entry.targets[0]) == "pytestmark"
        for name in marks_in(entry.value)
    }
    return {
        entry.name: frozenset(everywhere.union(*map(marks_in, entry.decorator_list)))
        for entry in body
        if isinstance(entry, kinds) and entry.name.startswith("test_")
    }


@functools.cache
def texts_of(path: Path) -> frozenset[str]:
    """Every text that a file holds, and so the id of every case that is given one."""
    nodes = ast.walk(tree_of(path))
    constants = (node.value for node in nodes if isinstance(node, ast.Constant))
    return frozenset(constant for constant in constants if isinstance(constant, str))


def marks_in(node: ast.AST) -> set[str]:
    """The names behind ``pytest.mark.``."""
    named = (node for node in ast.walk(node) if isinstance(node, ast.Attribute))
    return {value.attr for value in named if ast.unparse(value.value) == "pytest.mark"}


def fault_of(node: str) -> str | None:
    """What is wrong with a ``file::test`` or ``file::test[id]``; None where the test is there."""
    file, _, name = node.partition("::")
    path = REPOSITORY / file
    if not re.fullmatch(r"tests/[\w/]+/test_\w+\.py", file) or not path.is_file():
        return f"{file!r} must be a test file of the repository"
    function, _, case = name.removesuffix("]").partition("[")
    marks = functions_of(path).get(function)
    if marks is None:
        return f"{function!r} must be a test function of {file}"
    if marks & CONDITIONAL:
        return f"{function!r} must run everywhere, got the marks {sorted(marks & CONDITIONAL)}"
    if case and ("parametrize" not in marks or case not in texts_of(path)):
        return f"{case!r} must be the id of a case of {function!r}"
    return None


def faults_of(entry: dict[str, Any]) -> list[str]:
    """What is wrong with a row's entry."""
    tests = entry.get("tests", [])
    found = [fault for node in tests if (fault := fault_of(node)) is not None]
    if not tests or len(set(tests)) < len(tests):
        found.append(f"tests must name at least one test, each once, got {tests}")
    elif all(node.startswith(NEEDS_DOCUMENTS) for node in tests):
        found.append(f"tests must name one that needs no documents, got {tests}")
    if entry.keys() - {"tests", "note"} or not entry.get("note", "a note"):
        found.append(f"an entry must have tests and may have a note, got {entry}")
    return found


@pytest.fixture(scope="module")
def promises() -> dict[str, dict[str, Any]]:
    return tomllib.loads(PROMISES.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def reference() -> dict[str, str]:
    """The rows of the reference, and what each says of the documents that it stands in."""
    if not REFERENCE.exists():
        pytest.skip(f"needs {REFERENCE}, which is not part of the repository")
    section = re.search(r"^## 9\. .*?(?=^## 10\. )", REFERENCE.read_text(), re.M | re.S)
    assert section is not None
    rows = re.findall(r"^\| (T\d+) \|([^|]*)\|", section.group(), re.M)
    assert len(rows) == len(dict(rows)) == 200
    return dict(rows)


def test_every_row_has_an_entry_and_no_other_has(promises):
    assert list(promises) == ROWS


@pytest.mark.parametrize("row", ROWS)
def test_the_tests_of_a_row_exist(promises, row):
    assert faults_of(promises[row]) == []


def test_the_entries_are_the_rows_of_the_reference(promises, reference):
    assert set(reference) == set(promises)


def test_rows_on_which_the_documents_disagree_say_what_was_decided(promises, reference):
    disputed = {row for row, documents in reference.items() if "!" in documents}

    assert len(disputed) == 15
    assert [row for row in sorted(disputed) if "note" not in promises[row]] == []


HERE = "tests/documents/test_promises.py"


@pytest.mark.parametrize(
    ("entry", "fault"),
    [
        ({"tests": ["tests/documents/test_gone.py::test_x"]}, "must be a test file"),
        ({"tests": ["tests/documents/conftest.py::document"]}, "must be a test file"),
        ({"tests": [f"{HERE}::test_gone"]}, "must be a test function"),
        ({"tests": [f"{HERE}::test_gone[a case]"]}, "must be a test function"),
        (
            {"tests": [f"{HERE}::test_the_marks_of_a_test_are_seen[lost]"]},
            "must be the id of a case",
        ),
        (
            {"tests": [f"{HERE}::test_every_row_has_an_entry_and_no_other_has[skip]"]},
            "must be the id",
        ),
        ({"tests": [f"{HERE}::faults_of"]}, "must be a test function"),
        ({"tests": [HERE]}, "'' must be a test function"),
        ({"tests": []}, "at least one test"),
        ({"note": "nothing tests it"}, "at least one test"),
        ({"tests": [f"{HERE}::test_the_tests_of_a_row_exist"] * 2}, "once"),
        ({"tests": [f"{HERE}::test_the_tests_of_a_row_exist"], "x": 1}, "may have a note"),
        ({"tests": [f"{HERE}::test_the_tests_of_a_row_exist"], "note": ""}, "may have a note"),
        ({"tests": [f"{NEEDS_DOCUMENTS}000.py::test_it_has_no_code"]}, "needs no documents"),
    ],
)
def test_an_entry_that_proves_nothing_is_found(entry, fault):
    (found,) = faults_of(entry)

    assert fault in found


def test_a_case_is_found_by_its_id():
    assert fault_of(f"{HERE}::test_the_marks_of_a_test_are_seen[module]") is None


@pytest.mark.parametrize(
    ("content", "marks"),
    [
        ("@pytest.mark.skip\ndef test_x(): ...", {"skip"}),
        ("@pytest.mark.skipif(True, reason='x')\nasync def test_x(): ...", {"skipif"}),
        ("@pytest.mark.slow\n@pytest.mark.gpu\ndef test_x(): ...", {"slow", "gpu"}),
        ("pytestmark = [pytest.mark.network]\ndef test_x(): ...", {"network"}),
        ("@pytest.mark.parametrize('x', [1])\ndef test_x(x): ...", {"parametrize"}),
    ],
    ids=["skip", "skipif", "gpu", "module", "none"],
)
def test_the_marks_of_a_test_are_seen(tmp_path, content, marks):
    path = tmp_path / "test_marked.py"
    path.write_text(content)

    assert functions_of(path) == {"test_x": marks}
