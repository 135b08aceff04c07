"""What is exported of each architecture is served by vLLM, with the trainer's numbers."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.architectures import ARCHITECTURES, MIXTURES, TOKENS, write_exports

from hearth.settings import VLLM_PYTHON_VARIABLE

TOLERANCE = 1e-4
"""Nats; the numbers differ by less than 1e-5."""
SCRIPT = Path(__file__).with_name("score.py")
WITHOUT_ADAPTERS = ("gpt2",)
"""Architectures for which vLLM has no adapters. Nor does its build for CPUs for mixtures."""
SERVED_MIXTURES = tuple(kind for kind in MIXTURES if kind != "deepseek_v3")
"""vLLM's build for CPUs packs latent attention only in sizes that no tiny model has."""
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def score(kinds: Sequence[str], folder: Path, *, has_adapters: bool) -> tuple[Any, Any]:
    """What vLLM answers for each architecture, and the exports that it was asked about."""
    exports = {kind: write_exports(kind, folder / kind) for kind in kinds}
    asked = {
        "tokens": TOKENS,
        "answer": str(folder / "answer.json"),
        "has_adapters": has_adapters,
        "exports": {
            kind: {name: str(path) for name, path in made.folders.items()}
            | {"source": str(made.source)}
            for kind, made in exports.items()
        },
    }
    done = subprocess.run(
        [os.environ[VLLM_PYTHON_VARIABLE], str(SCRIPT)],
        input=json.dumps(asked),
        text=True,
        capture_output=True,
        env=os.environ | ENVIRONMENT,
        check=False,
        timeout=540,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "answer.json").read_text()), exports


def assert_logprobs(found: list[float], expected: torch.Tensor) -> None:
    torch.testing.assert_close(torch.tensor(found), expected, rtol=0, atol=TOLERANCE)


def test_weights_and_adapters_of_dense_models_are_served(tmp_path: Path) -> None:
    kinds = [kind for kind in ARCHITECTURES if kind not in (*MIXTURES, *WITHOUT_ADAPTERS)]

    found, exports = score(kinds, tmp_path, has_adapters=True)

    for kind in kinds:
        for name in ("full", "adapter"):
            assert_logprobs(found[kind][name], exports[kind].logprobs[name])


@pytest.mark.parametrize("kinds", [SERVED_MIXTURES, WITHOUT_ADAPTERS], ids=["mixtures", "dense"])
def test_weights_are_served_and_adapters_read_where_vllm_computes_none(
    tmp_path: Path, kinds: Sequence[str]
) -> None:
    found, exports = score(kinds, tmp_path, has_adapters=False)

    for kind in kinds:
        assert_logprobs(found[kind]["full"], exports[kind].logprobs["full"])
        adapter = found[kind]["adapter"]
        assert adapter["layers"] == adapter["written"] != []
        assert (adapter["rank"], adapter["scaling"]) == (8, 2.0)
