"""What a process of its own has imported; this one has imported everything."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        pytest.param(["hearth.inference.service"], {"torch"}, id="the inference service"),
        pytest.param(
            [f"hearth.wire.{name}" for name in ("tinker", "completions", "tensors", "http")],
            {"torch"},
            id="the wire",
        ),
        pytest.param(["training.rewards"], {"torch", "math_verify"}, id="rewards"),
    ],
)
def test_what_does_not_need_them_never_imports_heavy_libraries(
    modules: list[str], absent: set[str]
) -> None:
    code = f"import sys, {', '.join(modules)}; print({absent} & set(sys.modules))"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "set()"
