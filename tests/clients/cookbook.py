"""Runs the recipes of tinker-cookbook, unmodified, against a platform of this checkout.

    python -m tests.clients.cookbook --python ENVIRONMENT/bin/python

Every model and data set is a small folder named like its hub id. The table at the end says what
each recipe did, and what was checked.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.clients.model import make_work_folder, run_program

from hearth.local import tinker_server

_AS_ARROW = """
import pathlib, sys, datasets
for file in pathlib.Path(sys.argv[1]).rglob("*.jsonl"):
    datasets.Dataset.from_json(str(file)).save_to_disk(str(file.with_suffix("")))
"""
"""Writes data sets in the form of the only recipe that wants it, in the recipes' environment."""
_BASE, _CHAT = "model_name=Qwen/Qwen3-8B-Base", "model_name=Qwen/Qwen3-8B"
_RENDERER = "renderer_name=qwen3_disable_thinking"
_RL = ("groups_per_batch=4", "group_size=4", "max_tokens=8", "max_steps=2")
_KL = "optim/kl_sample_train_v1"
Metrics = list[dict[str, Any]]


def _is_on_policy(metrics: Metrics) -> str:
    """the KL of sampler and trainer is below 1e-6 in each step."""
    values = [line[_KL] for line in metrics if _KL in line]
    assert values, f"no {_KL} in {metrics}"
    assert all(abs(value) < 1e-6 for value in values), values
    return f"|{_KL}| <= {max(map(abs, values)):.1e}"


def _is_finite(metrics: Metrics) -> str:
    """the loss is finite in each step."""
    values = [line["train_mean_nll"] for line in metrics if "train_mean_nll" in line]
    assert values, f"no loss in {metrics}"
    assert all(math.isfinite(value) for value in values), values
    return f"loss {values[0]:.3f}"


def _is_ln_2(metrics: Metrics) -> str:
    """the first loss is ln 2."""
    loss = next(line["dpo_loss"] for line in metrics if "dpo_loss" in line)
    assert abs(loss - math.log(2)) < 1e-4, loss
    return f"first loss {loss:.5f} = ln 2"


def _has_steps(metrics: Metrics) -> str:
    """metrics were written."""
    assert len(metrics) >= 1, "no metrics were written"
    return f"{len(metrics)} lines of metrics"


def _is_brier(metrics: Metrics) -> str:
    """each loss is in 0..2."""
    losses = [line["train/loss"] for line in metrics if "train/loss" in line]
    assert losses, f"no loss in {metrics}"
    assert all(0 <= loss <= 2 for loss in losses), losses
    return f"Brier loss {losses[0]:.3f} in 0..2"


def _has_ended(metrics: Metrics) -> str:
    """nothing."""
    del metrics
    return "ended"


@dataclass(frozen=True)
class Recipe:
    """One command, and what its metrics must show."""

    name: str
    module: str
    arguments: tuple[str, ...]
    check: Callable[[Metrics], str] = _has_steps
    has_log_choice: bool = True
    """Whether it asks what to do with an existing log."""
    log: str | None = "log_path"
    """The setting that says where it writes; None: below the home folder."""


