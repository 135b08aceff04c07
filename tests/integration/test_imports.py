"""What a process of its own has imported; this one has imported everything."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hearth.cli.verbs import VERBS


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        pytest.param(["hearth.inference.service"], {"torch"}, id="the inference service"),
        pytest.param(
            [f"hearth.wire.{name}" for name in ("tinker", "completions", "tensors", "http")],
            {"torch"},
            id="the wire",
        ),
        pytest.param(
            ["hearth.records.layout", "hearth.records.timeline"],
            {"pyarrow", "numpy", "torch"},
            id="names and states of records",
        ),
        pytest.param(["hearth.records.reading"], {"torch"}, id="reading records"),
        pytest.param(
            ["hearth.viewer.app", "hearth.viewer.verb"], {"torch", "transformers"}, id="the viewer"
        ),
        pytest.param(["training.rewards"], {"torch", "math_verify"}, id="rewards"),
        pytest.param(
            ["training.recipes.rl_loop"],
            {"transformers", "peft", "starlette", "uvicorn", "sqlalchemy", "ray", "torch._dynamo"},
            id="a recipe, before it runs",
        ),
        pytest.param(["hearth.models.peft_import"], {"bitsandbytes"}, id="peft"),
        pytest.param(
            [target.partition(":")[0] for target, *_ in VERBS.values()],
            {"torch", "tinker", "transformers", "ray", "numpy", "pyarrow", "duckdb", "textual"},
            id="every verb, before it runs",
        ),
    ],
)
def test_what_does_not_need_them_never_imports_heavy_libraries(
    modules: list[str], absent: set[str]
) -> None:
    code = f"import sys, {', '.join(modules)}; print({absent} & set(sys.modules))"

    assert run(code) == "set()"


HELPER = "from tinker_cookbook.supervised.common import datum_from_tokens_weights"


def test_the_documents_helper_of_tinker_cookbook_is_ours_where_that_is_not_installed() -> None:
    code = f"import training.utils; {HELPER} as helper; print(helper.__module__)"

    assert run(code) == "training.samples.datums"


def test_an_installed_tinker_cookbook_is_imported_and_ours_hidden(tmp_path: Path) -> None:
    package = tmp_path / "tinker_cookbook"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "supervised.py").touch()
    code = "import training.utils, tinker_cookbook.supervised as found; print(found.__file__)"

    assert run(code, tmp_path) == str(package / "supervised.py")


def run(code: str, *path: Path) -> str:
    """What a new process prints; it finds modules in ``path``, too."""
    places = [*map(str, path), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, places))}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()
