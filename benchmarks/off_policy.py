"""Each policy loss when samples are old: held-out accuracy after equal samples at O = 0, 1 and 4.

``async_rl_loop`` trains the shipped model on the rows of ``single_turn_token_in``. All runs have
the same rows in the same order, as many samples, and each loss's own defaults; only ``policy_loss``
and ``max_head_offpolicy_versions`` differ. Held-out rows are answered twice each after the last
step. *age* is the mean number of optimizer steps between sampling and training.

    python benchmarks/off_policy.py [--steps 32] [--seeds 2] [--learning-rate 5e-4]
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import orjson
import torch

from hearth.losses.catalog import POLICY_LOSSES
from training.examples.rl.single_turn_token_in.rollout import make_rollout_fn
from training.examples.rl.single_turn_token_in.train import default_config, tokenized_rows
from training.quickstart import HELDOUT_ROWS
from training.recipes.async_rl_loop import Config, main

O_VALUES = (0, 1, 4)
WARM_UP = 5
"""Steps left out of ages: the queue is filling."""


def measure(config: Config) -> tuple[float, float]:
    """Held-out accuracy after the run's last step, and the mean age of a sample."""
    rows = tokenized_rows(config)
    eval_rows = tokenized_rows(replace(config, dataset=str(HELDOUT_ROWS), max_rows=256))
    with tempfile.TemporaryDirectory() as folder:
        run = replace(config, log_path=folder)
        done = main(run, rollout_fn_factory=make_rollout_fn, rows=rows, eval_rows=eval_rows)
        lines = Path(folder, "metrics.jsonl").read_bytes().splitlines()
    records = [record for record in map(orjson.loads, lines) if record["type"] == "train"]
    ages = [record["version/sample_staleness_mean"] for record in records[WARM_UP:]]
    return done.evaluations[-1][1].accuracy, statistics.fmean(ages)


def table(accuracies: dict[str, dict[int, list[float]]], ages: dict[int, list[float]]) -> str:
    """A row for each loss: mean accuracy over the seeds, and their range, at each O."""
    lines = [
        "| loss | " + " | ".join(f"O = {o}" for o in O_VALUES) + " |",
        "|---|" + "---|" * len(O_VALUES),
    ]
    for loss, by_o in accuracies.items():
        cells = [_shown(by_o[o]) for o in O_VALUES]
        lines.append(f"| `{loss}` | " + " | ".join(cells) + " |")
    shown_ages = [f"{statistics.fmean(ages[o]):.1f}" for o in O_VALUES]
    lines.append("| mean age, steps | " + " | ".join(shown_ages) + " |")
    return "\n".join(lines)


def _shown(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def command() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    asked = parser.parse_args()
    logging.disable(logging.WARNING)
    sys.stdout.write(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch "
        f"{torch.__version__}; {asked.steps} steps of learning rate {asked.learning_rate}, "
        f"{asked.seeds} seeds\n"
    )
    base = default_config()
    base = replace(
        base,
        max_rows=asked.steps * base.prompt_groups_per_step,
        learning_rate=asked.learning_rate,
        eval_samples_per_prompt=2,
        dcp_save_interval=0,
        no_signal_patience=None,
    )
    accuracies = {loss: {o: list[float]() for o in O_VALUES} for loss in POLICY_LOSSES}
    ages: dict[int, list[float]] = defaultdict(list)
    for seed in range(asked.seeds):
        for loss in POLICY_LOSSES:
            for o in O_VALUES:
                config = replace(base, seed=seed, policy_loss=loss, max_head_offpolicy_versions=o)
                accuracy, age = measure(config)
                accuracies[loss][o].append(accuracy)
                ages[o].append(age)
                sys.stdout.write(f"seed {seed}, {loss}, O = {o}: {accuracy:.3f}, age {age:.1f}\n")
                sys.stdout.flush()
    sys.stdout.write(f"{table(accuracies, ages)}\n")


if __name__ == "__main__":
    command()