RECIPES = (
    Recipe("math_rl, arithmetic", "math_rl.train", ("env=arithmetic", _BASE, *_RL), _is_on_policy),
    Recipe(
        "math_rl, arithmetic, importance_sampling",
        "math_rl.train",
        ("env=arithmetic", _BASE, "loss_fn=importance_sampling", *_RL),
        _is_on_policy,
    ),
    Recipe(
        "math_rl, arithmetic, ppo",
        "math_rl.train",
        ("env=arithmetic", _BASE, "loss_fn=ppo", *_RL),
        _is_on_policy,
    ),
    Recipe("math_rl, gsm8k", "math_rl.train", ("env=gsm8k", _BASE, *_RL), _is_on_policy),
    Recipe("math_rl, math", "math_rl.train", ("env=math", _BASE, *_RL), _is_on_policy),
    Recipe("math_rl, polaris", "math_rl.train", ("env=polaris", _BASE, *_RL), _is_on_policy),
    Recipe("math_rl, deepmath", "math_rl.train", ("env=deepmath", _BASE, *_RL), _is_on_policy),
    Recipe(
        "math_rl, off policy",
        "math_rl.train",
        ("env=arithmetic", _BASE, "max_steps_off_policy=1", *_RL),
    ),
    Recipe(
        "rl_loop",
        "rl_loop",
        (_BASE, "batch_size=4", "group_size=4", "max_tokens=8", "max_steps=2"),
        has_log_choice=False,
    ),
    Recipe(
        "rl_basic",
        "rl_basic",
        (_BASE, "max_tokens=8", "max_steps=1"),
        _is_on_policy,
        has_log_choice=False,
    ),
    Recipe("sl_loop", "sl_loop", (_BASE, "batch_size=64"), _is_finite, has_log_choice=False),
    Recipe("sl_basic", "sl_basic", (_BASE, "max_steps=2"), _is_finite, has_log_choice=False),
    Recipe(
        "chat_sl, no_robots",
        "chat_sl.train",
        (_BASE, "dataset=no_robots", "batch_size=32", "max_steps=3"),
        _is_finite,
    ),
    Recipe(
        "chat_sl, tulu3",
        "chat_sl.train",
        (_BASE, "dataset=tulu3", "batch_size=32", "max_steps=3"),
        _is_finite,
    ),
    Recipe(
        "preference.dpo, hhh",
        "preference.dpo.train",
        (_BASE, "dataset=hhh", "batch_size=16", "max_steps=3", "renderer_name=role_colon"),
        _is_ln_2,
    ),
    Recipe(
        "preference.dpo, helpsteer3",
        "preference.dpo.train",
        (_BASE, "dataset=helpsteer3", "batch_size=16", "max_steps=3", "renderer_name=role_colon"),
        _is_ln_2,
    ),
    Recipe(
        "preference.shorter",
        "preference.shorter.train",
        (_CHAT, _RENDERER, "batch_size=4", "group_size=4", "max_tokens=8", "max_steps=2"),
        _is_on_policy,
    ),
    Recipe(
        "preference.rlhf",
        "preference.rlhf.rlhf_pipeline",
        (
            "base_model=Qwen/Qwen3-8B-Base",
            "short_name=tiny",
            "batch_size=16",
            "rl_max_tokens=8",
            "max_steps=1",
            "lora_rank=8",
        ),
        has_log_choice=False,
        log=None,
    ),
    Recipe(
        "multiplayer_rl.guess_number",
        "multiplayer_rl.guess_number.train",
        (_CHAT, _RENDERER, "batch_size=4", "group_size=4", "max_tokens=8", "max_steps=2"),
        _is_on_policy,
    ),
    Recipe(
        "distillation.on_policy_distillation, deepmath",
        "distillation.on_policy_distillation",
        (_BASE, "teacher_model=Qwen/Qwen3-8B", "dataset=deepmath", "lora_rank=8", *_RL),
        _is_on_policy,
    ),
    Recipe(
        "distillation.on_policy_distillation, tulu3",
        "distillation.on_policy_distillation",
        (_BASE, "teacher_model=Qwen/Qwen3-8B", "dataset=tulu3", "lora_rank=8", *_RL),
        _is_on_policy,
    ),
    Recipe(
        "distillation.on_policy_multi_teacher",
        "distillation.on_policy_multi_teacher",
        (
            _BASE,
            "deepmath_teacher_model=Qwen/Qwen3-8B",
            "tulu3_teacher_model=Qwen/Qwen3-8B",
            "deepmath_groups_per_batch=2",
            "tulu3_groups_per_batch=2",
            "group_size=2",
            "lora_rank=8",
            "max_tokens=8",
            "max_steps=2",
        ),
    ),
    Recipe(
        "distillation.off_policy_reasoning",
        "distillation.off_policy_reasoning",
        (
            _BASE,
            "renderer_name=role_colon",
            "batch_size=16",
            "lora_rank=8",
            "max_steps=2",
            "buffer_size=64",
            "max_prompts=128",
        ),
        _is_finite,
    ),
    Recipe(
        "sdft, sciknoweval",
        "sdft.train",
        (
            _CHAT,
            _RENDERER,
            "dataset=sciknoweval",
            "eval_every=0",
            "groups_per_batch=4",
            "max_tokens=8",
            "lora_rank=8",
            "max_steps=2",
        ),
    ),
    Recipe(
        "sdft, toolalpaca",
        "sdft.train",
        (
            _CHAT,
            _RENDERER,
            "dataset=toolalpaca",
            "eval_every=0",
            "groups_per_batch=4",
            "max_tokens=8",
            "lora_rank=8",
            "max_steps=2",
        ),
    ),
    Recipe(
        "rl_numerics_check",
        "rl_numerics_check.train",
        (
            _CHAT,
            _RENDERER,
            "group_size=2",
            "groups_per_batch=2",
            "max_tokens=8",
            "max_trajectory_tokens=2048",
            "max_steps=1",
        ),
    ),
    Recipe(
        "rubric",
        "rubric.train",
        (
            _CHAT,
            _RENDERER,
            "grader_llm_name=Qwen/Qwen3-8B",
            "grader_renderer_name=qwen3_disable_thinking",
            "groups_per_batch=2",
            "train_group_size=2",
            "max_tokens=8",
            "max_steps=1",
            "train_jsonl_path=rubric.jsonl",
            "test_jsonl_path=rubric.jsonl",
        ),
    ),
    Recipe(
        "prompt_distillation",
        "prompt_distillation.train",
        (_CHAT, _RENDERER, "file_path=prompts.jsonl", "batch_size=8", "max_steps=2"),
        _is_finite,
    ),
    Recipe(
        "prompt_distillation.create_data",
        "prompt_distillation.create_data",
        (),
        _has_ended,
        has_log_choice=False,
        log="output_file",
    ),
    Recipe(
        "multiplayer_rl.twenty_questions",
        "multiplayer_rl.twenty_questions.train",
        (
            _CHAT,
            _RENDERER,
            "batch_size=2",
            "group_size=2",
            "max_tokens=8",
            "num_epochs=1",
            "eval_every=0",
            "max_steps=1",
        ),
        _is_on_policy,
    ),
    Recipe(
        "rubric.prometheus_experimental, stable_reinforce",
        "rubric.prometheus_experimental",
        (
            _CHAT,
            _RENDERER,
            "grader_llm_name=Qwen/Qwen3-8B",
            "grader_renderer_name=qwen3_disable_thinking",
            "groups_per_batch=2",
            "train_group_size=2",
            "lora_rank=8",
            "max_tokens=8",
            "eval_every=0",
            "max_steps=1",
        ),
    ),
    Recipe(
        "forecasting",
        "forecasting.train",
        (
            _CHAT,
            _RENDERER,
            "data_path=forecasts.csv",
            "groups_per_batch=2",
            "group_size=2",
            "lora_rank=8",
            "max_tokens=8",
            "eval_every=0",
            "max_steps=2",
        ),
        _is_on_policy,
    ),
    Recipe(
        "decisions.forecasting",
        "decisions.forecasting",
        (
            _CHAT,
            "renderer_name=qwen3",
            "data_path=forecasts.csv",
            "batch_size=4",
            "lora_rank=8",
            "max_steps=2",
        ),
        _is_brier,
    ),
    Recipe(
        "sdft.run_continual_learning",
        "sdft.run_continual_learning",
        (
            _CHAT,
            "data_dir=continual",
            "methods=sft,sdft_topk",
            "learning_rates=1e-3",
            "batch_size=16",
            "max_tokens=64",
            "lora_rank=8",
        ),
        has_log_choice=False,
        log="log_root",
    ),
    Recipe(
        "chat_sl.sweep",
        "chat_sl.sweep",
        (
            "recipe=sft",
            f"base.{_BASE}",
            "base.dataset=no_robots",
            "base.batch_size=32",
            "training_budget_examples=64",
            "learning_rates=[1e-4,1e-3]",
            "lora_ranks=[8]",
        ),
        _is_finite,
        has_log_choice=False,
        log="sweep_dir",
    ),
)

