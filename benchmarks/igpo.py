"""What turn-level credit is worth: ``igpo_loop`` against outcome-only GRPO on the same questions.

Both train the model of ``training.examples.rl.multihop_qa`` on the same rows in the same order with
the same seeds, on-policy; only ``ig_weight`` differs. Held-out questions, about people that are not
trained on, are answered once each before every fourth step, with the same seeds in both.

    python benchmarks/igpo.py [--steps 25] [--seeds 3]
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson
import torch

from training.data.seeds import row_seed
from training.examples.rl.multihop_qa import rollout
from training.examples.rl.multihop_qa.corpus import question_rows
from training.examples.rl.multihop_qa.policy import ensure_model
from training.examples.rl.multihop_qa.train import CONFIG, MODEL
from training.recipes.igpo_loop import main
from training.rollouts.sampler import RolloutContext, current_rollout
from training.samples.rollout import RolloutFn, RolloutResult, RolloutSample, RolloutSetup

EVAL_EVERY = 4
WARM_UP = 2
"""Steps left out of times: caches and kernels are cold."""
METHODS: dict[str, dict[str, Any]] = {"IGPO": {}, "GRPO": {"ig_weight": 0.0}}
LEVELS = (0.1, 0.2)
"""Held-out success, the rollouts to which are counted."""


@dataclass
class Result:
    """One run: held-out success before some steps, and means over its steps."""

    curve: dict[int, float] = field(default_factory=dict[int, float])
    """Steps taken to success."""
    step_s: float = 0.0
    scoring_ratio: float = 0.0

    def rollouts_to(self, level: float) -> float:
        """Rollouts until held-out success first reached ``level``, linear between evaluations."""
        before: tuple[int, float] | None = None
        for step, success in sorted(self.curve.items()):
            if success >= level:
                if before is None:
                    return 0.0
                share = (level - before[1]) / (success - before[1])
                return (before[0] + share * (step - before[0])) * rollouts_per_step()
            before = step, success
        return float("inf")


def rollouts_per_step() -> int:
    """Trajectories of one step."""
    return CONFIG.prompt_groups_per_step * CONFIG.completions_per_prompt


def evaluated(
    held_out: Sequence[Mapping[str, Any]], curve: dict[int, float]
) -> Callable[[RolloutSetup], RolloutFn]:
    """The example's rollouts; before every fourth step the held-out rows are sampled."""

    def make_rollout_fn(setup: RolloutSetup) -> RolloutFn:
        roll_out = rollout.make_rollout_fn(setup)

        async def answered(place: int) -> float:
            # A place of its own, so that the questions are sampled with the same seeds every time.
            current_rollout.set(RolloutContext(row_seed(1, place), 0, 0))
            sample = await roll_out(held_out[place])
            assert isinstance(sample, RolloutSample)
            return sample.reward

        async def rollout_fn(
            row: dict[str, Any], cursor_index: int, sample_index: int
        ) -> RolloutResult:
            step, is_within = divmod(cursor_index, CONFIG.prompt_groups_per_step)
            if sample_index == 0 and not is_within and step % EVAL_EVERY == 0:
                tasks = [asyncio.create_task(answered(place)) for place in range(len(held_out))]
                curve[step] = statistics.fmean(await asyncio.gather(*tasks))
            return await roll_out(row)

        return rollout_fn

    return make_rollout_fn


def measure(seed: int, steps: int, changes: Mapping[str, Any]) -> Result:
    """One run of ``steps`` steps."""
    rows, held_out = question_rows()
    count = steps * CONFIG.prompt_groups_per_step
    if count > len(rows):
        raise SystemExit(f"--steps must be <= {len(rows) // CONFIG.prompt_groups_per_step}")
    result = Result()
    with tempfile.TemporaryDirectory() as folder:
        config = replace(CONFIG, log_path=folder, seed=seed, dcp_save_interval=0, **changes)
        main(config, rollout_fn_factory=evaluated(held_out, result.curve), rows=rows[:count])
        lines = Path(folder, "metrics.jsonl").read_bytes().splitlines()
    records = [orjson.loads(line) for line in lines][WARM_UP:]
    result.step_s = statistics.fmean(record["perf/step_time"] for record in records)
    result.scoring_ratio = statistics.fmean(
        record.get("igpo/scoring_ratio", 0.0) for record in records
    )
    return result


def table(results: Mapping[str, Sequence[Result]]) -> str:
    """Held-out success by rollouts, means over the seeds, and how soon each seed reached levels."""
    steps = sorted(next(iter(results.values()))[0].curve)
    heads = [f"{step * rollouts_per_step()}" for step in steps]
    levels = [f"rollouts to {level:.0%}" for level in LEVELS]
    lines = [
        "| method | " + " | ".join([*heads, *levels, "step s", "scoring share"]) + " |",
        "|---" + "|---:" * (len(heads) + len(levels) + 2) + "|",
    ]
    for name, runs in results.items():
        cells = [f"{statistics.fmean(run.curve[step] for run in runs):.3f}" for step in steps]
        for level in LEVELS:
            each = sorted(run.rollouts_to(level) for run in runs)
            shown = ["never" if math.isinf(steps_to) else f"{steps_to:.0f}" for steps_to in each]
            cells.append(", ".join(shown))
        cells.append(f"{statistics.fmean(run.step_s for run in runs):.2f}")
        cells.append(f"{statistics.fmean(run.scoring_ratio for run in runs):.3f}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def command() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--seeds", type=int, default=3)
    asked = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    ensure_model(MODEL)
    sys.stdout.write(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch "
        f"{torch.__version__}, 1 thread, load {os.getloadavg()[0]:.1f}; {asked.seeds} seeds\n"
    )
    results: dict[str, list[Result]] = {name: [] for name in METHODS}
    for seed in range(asked.seeds):
        for name, changes in METHODS.items():
            found = measure(seed, asked.steps, changes)
            results[name].append(found)
            curve = " ".join(f"{success:.3f}" for _, success in sorted(found.curve.items()))
            sys.stdout.write(f"seed {seed}, {name}: {curve}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{table(results)}\n")


if __name__ == "__main__":
    command()
