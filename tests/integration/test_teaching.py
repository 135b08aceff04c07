"""What the recipes taught: the kept runs open, and the tables of the results are theirs."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest
from tests.modules import load_module

from hearth.viewer.library import Library

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TAUGHT = BENCHMARKS / "taught"


def test_the_tables_of_the_results_follow_from_the_kept_runs(tmp_path):
    pytest.importorskip("reasoning_gym")
    teaching = load_module(BENCHMARKS / "teaching.py")
    results = (BENCHMARKS / "RESULTS.md").read_text()
    shutil.copytree(TAUGHT, tmp_path / "taught")
    bench = teaching.Bench(tmp_path / "taught", steps=128, sft_rows=32768, seeds=3)

    for part, measure in teaching.PARTS.items():
        for line in measure(bench):
            assert line in results, part


def test_hearth_view_opens_the_kept_runs():
    runs = Library([TAUGHT]).runs()

    assert len(runs) == 2 + 18 + 84 + 18
    recipes = Counter(run.state().recipe for run in runs if run.state().state == "ended")
    assert recipes == {
        "sft_loop": 2,
        "rl_loop": 9,
        "async_rl_loop": 9 + 84,
        "distillation_loop": 18,
    }
