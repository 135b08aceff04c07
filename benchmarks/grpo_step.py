"""One GRPO step of ``rl_loop``, whole: rollouts over the SDK, rewards, training, weight sync.

The recipe runs as it is, on the embedded platform, with the rows and the reward of ``workload``.
Figures are means over the fastest half of the steps after the warm-up (work of others on the
machine only ever adds time), as other systems' scripts take them.

    python benchmarks/grpo_step.py --model 3m --fixed-len [--json]
"""

from __future__ import annotations

import argparse
import logging
import os
import resource
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Idle OpenMP threads that spin take the cores from whoever works.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import orjson
import torch
from workload import digit_share, make_rows, model_folder, sgemm_gflops

from hearth.local.inline import InlineWorker
from training.config.parts import DeployConfig, TrainerConfig
from training.recipes.rl_loop import Config, main

ROWS = 512
"""Different rows; a longer run takes them again."""
PHASES = {
    "generate_s": "perf/sample_wait_time",
    "fwd_bwd_s": "perf/fwd_bwd_time",
    "ref_forward_s": "perf/ref_forward_time",
    "optim_s": "perf/optim_step_time",
    "weight_sync_s": "perf/weight_sync_time",
}


COMPUTING = frozenset({"sampling", "forward", "forward_backward", "optim_step"})
"""What engines say that they do when they compute for the step."""


@dataclass(frozen=True)
class Result:
    """Context of the measured steps; seconds per step."""

    model: str
    params: int
    vocab: int
    batch: int
    max_new: int
    threads: int
    samples_per_s: float
    gen_tokens_per_s: float
    train_tokens_per_s: float
    """Sampled tokens over the seconds of forward and backward."""
    mean_len: float
    step_s: float
    step_s_all: float
    """Over all steps after the warm-up."""
    generate_s: float
    fwd_bwd_s: float
    ref_forward_s: float
    optim_s: float
    weight_sync_s: float
    other_s: float
    overhead_share: float
    """Of the steps' time, that in which the engines neither sampled tokens nor ran a forward or
    backward pass nor the optimizer; requests, JSON, rewards and weight syncs are in it."""
    idle_ms: dict[str, float]
    """That time of a step, by what was computed before and after."""
    reward_first: float
    reward_last: float
    first_step_s: float
    peak_rss_mib: int
    sgemm_gflops_before_after: tuple[float, float]


