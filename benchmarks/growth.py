"""How a GRPO step's time and memory grow: with the batch, and with what is computed at a time.

``grpo_step.py`` runs with completions of a fixed length, each run in a process of its own, in turn,
round after round. In the first table the batch grows, and what is computed at a time stays: 64
samples in a training call, 64 rows in the KV cache. A step should take as long as its samples, and
memory should stay. In the second the batch stays and that budget grows: memory should grow with it
as a straight line does.

*MiB* is the most that the process held. *MiB needed* is the same where every tensor above 1 MiB is
given back to the system at once (``MALLOC_MMAP_THRESHOLD_``): the difference is what the C library
keeps of freed memory for the next tensors, which saves the time of asking for it again.

    python benchmarks/growth.py [--model 3m] [--rounds 3] [--json]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson
import torch
from workload import processor

HERE = Path(__file__).parent
GROUP = 8
BUDGET = 64
BATCHES = (8, 16, 32, 64)
"""Prompts per step."""
PROMPTS, BUDGETS = 48, (64, 128, 192)
"""Prompts per step, and samples of a call and rows of the cache."""
EXACT = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
EXACT_STEPS = 3


@dataclass(frozen=True)
class Size:
    """One workload."""

    prompts: int
    budget: int
    """Samples of a training call, and rows of the KV cache."""

    @property
    def samples(self) -> int:
        """Of a step."""
        return self.prompts * GROUP


@dataclass(frozen=True)
class Result:
    """Medians over the rounds."""

    size: Size
    step_s: float
    peak_mib: float
    needed_mib: float
    calls: int
    """Training calls in a step."""

    @property
    def sample_s(self) -> float:
        """Seconds per sample."""
        return self.step_s / self.size.samples


def run(size: Size, asked: argparse.Namespace, steps: int, **environment: str) -> dict[str, Any]:
    """``grpo_step.py`` in a process of its own.

    Raises:
        subprocess.CalledProcessError: it failed; its error output is shown.
    """
    command = [
        sys.executable,
        str(HERE / "grpo_step.py"),
        "--model",
        asked.model,
        "--fixed-len",
        "--prompts",
        str(size.prompts),
        "--group",
        str(GROUP),
        "--call",
        str(size.budget),
        "--rows",
        str(size.budget),
        "--steps",
        str(steps),
        "--warmup",
        "1",
        "--json",
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, env=os.environ | environment, check=True)
    return orjson.loads(done.stdout.splitlines()[-1])


def measure(sizes: Sequence[Size], asked: argparse.Namespace) -> list[Result]:
    """All sizes in turn, round after round."""
    found: Mapping[Size, list[dict[str, Any]]] = {size: [] for size in sizes}
    needed: Mapping[Size, list[int]] = {size: [] for size in sizes}
    for number in range(asked.rounds):
        for size in sizes:
            # As many samples in each, and some steps in any case.
            steps = 1 + max(3, asked.samples // size.samples)
            found[size].append(run(size, asked, steps))
            needed[size].append(run(size, asked, EXACT_STEPS, **EXACT)["peak_rss_mib"])
            sys.stderr.write(
                f"round {number + 1}, {size}: {found[size][-1]['step_s']} s, "
                f"{found[size][-1]['peak_rss_mib']} MiB, {needed[size][-1]} needed\n"
            )
    return [
        Result(
            size=size,
            step_s=statistics.median(run["step_s"] for run in found[size]),
            peak_mib=statistics.median(run["peak_rss_mib"] for run in found[size]),
            needed_mib=statistics.median(needed[size]),
            calls=-(-size.samples // size.budget),
        )
        for size in sizes
    ]


def batch_table(results: Sequence[Result]) -> str:
    """The growing batch, against its smallest."""
    first = results[0]
    lines = [
        "| prompts | samples | calls | step s | ms a sample | against 1x | MiB | against 1x "
        "| MiB needed | against 1x |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {result.size.prompts} | {result.size.samples} | {result.calls} | {result.step_s:.3f} "
        f"| {1000 * result.sample_s:.2f} | {result.sample_s / first.sample_s:.3f} "
        f"| {result.peak_mib:,.0f} | {result.peak_mib / first.peak_mib:.3f} "
        f"| {result.needed_mib:,.0f} | {result.needed_mib / first.needed_mib:.3f} |"
        for result in results
    ]
    return "\n".join(lines)


def budget_table(results: Sequence[Result]) -> str:
    """The growing budget, against the line through its two smallest."""
    lines = [
        "| samples in a call, rows in the cache | step s | MiB | over the line | MiB needed "
        "| over the line |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for result in results:
        over = [
            getattr(result, name) / expected(results, result.size.budget, name)
            for name in ("peak_mib", "needed_mib")
        ]
        lines.append(
            f"| {result.size.budget} | {result.step_s:.3f} | {result.peak_mib:,.0f} "
            f"| {over[0]:.3f} | {result.needed_mib:,.0f} | {over[1]:.3f} |"
        )
    return "\n".join(lines)


def expected(results: Sequence[Result], budget: int, name: str) -> float:
    """What the line through the two smallest budgets says."""
    low, high = results[0], results[1]
    start: float = getattr(low, name)
    slope = (getattr(high, name) - start) / (high.size.budget - low.size.budget)
    return start + slope * (budget - low.size.budget)


def command() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="3m", help="1m, 3m, 10m, or a model's folder")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=1024, help="of each run, at least")
    parser.add_argument("--json", action="store_true", help="one JSON object, nothing else")
    asked = parser.parse_args()
    heading = f"{processor()}, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}"
    batches = measure([Size(prompts, BUDGET) for prompts in BATCHES], asked)
    budgets = measure([Size(PROMPTS, budget) for budget in BUDGETS], asked)
    if asked.json:
        tables = {"batches": batches, "budgets": budgets}
        found = {name: [asdict(result) for result in results] for name, results in tables.items()}
        sys.stdout.write(orjson.dumps(found).decode() + "\n")
        return
    sys.stdout.write(f"{heading} at the start\n\n{batch_table(batches)}\n\n")
    sys.stdout.write(f"{PROMPTS} prompts\n\n{budget_table(budgets)}\n")


if __name__ == "__main__":
    command()
