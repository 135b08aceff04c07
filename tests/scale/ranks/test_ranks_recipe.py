"""One recipe, another training shape: the numbers stay."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.integration.conftest import config
from tests.integration.rollouts import spread
from tests.integration.runs import read_metrics
from tests.scale.ranks.recipe import TWO_STEPS

from hearth.errors import ConfigError
from training.recipes.rl_loop import main
from training.utils import TrainerConfig

ROOT = Path(__file__).parents[3]


def test_rl_loop_has_the_losses_of_one_process_on_two_ranks(tmp_path):
    main(config(tmp_path / "one", **TWO_STEPS), reward_fn=spread)
    command = [sys.executable, "-m", "tests.scale.ranks.recipe", str(tmp_path / "two"), "2"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]

    first, two = read_metrics(tmp_path / "one"), read_metrics(tmp_path / "two")
    assert len(first) == len(two) == 2
    for left, right in zip(first, two, strict=True):
        assert left.keys() == right.keys()
        compared = [name for name in left if name.startswith(("train/", "rollout/"))]
        assert "train/mean_loss" in compared
        for name in compared:
            assert right[name] == pytest.approx(left[name], rel=1e-4, abs=1e-5), name


def test_ranks_are_refused_where_trainers_are_threads(tmp_path):
    with pytest.raises(ConfigError, match=r"trainer\.ranks must be 1 with placement"):
        main(config(tmp_path, trainer=TrainerConfig(ranks=2)), reward_fn=spread)