NOT_RUN = {
    "audio.*": "needs audio input",
    "vlm_classifier.*": "needs images",
    "code_rl": "needs a sandbox service",
    "harbor_rl, distillation.*_harbor_multi_turn": "needs containers",
    "search_tool": "needs a vector database and an embedding service",
    "verifiers_rl": "needs an environment from the hub of verifiers",
    "multiplayer_rl.text_arena": "needs the textarena package, whose games download word lists",
    "decisions.demo": "asks for a model that the cookbook names alone",
    "true_thinking_score": "asks for a reasoning model's own numbers",
}


@dataclass(frozen=True)
class Outcome:
    """What a recipe did."""

    name: str
    is_right: bool
    seconds: float
    says: str


def run(recipe: Recipe, python: Path, url: str, work: Path) -> Outcome:
    """Run one recipe in the work folder, and check its metrics."""
    logs = work / "logs" / recipe.name.replace(" ", "-").replace(",", "")
    choice = ["behavior_if_log_dir_exists=delete"] if recipe.has_log_choice else []
    environment = {
        **os.environ,
        "TINKER_BASE_URL": url,
        "TINKER_API_KEY": "tml-any",
        "TINKER_TELEMETRY": "0",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "WANDB_MODE": "disabled",
        "HOME": str(work / "home"),
    }
    begin_s = time.monotonic()
    module = f"tinker_cookbook.recipes.{recipe.module}"
    log_choice = [] if recipe.log is None else [f"{recipe.log}={logs}"]
    if not recipe.has_log_choice:
        shutil.rmtree(logs, ignore_errors=True)
    argv = [python, "-m", module, *recipe.arguments, *log_choice, *choice]
    code = run_program(argv, work, environment, work / "output.log")
    seconds = time.monotonic() - begin_s
    if code != 0:
        lines = (work / "output.log").read_text(errors="replace").splitlines()
        return Outcome(recipe.name, False, seconds, f"exit {code}: {lines[-1][:200]}")
    metrics = [
        json.loads(line)
        for file in (work / "home" if recipe.log is None else logs).rglob("metrics.jsonl")
        for line in file.read_text(encoding="utf-8").splitlines()
    ]
    try:
        return Outcome(recipe.name, True, seconds, recipe.check(metrics))
    except (AssertionError, KeyError, StopIteration) as error:
        return Outcome(recipe.name, False, seconds, f"{type(error).__name__}: {str(error)[:300]}")


