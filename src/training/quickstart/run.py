"""The quickstart's run and what it leaves behind."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table

from hearth.errors import ConfigError
from hearth.files import write_file
from hearth.telemetry import peak_rss_mb
from training.config.parts import DeployConfig, ResumeConfig
from training.quickstart import HELDOUT_ROWS, MODEL, TRAIN_ROWS
from training.quickstart.verb import QuickstartOptions
from training.recipes.rl_loop import Config, main
from training.run.evaluation import EvalResult, EvalSample
from training.run.metrics import read_records
from training.run.state import RunSummary

SHOWN_ROLLOUTS = 24
ROWS_PER_STEP = 16
EPOCHS = 2
MOST_STEPS = 128
"""The shipped rows are enough for them."""


def quickstart_config(options: QuickstartOptions) -> Config:
    """The recipe's config for the shipped model and rows.

    Raises:
        ConfigError: there are not as many rows as steps.
    """
    if not 1 <= options.steps <= MOST_STEPS:
        raise ConfigError(f"steps must be 1 to {MOST_STEPS}, got {options.steps}")
    return Config(
        log_path=options.log_path,
        resume=ResumeConfig(mode="never"),
        base_model=str(MODEL),
        dataset=str(TRAIN_ROWS),
        max_rows=ROWS_PER_STEP * options.steps // EPOCHS,
        epochs=EPOCHS,
        shuffle=True,
        seed=options.seed,
        completions_per_prompt=8,
        prompt_groups_per_step=ROWS_PER_STEP,
        max_completion_tokens=16,
        max_seq_len=128,
        max_concurrent=256,
        policy_loss="grpo",
        kl_beta=0.0,
        learning_rate=3e-4,
        weight_decay=0.0,
        eval_dataset=str(HELDOUT_ROWS),
        eval_every=16,
        eval_samples_per_prompt=2,
        output_model_id="quickstart",
        deployment=DeployConfig(tokenizer_model=str(MODEL), max_batch_size=128),
    )


def train_and_report(options: QuickstartOptions, started: float) -> dict[str, Any]:
    """Train, write plot, answers and summary into the folder, print the table.

    ``started`` is the ``time.perf_counter`` at which the command began.
    """
    called = time.perf_counter()
    done = main(quickstart_config(options))
    (_, before), (_, after) = done.evaluations[0], done.evaluations[-1]
    folder = done.log_path
    plot = _write_plot(folder, done) or "needs matplotlib: pip install 'hearth-rl[plot]'"
    _write_rollouts(folder / "rollouts_before.txt", before)
    _write_rollouts(folder / "rollouts_after.txt", after)
    summary: dict[str, Any] = {
        "accuracy_before": before.accuracy,
        "accuracy_after": after.accuracy,
        "steps": done.steps,
        "wall_s": round(time.perf_counter() - started, 2),
        "first_step_s": round(called - started + done.first_step_s, 2),
        "peak_rss_mb": round(peak_rss_mb(), 1),
        "seed": options.seed,
    }
    write_file(folder / "summary.json", orjson.dumps(summary, option=orjson.OPT_INDENT_2))
    _print_table(done, before, after, summary, plot)
    return summary


def _write_plot(folder: Path, done: RunSummary) -> Path | None:
    """Reward per step and held-out accuracy, as ``curve.png``; None where matplotlib is missing."""
    try:
        import matplotlib as mpl  # half a second to import, and only needed at the end
    except ModuleNotFoundError:
        return None
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    records = read_records(folder / "metrics.jsonl", "train")
    figure, axes = plt.subplots(figsize=(7, 4), dpi=120, layout="constrained")
    axes.plot(
        [record["step"] for record in records],
        [record["rollout/raw_reward"] for record in records],
        linewidth=1.2,
        alpha=0.8,
        label="reward of the step's samples",
    )
    axes.plot(
        [step for step, _ in done.evaluations],
        [result.accuracy for _, result in done.evaluations],
        marker="o",
        linewidth=1.8,
        label="held-out accuracy",
    )
    axes.set(xlabel="optimizer step", ylabel="share of right answers", ylim=(0, 1))
    axes.set_title("GRPO on the shipped model")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    path = folder / "curve.png"
    figure.savefig(path)
    plt.close(figure)
    return path


def _write_rollouts(path: Path, result: EvalResult) -> None:
    sample_of_row = {id(sample.row): sample for sample in reversed(result.samples)}
    samples = list(sample_of_row.values())[::-1][:SHOWN_ROLLOUTS]
    shown = "\n".join(_readable(sample) for sample in samples)
    right = f"{result.accuracy:.3f} of {len(result.samples)} held-out answers are right\n\n"
    path.write_text(right + shown, encoding="utf-8")


def _readable(sample: EvalSample) -> str:
    question = " / ".join(str(message["content"]) for message in sample.row["messages"])
    verdict = "right" if sample.reward > 0.5 else f"wrong, it is {sample.row['ground_truth']}"
    return f"question: {question}\nanswer:   {sample.text}\n          {verdict}\n"


def _print_table(
    done: RunSummary,
    before: EvalResult,
    after: EvalResult,
    summary: dict[str, Any],
    plot: Path | str,
) -> None:
    console = Console(soft_wrap=True)
    table = Table(
        "held-out rows, sampled at temperature 1", "before", "after", title_justify="left"
    )
    table.add_row("accuracy", f"{before.accuracy:.3f}", f"{after.accuracy:.3f}")
    lengths = [f"{result.metrics()['eval/response_len/mean']:.1f}" for result in (before, after)]
    table.add_row("answer length, tokens", *lengths)
    first, later = before.samples[0], after.samples[0]
    table.add_row(f"for example: {first.row['messages'][-1]['content']}", first.text, later.text)
    console.print(table)
    console.print(
        f"{done.steps} steps in {summary['wall_s']:.0f} s, the first after "
        f"{summary['first_step_s']:.0f} s; {summary['peak_rss_mb']:.0f} MB at the most",
        highlight=False,
    )
    for label, path in (
        ("metrics", done.log_path / "metrics.jsonl"),
        ("config", done.log_path / "config.json"),
        ("summary", done.log_path / "summary.json"),
        ("plot", plot),
        ("answers before", done.log_path / "rollouts_before.txt"),
        ("answers after", done.log_path / "rollouts_after.txt"),
        ("model", done.model_path),
    ):
        console.print(f"{label:<15} {path}", highlight=False, markup=False)
    command = shlex.join(["hearth", "view", str(done.log_path)])
    console.print(f"to see every answer, curve and token: {command}", highlight=False, markup=False)
