"""Generation and training on the same cores: ``async_rl_loop`` at O = 1, and the same in turns.

The workload of ``grpo_step.py``, with completions sampled by a rollout function. Nothing waits for
anything outside, so that all there is to win is that neither role waits for the other. Each run is
a process of its own, in turn, round after round; steps after the warm-up count, from the first's
end to the last's.

*Limit* is what overlap could win at most: the synchronous step's time on all cores over the CPU
seconds that it takes. *One thread each*: every operation has one thread (``OMP_NUM_THREADS=1``), so
that the synchronous run leaves a core idle. *Budget*: the platform's own split of all cores, as a
user has it.

    python benchmarks/async_step.py [--model 1m] [--steps 20] [--rounds 5]
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Idle OpenMP threads that spin take the cores from whoever works.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import orjson
from workload import SIZES, digit_share, make_model, make_rows, processor, sgemm_gflops

from training.examples.rl.vanilla_sampler import build_deployment_sampler
from training.recipes.async_rl_loop import Config, main
from training.samples.rollout import RolloutFn, RolloutSample, RolloutSetup
from training.utils import DeployConfig

PROMPTS, GROUP, MAX_NEW = 8, 8, 64
WARM_UP = 4
"""Steps left out at the start: caches are cold, and the first batches fill the pipeline."""
CPU_S: list[float] = []
"""CPU seconds of this process, whenever a completion was there."""
MODES: dict[str, dict[str, Any]] = {
    "synchronous": {"synchronous_training": True},
    "O = 1": {"max_head_offpolicy_versions": 1},
}
THREADS = {"one thread each": 1, "budget": None}


def make_rollout_fn(setup: RolloutSetup) -> RolloutFn:
    """One completion for each rollout."""
    sampler = build_deployment_sampler(setup)
    options = dict(setup.sample_kwargs)

    async def rollout_fn(row: Mapping[str, Any]) -> RolloutSample | None:
        completions = await sampler.sample_with_tokens(row["messages"], n=1, **options)
        if not completions:
            return None
        (completion,) = completions
        CPU_S.append(time.process_time())
        completion_tokens = len(completion.full_tokens) - completion.prompt_len
        return RolloutSample(
            tokens=list(completion.full_tokens),
            logprobs=[0.0] * completion.prompt_len + list(completion.inference_logprobs or []),
            loss_mask=[0] * completion.prompt_len + [1] * completion_tokens,
            reward=digit_share(completion.text, row),
            finish_reason=completion.finish_reason,
            text=completion.text,
        )

    return rollout_fn


def measure(asked: argparse.Namespace) -> dict[str, float]:
    """One run in this process."""
    before = sgemm_gflops()
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model", asked.model, fixed_length=True)
        config = Config(
            log_path=str(Path(folder) / "run"),
            base_model=str(model),
            shuffle=False,
            policy_loss="grpo",
            completions_per_prompt=GROUP,
            prompt_groups_per_step=PROMPTS,
            max_completion_tokens=MAX_NEW,
            max_seq_len=32 + MAX_NEW,
            learning_rate=3e-4,
            kl_beta=0.0,
            dcp_save_interval=0,
            no_signal_patience=None,
            deployment=DeployConfig(tokenizer_model=str(model)),
            **MODES[asked.run],
        )
        main(config, rollout_fn_factory=make_rollout_fn, rows=make_rows(PROMPTS * asked.steps))
        lines = Path(folder, "run", "metrics.jsonl").read_bytes().splitlines()
    records = [record for record in map(orjson.loads, lines) if record["type"] == "train"][WARM_UP:]
    step_s = statistics.fmean(record["perf/step_wall_time"] for record in records)
    return {
        "samples_per_s": PROMPTS * GROUP / step_s,
        "step_s": step_s,
        "cpu_s": (CPU_S[-1] - CPU_S[WARM_UP * PROMPTS * GROUP - 1]) / (asked.steps - WARM_UP),
        "wait_s": statistics.fmean(record["perf/train_wait_time"] for record in records),
        "train_s": statistics.fmean(record["perf/train_time"] for record in records),
        "overlap": statistics.fmean(record["perf/overlap_ratio"] for record in records),
        "sgemm": min(before, sgemm_gflops()),
    }


def run(asked: argparse.Namespace, mode: str, threads: int | None) -> dict[str, float]:
    """One run in a process of its own.

    Raises:
        subprocess.CalledProcessError: it failed; its error output is shown.
    """
    command = [
        sys.executable,
        __file__,
        "--run",
        mode,
        "--model",
        asked.model,
        "--steps",
        str(asked.steps),
    ]
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    done = subprocess.run(command, stdout=subprocess.PIPE, env=environment, check=True)
    return orjson.loads(done.stdout.splitlines()[-1])


def table(found: Mapping[str, Mapping[str, list[dict[str, float]]]]) -> str:
    """Medians over the rounds, and the median of the rounds' ratios."""
    lines = [
        "| threads | run | samples/s | against synchronous | limit | step s | CPU s | waiting s "
        "| training s | both busy |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for threads, modes in found.items():
        for mode, results in modes.items():
            pairs = zip(results, modes["synchronous"], strict=True)
            ratio = statistics.median(a["samples_per_s"] / b["samples_per_s"] for a, b in pairs)
            cores = len(os.sched_getaffinity(0))
            limit = statistics.median(
                cores * b["step_s"] / b["cpu_s"] for b in modes["synchronous"]
            )

            def median(key: str, results: list[dict[str, float]] = results) -> float:
                return statistics.median(result[key] for result in results)

            lines.append(
                f"| {threads} | {mode} | {median('samples_per_s'):.1f} | {ratio:.2f} "
                f"| {limit:.2f} | {median('step_s'):.3f} | {median('cpu_s'):.3f} "
                f"| {median('wait_s'):.3f} | {median('train_s'):.3f} | {median('overlap'):.2f} |"
            )
    return "\n".join(lines)


def command() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=list(SIZES), default="1m")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--run", choices=list(MODES), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    logging.disable(logging.WARNING)
    if asked.run:
        sys.stdout.write(orjson.dumps(measure(asked)).decode() + "\n")
        return
    sys.stdout.write(f"{processor()}, load {os.getloadavg()[0]:.1f} at the start\n")
    found = {name: {mode: [] for mode in MODES} for name in THREADS}
    for number in range(asked.rounds):
        for name, threads in THREADS.items():
            for mode in MODES:
                done = run(asked, mode, threads)
                found[name][mode].append(done)
                sys.stderr.write(f"round {number + 1}, {name}, {mode}: {done}\n")
    sys.stdout.write(f"{table(found)}\n")


if __name__ == "__main__":
    command()
