"""Each rank reads its part of the weights: the same bits as one process that reads all of them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.unit.architectures import ARCHITECTURES, make_config
from tests.unit.tiny import make_decoder
from tests.unit.trainer.decoders import BODY, make_folders

ROOT = Path(__file__).parents[3]
DECODERS = ("llama, tied", "llama 3's rotation", "a rotation that depends on the length")
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_neox": ("GPTNeoXConfig", {}),
    "olmo2": ("Olmo2Config", {}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 16, "sliding_window": 16}),
    "gpt_oss": ("GptOssConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}),
}
UNEVEN = ("qwen2", "qwen3", "gpt2", "qwen3_moe", "gpt_oss")
WAYS = 3
WITHOUT_EXPERTS = "leaves a rank without any of its 4 experts"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models of many architectures."""
    folder, decoder = tmp_path_factory.mktemp("models"), make_folders(tmp_path_factory)
    for kind in DECODERS:
        shutil.copytree(decoder(kind), folder / kind)
    configs = {kind: make_config(kind) for kind in ARCHITECTURES}
    for kind, (name, options) in MORE.items():
        configs[kind] = getattr(transformers, name)(**BODY | options)
    for kind, config in configs.items():
        torch.manual_seed(0)
        make_decoder(config).save_pretrained(folder / kind)
    return folder


@pytest.mark.parametrize(
    ("ranks", "kinds"),
    [(2, [*ARCHITECTURES, *DECODERS, *MORE]), (3, UNEVEN)],
    ids=["two ranks", "parts of unequal size"],
)
def test_parts_have_the_bits_of_the_whole(models, tmp_path, ranks, kinds):
    for kind in kinds:
        (tmp_path / kind).symlink_to(models / kind)

    ran = subprocess.run(
        [sys.executable, "-m", "tests.scale.ranks.loading", str(tmp_path), str(ranks)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert ran.returncode == 0, ran.stderr[-3000:]
    for rank in range(ranks):
        found = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        assert len(found) == WAYS * len(kinds)
        assert not {way: differences for way, differences in found.items() if differences}
    # Three ranks get 2, 2 and 0 of 4 experts: then all of them read the whole model.
    assert (WITHOUT_EXPERTS in ran.stderr) == (ranks == 3)
    assert ran.stderr.count("each rank reads the whole model") == ran.stderr.count(WITHOUT_EXPERTS)


def test_all_ranks_together_hold_little_more_than_the_weights_while_they_read():
    program = [sys.executable, "benchmarks/ranks.py", "start", "--json"]
    ran = subprocess.run(
        [*program, "--shape", "0.1b", "--ranks", "4"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads(ran.stdout)
    assert found["weights"] > 2**28
    assert found["read"] < 1.3 * found["weights"]
    assert found["kept"] < 1.3 * found["weights"]
