"""Hearth against what its users would pick instead, in turn, on the same workloads.

Contenders are scripts that take the options of ``grpo_step.py`` and print one JSON object last:
TRL's ``GRPOTrainer`` (in an environment of its own), a hand-written plain-PyTorch loop (the floor,
for workloads that it knows) and Hearth's recipe. They run one after the other, round after round;
every figure is the median of its rounds. One whose script or environment is missing is left out,
and said.

    make bench
    python benchmarks/compare.py --bench FOLDER [--trl-python PYTHON] [--rounds 3] [--only NAME ...]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import orjson
from workload import processor, sgemm_gflops

HERE = Path(__file__).parent
HEADING = """\
## One GRPO step against TRL and a hand-written loop

    make bench

The same model, prompts, reward and numbers of samples for all: 8 prompts of 8 completions a step,
float32, 2 threads, AdamW; models of 0.8 M (1m) and 3.2 M (3m) parameters. *Reference* adds a KL
term of 0.04 to a frozen reference. *4 optimizer steps* cuts a batch of 4 prompts of 16 completions,
with prompts of 400 tokens, into four. *A core taken*: another program computes beside each run,
without end. *0.6b LoRA* is the shape of Qwen3-0.6B with random weights:
rank 16, 4 prompts of 4, 128 tokens of prompt and 64 new ones. The *floor* is a plain
PyTorch loop without platform, recipe or checks; with prompts of 222 tokens it computes each prompt
once. Each run is a process of its own, in turn, A B C A B C; of a run's steps after the warm-up the
faster half counts, and every figure is the median of the rounds. *x of it* is Hearth's samples/s
over the system's, the median of the rounds' ratios; *least* is the smallest of them. *x in tokens*
is the same in sampled tokens/s, where policies that learn differently sample different lengths.
"""
LARGE = (
    *("--model", "0.6b", "--vocab", "151936", "--fixed-len", "--prompt-pad", "106"),
    *("--prompts", "4", "--group", "4", "--lora-rank", "16"),
)
WORKLOADS: dict[str, tuple[str, ...]] = {
    "3m fixed 64": ("--model", "3m", "--fixed-len"),
    "3m ragged to 256": ("--model", "3m", "--max-new", "256"),
    "1m ragged 64": ("--model", "1m"),
    "3m vocabulary 4096": ("--model", "3m", "--fixed-len", "--vocab", "4096"),
    "3m prompt of 222": ("--model", "3m", "--fixed-len", "--prompt-pad", "200"),
    "3m fixed 64, reference": ("--model", "3m", "--fixed-len", "--beta", "0.04"),
    "3m ragged to 256, reference": ("--model", "3m", "--max-new", "256", "--beta", "0.04"),
    "3m, 4 optimizer steps": (
        *("--model", "3m", "--fixed-len", "--prompt-pad", "378"),
        *("--prompts", "4", "--group", "16", "--minibatches", "4"),
    ),
    "3m fixed 64, a core taken": ("--model", "3m", "--fixed-len"),
    "0.6b LoRA": LARGE,
    "0.6b LoRA, bfloat16": (*LARGE, "--dtype", "bfloat16"),
}
STEPS = {
    "3m fixed 64": 5,
    "3m ragged to 256": 2,
    "3m ragged to 256, reference": 2,
    "1m ragged 64": 7,
    "0.6b LoRA": 2,
    "0.6b LoRA, bfloat16": 2,
}
"""Where a step is shorter or longer than elsewhere."""
ROUNDS = {"0.6b LoRA": 1, "0.6b LoRA, bfloat16": 1}
"""Of workloads of which a round takes minutes."""
FLOOR_KNOWS = tuple(WORKLOADS)[:5]
CORE_TAKEN = ("3m fixed 64, a core taken",)
"""Beside which another program computes, on any core."""
USUAL_STEPS = 3
WARM_UP = 1
"""Steps left out at the start."""
SHARES_PREFIX = ("3m prompt of 222",)
"""Where the floor is faster with each prompt computed once."""
TIMEOUT_S = 1200.0

Result = Mapping[str, Any]


@dataclass(frozen=True)
class Contender:
    """A system, and how its script is called."""

    name: str
    python: str
    script: Path

    def missing(self) -> str | None:
        """What it lacks to run."""
        for path in (Path(self.python), self.script):
            if not path.exists():
                return f"{path} is not there"
        return None

    def runs(self, workload: str) -> bool:
        """Whether it knows the workload's options."""
        return self.name != "floor" or workload in FLOOR_KNOWS

    def run(self, workload: str, steps: int | None) -> Result:
        """One run in a process of its own.

        Raises:
            subprocess.CalledProcessError: it failed; its error output is shown.
        """
        extra = ("--share-prefix",) if self.name == "floor" and workload in SHARES_PREFIX else ()
        extra += ("--json",) if self.name == "hearth" else ()
        steps = steps or STEPS.get(workload, USUAL_STEPS)
        command = [
            self.python,
            str(self.script),
            *WORKLOADS[workload],
            *("--steps", str(steps), "--warmup", str(WARM_UP)),
            *extra,
        ]
        taker = contextlib.nullcontext() if workload not in CORE_TAKEN else take_core()
        quiet = {"HF_HUB_OFFLINE": "1", "TRL_DISABLE_USAGE_STATS": "1"}
        quiet["TOKENIZERS_PARALLELISM"] = "false"
        with taker:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                env=os.environ | quiet,
                check=False,
            )
        if done.returncode:
            sys.stderr.write(done.stderr[-4000:])
            done.check_returncode()
        return orjson.loads(done.stdout.strip().splitlines()[-1])


