"""Whether the simulation of many GPUs foretells runs that this machine can make.

``async_rl_loop`` runs with one process (``inline``), two (a trainer and a deployment), three (two
ranks and a deployment) and four (two ranks and two replicas of vLLM), on the processors that are
there. Synchronous runs of each
placement give what ``scale_simulation.py`` needs to know of it: a decoding step with few and with
many rows, a pass over few and over many tokens, the parts of a weight sync. From those alone the
simulation foretells the samples a second of overlapping runs, whose completions have log-normal
lengths.

    python benchmarks/scale_check.py [--steps 12] [--processes 1 2]

Four processes need vLLM: ``HEARTH_VLLM_PYTHON`` names its environment's Python.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import logging
import os
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson
import torch
from scale_simulation import Fleet, simulate
from workload import make_model, make_rows, processor

from training.examples.rl.vanilla_sampler import build_deployment_sampler
from training.recipes.async_rl_loop import Config, main
from training.samples.rollout import RolloutFn, RolloutSample, RolloutSetup
from training.utils import DeployConfig

PROMPTS, GROUP = 8, 4
LENGTHS = Fleet(
    replicas=1,
    step_s=0.0,
    row_s=0.0,
    training_s=0.0,
    gateway_s=0.0,
    recipe_s=0.0,
    prompts=PROMPTS,
    group=GROUP,
    median_tokens=96.0,
    sigma=0.8,
    longest=384,
)
"""Completions of the runs; what they cost is measured."""
WARM_UP = 2
"""Steps left out at the start."""
SHAPES: dict[int, dict[str, Any]] = {
    1: {"placement": "inline"},
    2: {"placement": "process"},
    3: {"placement": "process", "trainer.ranks": 2},
    4: {
        "placement": "process",
        "trainer.ranks": 2,
        "deployment.replicas": 2,
        "deployment.engine": "vllm",
    },
}
OVERLAPS: dict[str, dict[str, Any]] = {
    "synchronous": {"late": 0, "in_flight": False},
    "O = 1": {"late": 1, "in_flight": False},
    "O = 2": {"late": 2, "in_flight": False},
    "O = 1, in flight": {"late": 1, "in_flight": True},
}
"""Fields of ``Fleet``."""


@dataclass(frozen=True)
class Run:
    """Of the measured steps of one run, in seconds a step."""

    step_s: float
    wait_s: float
    passes_s: float
    optimizer_s: float
    save_s: float
    serve_s: float
    tokens: float
    """A step trains."""

    @property
    def rest_s(self) -> float:
        """What is none of its parts: the recipe's own work."""
        parts = (self.wait_s, self.passes_s, self.optimizer_s, self.save_s, self.serve_s)
        return self.step_s - sum(parts)

    @property
    def samples_per_s(self) -> float:
        """Of the whole run."""
        return PROMPTS * GROUP / self.step_s


Lengths = Sequence[int]
"""Tokens of each completion, in the order of the rows."""


def rollouts(lengths: Lengths, group: int) -> Any:
    """Completions of given lengths, with a reward that follows their tokens."""

    def make_rollout_fn(setup: RolloutSetup) -> RolloutFn:
        sampler = build_deployment_sampler(setup)

        async def rollout_fn(
            row: Mapping[str, Any], row_index: int, rollout_idx: int
        ) -> RolloutSample:
            prompt = setup.tokenizer.encode(row["messages"][-1]["content"])
            count = lengths[(row_index * group + rollout_idx) % len(lengths)]
            options = setup.sample_kwargs | {"max_tokens": count, "ignore_eos": True}
            (call,) = await sampler.sample_with_prompt_tokens(prompt, n=1, **options)
            assert call.inference_logprobs is not None
            return RolloutSample(
                tokens=call.full_tokens,
                logprobs=[0.0] * len(prompt) + call.inference_logprobs,
                loss_mask=[0] * len(prompt) + [1] * call.completion_len,
                reward=sum(call.full_tokens) % 101 / 101,
            )

        return rollout_fn

    return make_rollout_fn