def measure(asked: argparse.Namespace, folder: Path) -> Result:
    """Run the recipe and read what it wrote."""
    before = sgemm_gflops()
    watch = PhaseWatch()
    model = model_folder(asked, folder)
    rows = make_rows(ROWS, seed=asked.seed, prompt_pad=asked.prompt_pad)
    count = asked.prompts * asked.steps
    config = Config(
        log_path=str(folder / "run"),
        base_model=str(model),
        policy_loss="grpo",
        completions_per_prompt=asked.group,
        prompt_groups_per_step=asked.prompts,
        max_completion_tokens=asked.max_new,
        max_seq_len=asked.prompt_pad + 32 + asked.max_new,
        max_concurrent=asked.prompts * asked.group,
        learning_rate=asked.lr,
        kl_beta=asked.beta,
        truncated_completions="score",
        no_signal_patience=None,
        dcp_save_interval=0,
        loss_path=asked.loss_path,
        record_samples=asked.record,
        seed=asked.seed,
        max_samples_per_fwd_bwd=asked.call,
        min_samples_per_fwd_bwd=asked.stream,
        ppo_n_minibatches=asked.minibatches,
        lora_rank=asked.lora_rank,
        trainer=TrainerConfig(dtype=None if asked.dtype == "float32" else asked.dtype),
        deployment=DeployConfig(tokenizer_model=str(model), max_batch_size=asked.rows),
    )
    summary = main(config, (rows * (1 + count // ROWS))[:count], reward_fn=digit_share)
    lines = (folder / "run" / "metrics.jsonl").read_bytes().splitlines()
    records = [record for record in map(orjson.loads, lines) if record["type"] == "train"]
    return Result(
        model=asked.model,
        **facts(model),
        **step_figures(records, asked),
        **watch.idle(records[asked.warmup :]),
        threads=torch.get_num_threads(),
        first_step_s=round(summary.first_step_s, 2),
        peak_rss_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        sgemm_gflops_before_after=(round(before, 1), round(sgemm_gflops(), 1)),
    )


class PhaseWatch:
    """Records the phases of the embedded platform's engines, with their times."""

    def __init__(self) -> None:
        self._events: list[tuple[float, int, str]] = []
        """Time, engine, and what it does from then on."""
        set_phase = InlineWorker._set_phase

        def watch_phase(worker: InlineWorker, phase: str) -> None:
            self._events.append((time.perf_counter(), id(worker), phase))
            set_phase(worker, phase)

        InlineWorker._set_phase = watch_phase

    def idle(self, records: list[dict[str, Any]]) -> dict[str, Any]:
        """``overhead_share`` and ``idle_ms`` of the last steps, one after the other."""
        end_s = max(at for at, _, phase in self._events if phase in COMPUTING or phase == "idle")
        total_s = sum(record["perf/step_wall_time"] for record in records)
        start_s = end_s - total_s
        gaps: dict[str, float] = defaultdict(float)
        computing: set[int] = set()
        last, since_s = "", end_s
        for at, worker, phase in self._events:
            was_computing = bool(computing)
            (computing.add if phase in COMPUTING else computing.discard)(worker)
            if computing and not was_computing and at > start_s:
                gaps[f"{last} to {phase}"] += max(0.0, at - max(since_s, start_s))
            elif was_computing and not computing:
                since_s = at
            if phase in COMPUTING:
                last = phase
        steps = len(records)
        idle_ms = {name: round(1e3 * gap_s / steps, 1) for name, gap_s in gaps.items()}
        return {"overhead_share": round(sum(gaps.values()) / total_s, 4), "idle_ms": idle_ms}


def facts(model: Path) -> dict[str, int]:
    """Parameters and vocabulary of a model's folder."""
    from safetensors import safe_open

    params = 0
    for file in model.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            names = tensors.keys()
            shapes = [tensors.get_slice(name).get_shape() for name in names]
        params += sum(torch.Size(shape).numel() for shape in shapes)
    return {
        "params": params,
        "vocab": orjson.loads((model / "config.json").read_bytes())["vocab_size"],
    }


def step_figures(records: list[dict[str, Any]], asked: argparse.Namespace) -> dict[str, Any]:
    """What the steps' records come to."""
    batch = asked.prompts * asked.group
    measured = records[asked.warmup :]
    tokens = {id(record): record["rollout/response_len/mean"] * batch for record in measured}
    quick = sorted(measured, key=lambda record: record["perf/step_wall_time"] / tokens[id(record)])
    used = quick[: max(1, len(measured) // 2)]

    def mean(name: str, of: list[dict[str, Any]] = used) -> float:
        return statistics.fmean(record.get(name, 0.0) for record in of)

    completion_tokens = statistics.fmean(tokens[id(record)] for record in used)
    seconds = {name: mean(metric) for name, metric in PHASES.items()}
    step_s = mean("perf/step_wall_time")
    return {
        "batch": batch,
        "max_new": asked.max_new,
        "mean_len": round(completion_tokens / batch, 1),
        "samples_per_s": round(batch / step_s, 2),
        "gen_tokens_per_s": round(completion_tokens / seconds["generate_s"], 1),
        "train_tokens_per_s": round(completion_tokens / seconds["fwd_bwd_s"], 1),
        "step_s": round(step_s, 4),
        "step_s_all": round(mean("perf/step_wall_time", measured), 4),
        "other_s": round(step_s - sum(seconds.values()), 4),
        "reward_first": round(records[0]["rollout/reward"], 4),
        "reward_last": round(records[-1]["rollout/reward"], 4),
    } | {name: round(value, 4) for name, value in seconds.items()}


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="3m", help="1m, 3m, 10m, or a model's folder")
    parser.add_argument("--vocab", type=int, default=0, help="pad the vocabulary to this many")
    parser.add_argument("--prompts", type=int, default=8, help="prompts per step")
    parser.add_argument("--group", type=int, default=8, help="completions per prompt")
    parser.add_argument("--call", type=int, default=256, help="most samples of a training call")
    parser.add_argument(
        "--stream", type=int, help="train as soon as this many samples exist; off by default"
    )
    parser.add_argument("--rows", type=int, default=64, help="completions decoded together")
    parser.add_argument("--max-new", type=int, default=64, help="most tokens of a completion")
    parser.add_argument("--fixed-len", action="store_true", help="completions of all their tokens")
    parser.add_argument("--prompt-pad", type=int, default=0, help="characters before each prompt")
    parser.add_argument("--beta", type=float, default=0.0, help="weight of the KL to a reference")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--minibatches", type=int, default=1, help="optimizer steps of a batch")
    parser.add_argument("--lora-rank", type=int, default=0)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--loss-path", choices=["client", "builtin"], default="client")
    parser.add_argument("--record", choices=["all", "none"], default="all", help="samples")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=2, help="steps left out at the start")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder that keeps the run")
    parser.add_argument("--json", action="store_true", help="one JSON object, nothing else")
    return parser.parse_args()


def command() -> None:
    """Measure and print."""
    asked = arguments()
    logging.disable(logging.WARNING)
    torch.set_num_threads(asked.threads)
    with tempfile.TemporaryDirectory() as folder:
        if asked.keep is not None:
            asked.keep.mkdir(parents=True, exist_ok=True)
        result = asdict(measure(asked, asked.keep or Path(folder)))
    if asked.json:
        sys.stdout.write(orjson.dumps({"system": "hearth"} | result).decode() + "\n")
        return
    for name, value in result.items():
        sys.stdout.write(f"{name:>28}  {value}\n")


if __name__ == "__main__":
    command()
