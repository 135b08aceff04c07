"""One GRPO step of TRL's ``GRPOTrainer``, on the model, rows and reward of ``grpo_step.py``.

It runs in an environment of its own (``make .venv-trl/.installed``), and takes the options of
``grpo_step.py``. A step is a batch of samples, whatever the number of optimizer steps in it.
Figures are means over the faster half of the steps after the warm-up.

    HF_HUB_OFFLINE=1 .venv-trl/bin/python benchmarks/trl_step.py --model 3m --fixed-len
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
from workload import digit_share, make_rows, model_folder, sgemm_gflops

ROWS = 512

Step = dict[str, float]


class Clock(transformers.TrainerCallback):
    """Adds up the seconds of a trainer's phases, and keeps them step by step."""

    def __init__(self, optimizer_steps: int) -> None:
        self.steps: list[Step] = []
        self._optimizer_steps = optimizer_steps
        self._now: Step = {}
        self._done = 0
        self._start_s = 0.0

    def time(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with its seconds added to a phase."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            start_s = time.perf_counter()
            result = function(*args, **kwargs)
            self.add(phase, time.perf_counter() - start_s)
            return result

        return timed

    def add(self, phase: str, amount: float) -> None:
        """Add seconds, or tokens, to the running step."""
        self._now[phase] = self._now.get(phase, 0.0) + amount

    def on_step_begin(self, *_args: Any, **_kwargs: Any) -> None:
        """Start a step with its first optimizer step."""
        if self._done == 0:
            self._now, self._start_s = {}, time.perf_counter()

    def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
        """End a step with its last optimizer step."""
        self._done = (self._done + 1) % self._optimizer_steps
        if self._done == 0:
            self.steps.append(self._now | {"step": time.perf_counter() - self._start_s})


class TimedTrainer(GRPOTrainer):
    """Reports its phases to a clock."""

    clock: Clock

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        generate = super()._generate_single_turn
        completions = self.clock.time("generate", generate)(*args, **kwargs)
        self.clock.add("tokens", sum(map(len, completions[0])))
        return completions

    def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
        score = super()._generate_and_score_completions
        return self.clock.time("rollout", score)(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Rollouts are in here, where a batch starts."""
        return self.clock.time("training", super().training_step)(*args, **kwargs)


def rewards(completions: list[str], **_columns: Any) -> list[float]:
    """As our recipe's reward function."""
    return [digit_share(text, {}) for text in completions]


def make_trainer(asked: argparse.Namespace, folder: str) -> TimedTrainer:
    """TRL's trainer for the options, as its users would set it up for a CPU."""
    batch = asked.prompts * asked.group
    is_half = asked.dtype == "bfloat16"
    config = GRPOConfig(
        output_dir=folder,
        model_init_kwargs={"dtype": asked.dtype},
        use_cpu=True,
        bf16=is_half,
        gradient_checkpointing=False,
        per_device_train_batch_size=batch // asked.minibatches,
        gradient_accumulation_steps=1,
        steps_per_generation=asked.minibatches,
        num_generations=asked.group,
        max_completion_length=asked.max_new,
        generation_kwargs={"min_new_tokens": asked.max_new} if asked.fixed_len else None,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        loss_type="dapo",
        beta=asked.beta,
        learning_rate=asked.lr,
        lr_scheduler_type="constant",
        max_steps=asked.steps * asked.minibatches,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        seed=asked.seed,
    )
    adapter = None
    if asked.lora_rank:
        adapter = LoraConfig(
            r=asked.lora_rank, lora_alpha=2 * asked.lora_rank, target_modules="all-linear"
        )
    model = str(model_folder(asked, Path(folder)))
    tokenizer = transformers.AutoTokenizer.from_pretrained(model, padding_side="left")
    rows = [
        {"prompt": row["messages"][-1]["content"]}
        for row in make_rows(ROWS, seed=asked.seed, prompt_pad=asked.prompt_pad)
    ]
    clock = Clock(asked.minibatches)
    TimedTrainer.clock = clock
    trainer = TimedTrainer(
        model=model,
        reward_funcs=rewards,
        args=config,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(rows),
        callbacks=[clock],
        peft_config=adapter,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def figures(steps: list[Step], asked: argparse.Namespace) -> dict[str, Any]:
    """What the measured steps come to."""
    batch = asked.prompts * asked.group
    measured = sorted(steps[asked.warmup :], key=lambda step: step["step"] / step["tokens"])
    used = measured[: max(1, len(measured) // 2)]
    mean = {name: sum(step[name] for step in used) / len(used) for name in used[0]}
    return {
        "samples_per_s": round(batch / mean["step"], 3),
        "gen_tokens_per_s": round(mean["tokens"] / mean["generate"], 1),
        "mean_len": round(mean["tokens"] / batch, 1),
        "step_s": round(mean["step"], 4),
        "generate_s": round(mean["generate"], 4),
        "ref_forward_s": round(mean["rollout"] - mean["generate"], 4),
        "fwd_bwd_s": round(mean["training"] - mean["rollout"], 4),
    }


def arguments() -> argparse.Namespace:
    """The command line: options of ``grpo_step.py`` with the same meaning."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="3m", help="a size, or a model's folder")
    parser.add_argument("--vocab", type=int, default=0)
    for name, usual in {"prompts": 8, "group": 8, "max-new": 64, "prompt-pad": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=usual)
    for name, usual in {"steps": 10, "warmup": 2, "threads": 2, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--minibatches", type=int, default=1)
    parser.add_argument("--lora-rank", type=int, default=0)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--beta", type=float, default=0.0)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--fixed-len", action="store_true")
    return parser.parse_args()


def command() -> None:
    """Measure and print one JSON object last."""
    asked = arguments()
    torch.set_num_threads(asked.threads)
    transformers.logging.set_verbosity_error()
    before = sgemm_gflops()
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(asked, folder)
        trainer.train()
    result = {"system": "trl"} | figures(trainer.clock.steps, asked)
    result["peak_rss_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    result["sgemm_gflops_before_after"] = (round(before, 1), round(sgemm_gflops(), 1))
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    command()
