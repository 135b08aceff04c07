"""What overlapping rollouts with training is worth: ``async_rl_loop`` against its synchronous self.

Each rollout is an agent that calls one tool: a short completion from the deployment of the embedded
platform, then a tool that takes a scripted, long-tailed time (log-normal, the same for a rollout in
every setting) and answers with some text, which is trained as context. Training is real. The same
rows go through ``synchronous_training=True`` and O = 1, 2, 4, in turn.

The ideal of a step is max(rollout time, training time), both taken from the synchronous run: what
it waits for rollouts, and what forward, backward, optimizer and weight sync take. The tool's times
are scaled so that the two are about equal, where overlap can win the most.

    python benchmarks/async_overlap.py [--steps 16] [--rounds 1] [--placement process]
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import platform
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import orjson
import torch

from training.data.rows import load_rows
from training.examples.rl.vanilla_sampler import build_deployment_sampler
from training.quickstart import MODEL, TRAIN_ROWS
from training.recipes.async_rl_loop import Config, main
from training.samples.rollout import RolloutFn, RolloutSample, RolloutSetup
from training.utils import DeployConfig

Placement = Literal["inline", "process"]
PROMPTS, GROUP = 8, 8
TURN_TOKENS = 8
TOOL_TOKENS = 160
WARM_UP = 2
"""Steps left out at the start: caches and kernels are cold."""
SETTINGS: dict[str, dict[str, Any]] = {
    "synchronous_training": {"synchronous_training": True},
    "O = 1": {"max_head_offpolicy_versions": 1},
    "O = 2": {"max_head_offpolicy_versions": 2},
    "O = 4": {"max_head_offpolicy_versions": 4},
}


@dataclass(frozen=True)
class Result:
    """Context over the measured steps of one run; seconds, shares and versions."""

    step_s: float
    wait_s: float
    train_s: float
    trainer_idle: float
    sampler_idle: float
    most_stale: float
    stale_drops: float


def tool_seconds(row: int, sample: int, sigma: float) -> float:
    """How long the tool of one rollout takes, for a median of 1 s."""
    return random.Random(f"{row}/{sample}").lognormvariate(0.0, sigma)


def rollouts(scale_s: float, sigma: float) -> Callable[[RolloutSetup], RolloutFn]:
    """The agent, with tools ``scale_s`` times as slow."""

    def make_rollout_fn(setup: RolloutSetup) -> RolloutFn:
        sampler = build_deployment_sampler(setup)
        options = setup.sample_kwargs | {"max_tokens": TURN_TOKENS, "ignore_eos": True}
        tool = list(range(5, 5 + TOOL_TOKENS))
        tool = [1 + token % (setup.tokenizer.vocab_size - 1) for token in tool]

        async def rollout_fn(
            row: Mapping[str, Any], row_index: int, rollout_idx: int
        ) -> RolloutSample:
            prompt = setup.tokenizer.apply_chat_template(
                row["messages"], tokenize=True, add_generation_prompt=True, return_dict=False
            )
            (call,) = await sampler.sample_with_prompt_tokens(prompt, n=1, **options)
            await asyncio.sleep(scale_s * tool_seconds(row_index, rollout_idx, sigma))
            logprobs = call.inference_logprobs
            assert logprobs is not None
            return RolloutSample(
                tokens=call.full_tokens + tool,
                logprobs=[0.0] * len(prompt) + logprobs + [0.0] * len(tool),
                loss_mask=[0] * len(prompt) + [1] * len(logprobs) + [0] * len(tool),
                reward=sum(call.full_tokens) % 101 / 101,
            )

        return rollout_fn

    return make_rollout_fn


def measure(
    scale_s: float, sigma: float, steps: int, placement: Placement, settings: Mapping[str, Any]
) -> Result:
    """One run of ``steps`` steps."""
    with tempfile.TemporaryDirectory() as folder:
        config = Config(
            log_path=folder,
            base_model=str(MODEL),
            shuffle=False,
            completions_per_prompt=GROUP,
            prompt_groups_per_step=PROMPTS,
            max_completion_tokens=TURN_TOKENS,
            max_seq_len=256,
            learning_rate=1e-5,
            kl_beta=0.0,
            dcp_save_interval=0,
            placement=placement,
            deployment=DeployConfig(tokenizer_model=str(MODEL)),
            **settings,
        )
        rows = load_rows(str(TRAIN_ROWS), steps * PROMPTS)
        main(config, rollout_fn_factory=rollouts(scale_s, sigma), rows=rows)
        lines = Path(folder, "metrics.jsonl").read_bytes().splitlines()
    records = [orjson.loads(line) for line in lines][WARM_UP:]

    def mean(name: str) -> float:
        return statistics.fmean(record[name] for record in records)

    return Result(
        step_s=mean("perf/step_time"),
        wait_s=mean("perf/train_wait_time"),
        train_s=mean("perf/train_time") + mean("perf/weight_update_time"),
        trainer_idle=mean("perf/trainer_idle_ratio"),
        sampler_idle=mean("perf/sampler_idle_ratio"),
        most_stale=max(record["async/version_offset_max"] for record in records),
        stale_drops=records[-1]["async/total_stale_drops"],
    )


def calibrated_scale(sigma: float, steps: int, placement: Placement) -> float:
    """The tool's scale at which the slowest of a batch takes as long as its training."""
    trained = measure(0.0, sigma, steps, placement, SETTINGS["synchronous_training"])
    slowest = [
        max(
            tool_seconds(row, sample, sigma)
            for row in range(step * PROMPTS, (step + 1) * PROMPTS)
            for sample in range(GROUP)
        )
        for step in range(steps)
    ]
    return max(0.0, trained.train_s - trained.wait_s) / statistics.fmean(slowest)


