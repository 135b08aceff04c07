"""``hearth eval``: its flags, which are read without the libraries that sampling needs."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import tyro

from training.config.json_flag import JsonObject


@dataclass(kw_only=True)
class EvalOptions:
    """Sample answers of models, score them, and compare the models."""

    models: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Runs (their newest model), folders, hub ids, or deployments of the platform that HEARTH_URL
    names; each is set beside the first."""
    dataset: str | None = None
    """Rows: a JSONL, Parquet or CSV file, a folder of them, an http(s) URL of JSONL, or
    hf:ORG/NAME[/CONFIG][:SPLIT] of the Hugging Face hub."""
    columns: dict[str, str] = field(default_factory=dict[str, str])
    """Which column of the dataset a field of the row is."""
    environment: str | None = None
    """Tasks in place of a dataset, as LIBRARY:NAME or MODULE:CLASS; their held-out seeds."""
    environment_args: JsonObject = field(default_factory=dict[str, Any])
    """What the environment is made with."""
    max_rows: int | None = None
    """Rows to use, the first ones; None uses all. An environment has 100 then."""
    reward: str | None = None
    """Reward function, as MODULE:FUNCTION; None compares the marked answer with ground_truth."""
    reward_timeout_s: float | None = None
    """Seconds that the reward of one answer may take, off the event loop; None: no limit."""
    reward_errors: Literal["raise", "drop"] = "raise"
    """What a reward that fails or is late does: end the evaluation, or leave the answer out."""
    samples: int = 1
    """Answers to each row; pass@k is told for k = 1, 2, 4, ... up to it."""
    max_completion_tokens: int = 1024
    """Longest answer, in tokens."""
    temperature: float = 1.0
    """0 always takes the likeliest token."""
    seed: int = 0
    """Of the sampling: the same answers with the same seed."""
    max_concurrent: int = 32
    """Sampling requests in flight."""
    log_path: str = "runs/eval"
    """Folder that keeps the answers of each model, for hearth view."""
    json: bool = False
    """Print one JSON object in place of tables."""


def evaluate(arguments: list[str] | None = None) -> int:
    """Sample answers of models, score them, and compare: pass@k with intervals."""
    given = sys.argv[1:] if arguments is None else arguments
    options = tyro.cli(EvalOptions, args=given, prog="hearth eval")
    from training.run.command import run_to_exit_code
    from training.run.model_evaluation import evaluate_and_report

    return run_to_exit_code(lambda: evaluate_and_report(options))
