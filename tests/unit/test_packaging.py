"""What the distribution says of itself is what the code needs."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

import hearth

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DISTRIBUTION_OF = {
    "botocore": "s3fs",
    "google": "protobuf",
    "mlflow": "mlflow-skinny",
    "openenv": "openenv-core",
    "opentelemetry": "opentelemetry-sdk",
}
OF_OTHERS = {"vllm", "zmq"}
"""vLLM has an environment of its own, where our plugin is imported."""


def normalize(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def read_names(requirements):
    return {normalize(re.match(r"[\w.-]+", text)[0]) for text in requirements}


def find_imports(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def test_every_package_that_is_imported_is_declared():
    extras = PROJECT["optional-dependencies"]
    declared = read_names(PROJECT["dependencies"]).union(
        *(read_names(needed) for name, needed in extras.items() if name != "dev")
    )
    imported = {
        name.partition(".")[0]
        for file in (ROOT / "src").rglob("*.py")
        for name in find_imports(ast.parse(file.read_text(encoding="utf-8")))
    }
    examples = {file.stem for file in (ROOT / "src/training/examples").rglob("*.py")}
    others = imported - set(sys.stdlib_module_names) - {"hearth", "training"} - OF_OTHERS - examples

    needed = {normalize(DISTRIBUTION_OF.get(name, name)) for name in others}

    assert needed <= declared, f"undeclared: {needed - declared}"


def test_every_bound_has_a_lowest_version():
    assert [text for text in PROJECT["dependencies"] if ">=" not in text] == []


def test_the_version_is_written_once():
    assert "version" in PROJECT["dynamic"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", hearth.__version__)


TEXTS = [
    *(ROOT / "docs").rglob("*.md"),
    *ROOT.glob("*.md"),
    *(ROOT / "src").rglob("*.py"),
    *(ROOT / "src").rglob("*.md"),
]
INSTALL = re.compile(r"hearth[\w-]*\[(\w+)\]")


@pytest.mark.parametrize("name", sorted(set(PROJECT["optional-dependencies"]) - {"dev"}))
def test_every_extra_is_named_somewhere_with_the_name_to_install(name):
    found = [path for path in TEXTS if f"hearth-rl[{name}]" in path.read_text(encoding="utf-8")]
    templates = (ROOT / "src/training/run/trackers.py").read_text(encoding="utf-8")

    assert found or "hearth-rl[{name}]" in templates


def test_no_text_names_an_extra_that_is_not_there():
    named = {
        (match[0], path.name)
        for path in TEXTS
        for match in INSTALL.finditer(path.read_text(encoding="utf-8"))
    }
    allowed = {f"hearth-rl[{name}]" for name in [*PROJECT["optional-dependencies"], "name"]}

    assert {text for text, _ in named} <= allowed, named
