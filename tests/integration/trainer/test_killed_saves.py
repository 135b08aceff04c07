from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_a_save_killed_at_any_moment_leaves_a_complete_checkpoint(tmp_path: Path) -> None:
    script = Path(__file__).with_name("saver.py")
    root = tmp_path / "checkpoints"

    ran = subprocess.run(
        [sys.executable, str(script), str(root), "20"], capture_output=True, text=True, check=False
    )

    assert ran.returncode == 0, ran.stderr
    rounds = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(rounds) == 20
    # What had returned is there, or the one that was being written.
    assert all(0 <= counts["found"] - counts["returned"] <= 1 for counts in rounds)
    # Kills did interrupt saves, and the next save has swept what they left.
    assert any(counts["left"] for counts in rounds)
    assert rounds[-1]["found"] >= 5
    assert [path.name for path in root.iterdir()] == ["last"]
