"""What the recipes teach small models: tasks of reasoning-gym, the losses off-policy, a teacher.

    python benchmarks/teaching.py --into runs/teaching [--parts tasks losses distill] [--seeds 3]

``sft_loop`` makes the models that all begin with, from random weights: a small one that answers
some of the three tasks, and a larger one, trained longer, that teaches. *tasks*: each task by
``rl_loop`` and by ``async_rl_loop`` (O = 1). *losses*: the seven losses on one task by
``async_rl_loop`` at O = 1, 2, 4 and 8, with equal samples. *distill*: the larger model teaches the
smaller by ``distillation_loop``, both ways.

A run that has ended stays in the folder and is not run again, so the whole may be done in pieces;
``hearth view runs/teaching`` shows all of them. Held-out tasks are answered once each before,
between and after. *KL spent* is that of the last policy to the first, in nats per token, on the
recorded ones of the last held-out answers.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import orjson
import pyarrow.parquet as pq
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from hearth.losses.catalog import POLICY_LOSSES
from hearth.records.layout import TIMELINE, list_files
from hearth.records.timeline import read_timeline
from training.environments.find import find_environment
from training.quickstart import MODEL
from training.recipes import async_rl_loop, distillation_loop, rl_loop, sft_loop

O_VALUES = (1, 2, 4, 8)
LOSSES_TASK = "spelling"
LOSSES_RATE = 3e-4
"""A learning rate at which they begin to differ."""
HELD_OUT_ROWS = 256
KEPT = {
    "type",
    "step",
    "train/loss",
    "train/mean_loss",
    "train/teacher_kl",
    "train/grad_norm",
    "train/ppo_clip_frac",
    "rollout/raw_reward",
    "rollout/entropy",
    "signal/useful_row_ratio",
    "version/sample_staleness_mean",
    "eval/reward",
    "eval/accuracy",
    "eval/loss",
}
"""Metrics of the runs that are kept with the results."""
KEPT_FACTS = {"type", "time", "step", "name", "run", "recipe"}
"""Of a run's start and end."""
ROW_SEED = 2**20
"""Tasks of SFT have seeds from here on: RL sees others."""


@dataclass(frozen=True)
class Task:
    """A task of reasoning-gym."""

    name: str
    arguments: dict[str, Any]
    """Fields of its config."""


_SHORT = {"system_prompt": ""}
TASKS = {
    "arithmetic": Task(
        "basic_arithmetic",
        {"max_terms": 2, "max_digits": 1, "operators": ["+", "-"], "allow_parentheses": False},
    ),
    "spelling": Task("spell_backward", {"min_word_len": 3, "max_word_len": 5}),
    "counting": Task("letter_counting", {"min_words": 1, "max_words": 4}),
}
SIZES = {
    "small": {},
    "large": {
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 5,
        "layer_types": ["full_attention"] * 5,
    },
}
Row = dict[str, Any]
Records = list[dict[str, float]]