def measure(
    model: Path,
    processes: int,
    fields: Mapping[str, Any],
    lengths: Lengths,
    prompts: int,
    steps: int,
) -> Run:
    """One run."""
    with tempfile.TemporaryDirectory() as folder:
        config = Config(
            log_path=folder,
            base_model=str(model),
            shuffle=False,
            completions_per_prompt=GROUP,
            prompt_groups_per_step=prompts,
            max_completion_tokens=LENGTHS.longest,
            max_seq_len=512,
            learning_rate=1e-5,
            kl_beta=0.0,
            dcp_save_interval=0,
            deployment=DeployConfig(tokenizer_model=str(model)),
            max_head_offpolicy_versions=fields["late"],
            synchronous_training=fields["late"] == 0,
            in_flight_weight_updates=fields["in_flight"],
        )
        for name, value in SHAPES[processes].items():
            part, _, rest = name.rpartition(".")
            setattr(getattr(config, part) if part else config, rest, value)
        rows = make_rows((WARM_UP + steps) * prompts)
        with contextlib.redirect_stdout(io.StringIO()):
            main(config, rollout_fn_factory=rollouts(lengths, GROUP), rows=rows)
        lines = Path(folder, "metrics.jsonl").read_bytes().splitlines()
        records = [record for record in map(orjson.loads, lines) if record["type"] == "train"]
        spans = [
            orjson.loads(line) for line in Path(folder, "timeline.jsonl").read_bytes().splitlines()
        ]

    def mean(name: str) -> float:
        return statistics.fmean(record.get(name, 0.0) for record in records[WARM_UP:])

    def mean_span(name: str) -> float:
        found = [
            span["end"] - span["start"]
            for span in spans
            if span["type"] == "span" and span["lane"] == "sync" and span["name"] == name
        ]
        return statistics.fmean(found[WARM_UP:])

    return Run(
        step_s=mean("perf/step_time"),
        wait_s=mean("perf/train_wait_time"),
        passes_s=mean("perf/fwd_bwd_time") + mean("perf/old_policy_forward_time"),
        optimizer_s=mean("perf/optim_step_time"),
        save_s=mean_span("save"),
        serve_s=mean_span("weight_sync"),
        tokens=mean("train/active_tokens"),
    )


def calibrate(model: Path, processes: int, steps: int) -> Fleet:
    """What the simulation needs to know, from synchronous runs whose completions are equal.

    Whoever computes alone uses all cores, and those that compute at the same time share them. So
    the costs are those of runs with a thread each, and runs with all say how much faster that is.
    """
    lengths = list(LENGTHS.lengths(20_000, seed=0))
    # Equal completions whose tokens have as many before them, in the mean.
    count = round(sum(length**2 for length in lengths) / sum(lengths))
    synchronous = OVERLAPS["synchronous"]
    cores = torch.get_num_threads()
    ranks = SHAPES[processes].get("trainer.ranks", 1)
    replicas = SHAPES[processes].get("deployment.replicas", 1)

    def run(prompts: int) -> Run:
        return measure(model, processes, synchronous, [count], prompts, steps)

    # As many rows as overlapping runs have at a time, or half of what synchronous ones have.
    least, most = PROMPTS // 2, 2 * PROMPTS
    few_alone, many_alone = run(least), run(most)
    with use_threads(1):
        few, many = run(least), run(most)
    samples = (most - least) * GROUP
    recipe_s = max(0.0, (many.rest_s - few.rest_s) / samples)
    rows = [least * GROUP // replicas, most * GROUP // replicas]
    token_s = [few.wait_s / count, many.wait_s / count]
    row_s = max(0.0, (token_s[1] - token_s[0]) / (rows[1] - rows[0]))
    prompt = len("what is 10+10? answer:")
    training_s = max(0.0, (many.passes_s - few.passes_s) / (samples * (count + prompt)))
    trained_s = most * GROUP * (count + prompt) * training_s
    return replace(
        LENGTHS,
        replicas=replicas,
        ranks=ranks,
        rows=256,
        least_rows=rows[0],
        step_s=token_s[0] - row_s * rows[0],
        row_s=row_s,
        training_s=training_s,
        optimizer_s=many.optimizer_s + many.passes_s - trained_s,
        recipe_s=recipe_s,
        save_s=many.save_s,
        swap_s=many.serve_s,
        cores=cores,
        training_alone=many.passes_s / many_alone.passes_s,
        sampling_alone=few.wait_s / few_alone.wait_s,
        prompt_tokens=prompt,
    )


@contextlib.contextmanager
def use_threads(count: int) -> Iterator[None]:
    """Compute with so many threads, in this process and in those that it starts."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    os.environ["OMP_NUM_THREADS"] = str(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        del os.environ["OMP_NUM_THREADS"]


def command() -> None:
    """Measure, foretell and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--size", default="3m", help="of workload.py's models")
    parser.add_argument("--verbose", action="store_true", help="what the simulation was told")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], choices=SHAPES)
    asked = parser.parse_args()
    logging.disable(logging.WARNING)
    write = functools.partial(print, flush=True)
    write(f"{processor()}, torch {torch.__version__}, load {os.getloadavg()[0]:.1f} at the start\n")
    write("| processes | run | samples/s measured | simulated | simulated over measured |")
    write("|---:|---|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder), asked.size, fixed_length=True)
        for processes in asked.processes:
            fleet = calibrate(model, processes, asked.steps)
            if asked.verbose:
                write(f"{fleet}\n")
            for name, fields in OVERLAPS.items():
                known = replace(fleet, **fields)
                steps = asked.steps
                count = (WARM_UP + steps) * PROMPTS * GROUP
                lengths = list(known.lengths(count, seed=0))
                measured = statistics.median(
                    measure(model, processes, fields, lengths, PROMPTS, steps).samples_per_s
                    for _ in range(asked.rounds)
                )
                foretold = simulate(known, steps).samples_per_s
                write(
                    f"| {processes} | {name} | {measured:.1f} | {foretold:.1f} "
                    f"| {foretold / measured:.2f} |"
                )


if __name__ == "__main__":
    command()