def table(results: Mapping[str, list[Result]]) -> str:
    """The settings side by side, medians over the rounds."""

    def median(name: str, field: str) -> float:
        return statistics.median(getattr(result, field) for result in results[name])

    base = "synchronous_training"
    ideal = max(median(base, "wait_s"), median(base, "train_s"))
    lines = [
        "| setting | steps/s | against synchronous | step s | ideal s | step over ideal "
        "| trainer idle | sampler idle | most versions late | dropped |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name in results:
        step_s = median(name, "step_s")
        lines.append(
            f"| {name} | {1 / step_s:.3f} | {median(base, 'step_s') / step_s:.2f} | {step_s:.3f} "
            f"| {ideal:.3f} | {step_s / ideal:.2f} | {median(name, 'trainer_idle'):.2f} "
            f"| {median(name, 'sampler_idle'):.2f} | {median(name, 'most_stale'):.0f} "
            f"| {median(name, 'stale_drops'):.0f} |"
        )
    rollout_s, train_s = median(base, "wait_s"), median(base, "train_s")
    lines.append(
        f"\nsynchronous: {rollout_s:.3f} s of rollouts, {train_s:.3f} s of training a step"
    )
    return "\n".join(lines)


def command() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--sigma", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--placement", choices=["inline", "process"], default="process")
    asked = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(asked.threads)
    scale_s = calibrated_scale(asked.sigma, 6, asked.placement)
    sys.stdout.write(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch "
        f"{torch.__version__}, {asked.threads} threads, placement {asked.placement}, load "
        f"{os.getloadavg()[0]:.1f}; the median tool takes {scale_s:.3f} s\n"
    )
    sys.stdout.flush()
    results: dict[str, list[Result]] = {name: [] for name in SETTINGS}
    for _ in range(asked.rounds):
        for name, settings in SETTINGS.items():
            done = measure(scale_s, asked.sigma, asked.steps, asked.placement, settings)
            results[name].append(done)
    sys.stdout.write(f"{table(results)}\n")


if __name__ == "__main__":
    command()