def main() -> int:
    """Run the recipes that are asked for, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--python", type=Path, required=True, help="of tinker-cookbook's environment"
    )
    parser.add_argument("--work", type=Path, default=Path("runs/cookbook"))
    parser.add_argument("--only", default="", help="recipes whose name has this text")
    parser.add_argument("--json", type=Path, help="where the outcomes are written")
    options = parser.parse_args()
    work, python = options.work.resolve(), Path.cwd() / options.python
    make_work_folder(work)
    subprocess.run([python, "-c", _AS_ARROW, str(work / "continual")], check=True)
    os.chdir(work)
    outcomes: list[Outcome] = []
    with tinker_server(work / "platform") as url:
        for recipe in RECIPES:
            if options.only in recipe.name:
                outcomes.append(run(recipe, python, url, work))
                last = outcomes[-1]
                sign = "runs" if last.is_right else "FAILS"
                print(f"| {last.name} | {sign} | {last.seconds:.0f} s | {last.says} |", flush=True)
    for name, why in NOT_RUN.items():
        print(f"| {name} | not run | | {why} |")
    right = sum(outcome.is_right for outcome in outcomes)
    print(f"{right} of {len(outcomes)} recipes run")
    if options.json is not None:
        options.json.write_text(json.dumps([vars(outcome) for outcome in outcomes], indent=1))
    return 0 if right == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