@contextlib.contextmanager
def take_core() -> Iterator[None]:
    """Another program computes on a core inside the ``with``."""
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        other.kill()
        other.wait()


def contenders(asked: argparse.Namespace) -> Iterator[Contender]:
    """Those that can run here."""
    bench = Path(asked.bench)
    every = (
        Contender("trl", asked.trl_python, HERE / "trl_step.py"),
        Contender("floor", sys.executable, bench / "floor_cpu_bench.py"),
        Contender("hearth", sys.executable, HERE / "grpo_step.py"),
    )
    for contender in every:
        reason = contender.missing()
        if reason is None:
            yield contender
        else:
            sys.stdout.write(f"without {contender.name}: {reason}\n")


def measure(asked: argparse.Namespace) -> dict[str, dict[str, list[Result]]]:
    """Results by workload and contender, in rounds: A B C A B C."""
    able = list(contenders(asked))
    found: dict[str, dict[str, list[Result]]] = {}
    for workload in asked.only or WORKLOADS:
        chosen = [contender for contender in able if contender.runs(workload)]
        found[workload] = {contender.name: [] for contender in chosen}
        for number in range(min(asked.rounds, ROUNDS.get(workload, asked.rounds))):
            for contender in chosen:
                started = time.perf_counter()
                result = contender.run(workload, asked.steps)
                found[workload][contender.name].append(result)
                sys.stderr.write(
                    f"{workload}, round {number + 1}, {contender.name}: "
                    f"{result['samples_per_s']} samples/s, {result['peak_rss_mib']} MiB, sgemm "
                    f"{result['sgemm_gflops_before_after']}, "
                    f"{time.perf_counter() - started:.0f} s\n"
                )
    return found


def table(found: Mapping[str, Mapping[str, list[Result]]]) -> str:
    """Medians, and Hearth's ratios to the others: the median of the rounds' ratios."""
    lines = [
        "| workload | system | samples/s | x of it | least | x in tokens | generated tokens/s "
        "| generate s | forward and backward s | step s | tokens a sample | MiB |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for workload, systems in found.items():
        for name, results in systems.items():
            pairs = list(zip(systems.get("hearth", results), results, strict=True))
            ratios = [ours["samples_per_s"] / theirs["samples_per_s"] for ours, theirs in pairs]
            in_tokens = statistics.median(_tokens_per_s(a) / _tokens_per_s(b) for a, b in pairs)

            def median(key: str, results: list[Result] = results) -> float:
                return statistics.median(result[key] for result in results)

            lines.append(
                f"| {workload} | {name} | {median('samples_per_s'):.2f} "
                f"| {statistics.median(ratios):.2f} | {min(ratios):.2f} | {in_tokens:.2f} "
                f"| {median('gen_tokens_per_s'):,.0f} | {median('generate_s'):.3f} "
                f"| {median('fwd_bwd_s'):.3f} | {median('step_s'):.3f} "
                f"| {median('mean_len'):.1f} | {median('peak_rss_mib'):,.0f} |"
            )
    return "\n".join(lines)


def _tokens_per_s(result: Result) -> float:
    """Sampled tokens over the whole step."""
    return result["samples_per_s"] * result["mean_len"]


def versions(python: str) -> str:
    """What the environments have installed."""
    names = ("torch", "transformers")
    found = [f"{name} {metadata.version(name)}" for name in names]
    asked = [python, "-c", "from importlib import metadata; print(metadata.version('trl'))"]
    if Path(python).exists():
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
        found.append(f"TRL {done.stdout.strip() or 'not installed'}")
    return ", ".join(found)


def command() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bench", default="../shared/bench", help="the other systems' scripts")
    parser.add_argument("--trl-python", default=".venv-trl/bin/python")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="of each run; by default 2 to 7")
    parser.add_argument("--only", nargs="*", choices=list(WORKLOADS))
    asked = parser.parse_args()
    began = time.perf_counter()
    load, sgemm = os.getloadavg()[0], sgemm_gflops()
    found = measure(asked)
    sys.stdout.write(
        f"{HEADING}\n{processor()}, {sgemm:.0f} GFLOP/s of sgemm before and {sgemm_gflops():.0f} "
        f"after; {versions(asked.trl_python)}; load average {load:.1f} at the start. "
        f"{asked.rounds} rounds, {(time.perf_counter() - began) / 60:.0f} minutes.\n\n"
        f"{table(found)}\n"
    )


if __name__ == "__main__":
    command()
