"""The diffs of docs/fork_a_recipe.md apply to the recipe as it is, and the forks train."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.integration.conftest import config
from tests.integration.rollouts import spread
from tests.integration.runs import read_metrics
from tests.modules import load_module

from training.data.rows import load_rows
from training.quickstart import TRAIN_ROWS
from training.recipes import rl_loop

PAGE = Path(__file__).parents[2] / "docs" / "fork_a_recipe.md"
DIFFS = re.findall(r"^```diff\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
ROWS = load_rows(str(TRAIN_ROWS), 4)


def fork(folder: Path, diff: str) -> ModuleType:
    """The recipe with a diff applied, imported from a copy."""
    shutil.copy(Path(rl_loop.__file__), folder)
    subprocess.run(["git", "apply", "-"], input=diff.encode(), cwd=folder, check=True)
    return load_module(folder / "rl_loop.py", f"fork_of_rl_loop_{DIFFS.index(diff)}")


def reward(text: str, row: Any) -> float:
    """Different for each completion; near 1 for the first row."""
    return 0.9 + 0.1 * spread(text, row) if row == ROWS[0] else 0.1 * spread(text, row)


@pytest.mark.parametrize("number", range(3), ids=["advantage", "loss", "filter"])
def test_each_diff_applies_and_its_recipe_trains_two_steps(tmp_path, number):
    module = fork(tmp_path, DIFFS[number])
    run = tmp_path / "run"

    module.main(module.Config(**vars(config(run))), ROWS, reward_fn=reward)

    records = read_metrics(run, own=["train/sampled_entropy_sum"])
    assert [record["step"] for record in records] == [1, 2]
    assert len(DIFFS) == 3
    if number == 0:
        assert module.leave_one_out([1.0, 0.0, 0.0]) == [1.0, -0.5, -0.5]
    elif number == 1:
        assert all(record["train/sampled_entropy_sum"] > 0 for record in records)
    else:
        assert sum(record.get("rollout/dropped/too_easy", 0.0) for record in records) == 1


def test_a_diff_against_another_file_is_refused(tmp_path):
    diff = DIFFS[0].replace("group_advantages", "other_advantages")

    with pytest.raises(subprocess.CalledProcessError):
        fork(tmp_path, diff)