class Bench:
    """The folder of all runs, and how they are made where they are missing."""

    def __init__(self, folder: Path, steps: int, sft_rows: int, seeds: int) -> None:
        self.folder = folder
        self.steps = steps
        self.sft_rows = sft_rows
        self.seeds = range(seeds)

    def begin(self, size: str) -> Path:
        """The model that SFT made of random weights; the larger one sees twice as many rows."""
        first = self.folder / "models" / size

        def train() -> None:
            torch.manual_seed(0)
            shape = Qwen3Config.from_pretrained(MODEL)
            shape.update(SIZES[size])
            Qwen3ForCausalLM(shape).save_pretrained(first)
            AutoTokenizer.from_pretrained(MODEL).save_pretrained(first)
            share = self.sft_rows * (2 if size == "large" else 1) // len(TASKS)
            rows = [row for task in TASKS.values() for row in make_answers(task, share)]
            random.Random(0).shuffle(rows)
            held_out = [
                row for task in TASKS.values() for row in make_answers(task, 64, held_out=True)
            ]
            sft_loop.main(config, rows, eval_rows=held_out)

        config = sft_loop.Config(
            base_model=str(first),
            batch_size=64,
            learning_rate=1e-3,
            lr_schedule="cosine",
            warmup_steps=0.05,
            max_seq_len=192,
            eval_every=100,
        )
        self.run(f"sft-{size}", train, config)
        return self.folder / f"sft-{size}" / "models" / "final"

    def run(self, name: str, train: Callable[[], Any], config: Any) -> Records:
        """The records of a run, which is made where it has not ended."""
        config.log_path = str(self.folder / name)
        self.find_seconds(name, train)
        lines = (self.folder / name / "metrics.jsonl").read_bytes().splitlines()
        return [orjson.loads(line) for line in lines]

    def find_seconds(self, name: str, train: Callable[[], Any]) -> float:
        """How long a run took."""

        def measure() -> float:
            began = time.monotonic()
            train()
            return time.monotonic() - began

        return remember(self.folder / name / "seconds.json", measure)

    def set_rl(self, config: Any, task: Task, model: Path, seed: int) -> Any:
        """What all runs of RL have in common."""
        config.base_model = str(model)
        config.environment = f"reasoning_gym:{task.name}"
        config.environment_args = {**task.arguments, **_SHORT}
        config.max_rows = 16 * self.steps
        config.completions_per_prompt = 8
        config.prompt_groups_per_step = 16
        config.max_completion_tokens = 24
        config.max_seq_len = 192
        config.learning_rate = 1e-4
        config.kl_beta = 0.0
        config.seed = seed
        config.eval_rows = HELD_OUT_ROWS
        config.eval_every = max(1, self.steps // 8)
        config.no_signal_patience = None
        config.record_samples = "sampled:0.05"
        return config


def make_answers(task: Task, count: int, *, held_out: bool = False) -> list[Row]:
    """Rows of a task with their right answers, as ``sft_loop`` reads them."""
    settings = {**task.arguments, **_SHORT, "seed": ROW_SEED}
    tasks = find_environment(f"reasoning_gym:{task.name}", settings)
    return [
        {
            "messages": [
                *row["messages"],
                {"role": "assistant", "content": f"<answer>{row['ground_truth']}</answer>"},
            ]
        }
        for row in tasks.rows(count, held_out=held_out, whole=True)
    ]


def measure_tasks(bench: Bench) -> list[str]:
    """Held-out reward before and after RL, for each task and recipe."""
    model = bench.begin("small")
    lines = [
        "| task | recipe | held-out reward, means over the seeds | last, each seed | seconds |"
    ]
    lines.append("|---|---|---|---|---:|")
    for name, task in TASKS.items():
        for recipe in (rl_loop, async_rl_loop):
            runs: list[Records] = []
            spent: list[float] = []
            label = recipe.__name__.rpartition(".")[2]
            for seed in bench.seeds:
                config = bench.set_rl(recipe.Config(), task, model, seed)
                if recipe is async_rl_loop:
                    config.max_head_offpolicy_versions = 1
                run, train = f"{name}-{label}-{seed}", partial(recipe.main, config)
                runs.append(bench.run(run, train, config))
                spent.append(bench.find_seconds(run, train))
            rewards = [list_rewards(records) for records in runs]
            last = ", ".join(f"{each[-1]:.3f}" for each in rewards)
            took = statistics.fmean(spent)
            lines.append(f"| {name} | `{label}` | {draw_curve(rewards)} | {last} | {took:.0f} |")
    return lines


def measure_losses(bench: Bench) -> list[str]:
    """Held-out reward and the KL spent, for each loss and O; means over the seeds."""
    model, task = bench.begin("small"), TASKS[LOSSES_TASK]
    lines = ["| loss | " + " | ".join(f"O = {o}" for o in O_VALUES) + " |"]
    lines.append("|---|" + "---|" * len(O_VALUES))
    for loss in POLICY_LOSSES:
        cells: list[str] = []
        for o in O_VALUES:
            rewards: list[float] = []
            kls: list[float] = []
            for seed in bench.seeds:
                config = bench.set_rl(async_rl_loop.Config(), task, model, seed)
                config.policy_loss = loss
                config.learning_rate = LOSSES_RATE
                config.max_rows = 4 * bench.steps
                config.eval_every = bench.steps // 16
                config.max_head_offpolicy_versions = o
                run = f"loss-{loss}-{o}-{seed}"
                records = bench.run(run, partial(async_rl_loop.main, config), config)
                rewards.append(list_rewards(records)[-1])
                kl = partial(measure_kl, bench.folder / run, model)
                kls.append(remember(bench.folder / run / "kl.json", kl))
            cells.append(f"{statistics.fmean(rewards):.3f} (KL {statistics.fmean(kls):.2f})")
        lines.append(f"| `{loss}` | " + " | ".join(cells) + " |")
    return lines


def measure_distillation(bench: Bench) -> list[str]:
    """Held-out reward of a student before and after its teacher, each way; means over the seeds."""
    teacher, student = bench.begin("large"), bench.begin("small")
    rewards = {
        who: [
            remember(model.parents[1] / f"{name}.json", partial(ask, model, task))
            for name, task in TASKS.items()
        ]
        for who, model in (("teacher", teacher), ("student", student))
    }
    for loss in ("reverse_kl", "top_k"):
        rewards[f"student by `{loss}`"] = [
            statistics.fmean(
                list_rewards(distill(bench, f"distill-{loss}-{name}-{seed}", seed, task, loss))[-1]
                for seed in bench.seeds
            )
            for name, task in TASKS.items()
        ]
    lines = ["| model | " + " | ".join(TASKS) + " |", "|---|" + "---:|" * len(TASKS)]
    for name, values in rewards.items():
        lines.append(f"| {name} | " + " | ".join(f"{value:.3f}" for value in values) + " |")
    return lines


def distill(
    bench: Bench, name: str, seed: int, task: Task, loss: Literal["reverse_kl", "top_k"]
) -> Records:
    """The records of a run in which the larger model teaches the smaller one a task."""
    config = bench.set_rl(distillation_loop.Config(), task, bench.begin("small"), seed)
    config.teacher_model = str(bench.begin("large"))
    config.distill_loss = loss
    return bench.run(name, partial(distillation_loop.main, config), config)


def ask(model: Path, task: Task) -> float:
    """The held-out reward of a model, by ``hearth eval``."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "hearth", "eval", str(model), "--json"]
        command += ["--environment", f"reasoning_gym:{task.name}", "--log-path", folder]
        command += ["--environment-args", json.dumps({**task.arguments, **_SHORT})]
        command += ["--max-rows", str(HELD_OUT_ROWS), "--max-completion-tokens", "24"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout)["models"][0]["reward"]["mean"])


def list_rewards(records: Records) -> list[float]:
    """The mean reward of held-out tasks, of each evaluation in turn."""
    return [record["eval/reward"] for record in records if "eval/reward" in record]


def draw_curve(rewards: Sequence[Sequence[float]]) -> str:
    """The means over runs, at each evaluation that all of them have."""
    return " ".join(f"{statistics.fmean(values):.3f}" for values in zip(*rewards, strict=False))


def measure_kl(run: Path, first: Path) -> float:
    """Nats per token from a run's last policy to ``first``, on its last recorded answers."""
    (*_, last) = list_files(run, "eval")
    samples = pq.read_table(last.path, columns=["tokens", "prompt_len"]).to_pylist()
    models = [
        AutoModelForCausalLM.from_pretrained(folder).eval()
        for folder in (run / "models" / "final", first)
    ]
    kls: list[float] = []
    with torch.no_grad():
        for sample in samples:
            tokens = torch.tensor(sample["tokens"])[None, :-1]
            policy, base = (model(tokens).logits[0].log_softmax(-1) for model in models)
            kl = (policy.exp() * (policy - base)).sum(-1)
            kls += kl[sample["prompt_len"] - 1 :].tolist()
    return statistics.fmean(kls)


def remember(file: Path, measure: Callable[[], float]) -> float:
    """The number in ``file``, which is measured once."""
    if not file.exists():
        file.write_bytes(orjson.dumps(measure()))
    return float(orjson.loads(file.read_bytes()))


def keep_small(folder: Path, into: Path) -> None:
    """Copy what ``hearth view`` shows of each run: no weights, and some of the metrics."""
    for metrics in sorted(folder.glob("*/metrics.jsonl")):
        run = into / metrics.parent.name
        (run / "samples").mkdir(parents=True, exist_ok=True)
        lines = map(orjson.loads, metrics.read_bytes().splitlines())
        kept = [
            {
                name: float(f"{value:.7g}") if isinstance(value, float) else value
                for name, value in line.items()
                if name in KEPT
            }
            for line in lines
        ]
        (run / "metrics.jsonl").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in kept))
        events = [
            {name: value for name, value in event.items() if name in KEPT_FACTS}
            for event in read_timeline(metrics.parent, {"start", "end"})
        ]
        (run / TIMELINE).write_bytes(b"".join(orjson.dumps(event) + b"\n" for event in events))
        settings = (metrics.parent / "config.json").read_text().replace(f"{folder}/", "")
        (run / "config.json").write_text(settings)
        for file in list_files(metrics.parent, "eval")[-1:]:
            shutil.copy(file.path, run / "samples")
        for name in ("seconds.json", "kl.json", *(f"{task}.json" for task in TASKS)):
            if (metrics.parent / name).exists():
                shutil.copy(metrics.parent / name, run)


PARTS: Mapping[str, Callable[[Bench], list[str]]] = {
    "tasks": measure_tasks,
    "losses": measure_losses,
    "distill": measure_distillation,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the runs that are missing, and print a table of each part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", type=Path, default=Path("runs/teaching"))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--keep", type=Path, help="copy the small files of all runs there, and end")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--steps", type=int, default=128, help="of RL, of 128 samples each; half of it for a loss"
    )
    parser.add_argument("--sft-rows", type=int, default=32768)
    asked = parser.parse_args(arguments)
    if asked.keep is not None:
        keep_small(asked.into, asked.keep)
        return
    bench = Bench(asked.into, asked.steps, asked.sft_rows, asked.seeds)
    for part in asked.parts:
        sys.stdout.write("\n".join(["", f"### {part}", "", *PARTS[part](bench), ""]))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
