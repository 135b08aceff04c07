from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch

from hearth.trainer.dcp import load_tensors


def test_ranks_save_their_shards_and_one_process_reads_the_whole(tmp_path: Path) -> None:
    script = Path(__file__).with_name("rank_saver.py")

    ran = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, check=False
    )

    assert ran.returncode == 0, ran.stderr
    entries = json.loads((tmp_path / "entries.json").read_text())
    assert len(entries) == 2
    found = load_tensors(tmp_path / "data", entries)
    assert torch.equal(found["weight"], torch.arange(20.0).reshape(5, 4))
    assert found["step"] == 3


def test_ranks_publish_their_parts_and_fail_together(tmp_path: Path) -> None:
    script = Path(__file__).with_name("rank_publisher.py")

    ran = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, check=False
    )

    assert ran.returncode == 0, ran.stderr
