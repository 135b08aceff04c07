"""One recipe, another training shape: the numbers stay."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest
from tests.scale.ranks.recipe import config, spread

from hearth.errors import ConfigError
from training.recipes.rl_loop import main
from training.utils import TrainerConfig

ROOT = Path(__file__).parents[3]


def records(folder: Path) -> list[dict[str, Any]]:
    """The metrics of each step of a run."""
    lines = map(orjson.loads, (folder / "metrics.jsonl").read_bytes().splitlines())
    return [line for line in lines if line["type"] == "train"]


def test_rl_loop_has_the_losses_of_one_process_on_two_ranks(tmp_path: Path) -> None:
    main(config(tmp_path / "one"), reward_fn=spread)
    command = [sys.executable, "-m", "tests.scale.ranks.recipe", str(tmp_path / "two"), "2"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]

    first, two = records(tmp_path / "one"), records(tmp_path / "two")
    assert len(first) == len(two) == 2
    for left, right in zip(first, two, strict=True):
        assert left.keys() == right.keys()
        compared = [name for name in left if name.startswith(("train/", "rollout/"))]
        assert "train/mean_loss" in compared
        for name in compared:
            assert right[name] == pytest.approx(left[name], rel=1e-4, abs=1e-5), name


def test_ranks_are_refused_where_trainers_are_threads(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.ranks must be 1 with placement"):
        main(config(tmp_path, trainer=TrainerConfig(ranks=2)), reward_fn=spread)
