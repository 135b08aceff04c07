"""Two stages in one program: supervised fine-tuning on right answers, then GRPO from its model.

    python docs/examples/sft_then_rl.py [FOLDER]

trains the shipped tiny model in about a minute, in two run folders below FOLDER. Given again after
a kill it goes on where it was, in either stage. docs/recipes_around_rl.md explains the recipes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from training.data.rows import load_rows
from training.quickstart import HELDOUT_ROWS, MODEL, TRAIN_ROWS
from training.recipes import rl_loop, sft_loop
from training.run.state import RunSummary

HELD_OUT = 64


def train(folder: Path, sft_rows: int = 512, rl_rows: int = 512) -> tuple[RunSummary, RunSummary]:
    """The summaries of both stages."""
    rows = load_rows(str(TRAIN_ROWS), sft_rows + rl_rows)
    taught = sft_loop.main(
        sft_loop.Config(
            log_path=str(folder / "sft"),
            base_model=str(MODEL),
            batch_size=32,
            learning_rate=3e-4,
            lr_schedule="cosine",
            warmup_steps=0.1,
        ),
        [with_answer(row) for row in rows[:sft_rows]],
        eval_rows=[with_answer(row) for row in load_rows(str(HELDOUT_ROWS), HELD_OUT)],
    )
    rewarded = rl_loop.main(
        rl_loop.Config(
            log_path=str(folder / "rl"),
            base_model=str(taught.model_path),  # with LoRA: warm_start_from_adapter
            completions_per_prompt=8,
            prompt_groups_per_step=16,
            max_completion_tokens=16,
            max_seq_len=128,
            kl_beta=0.0,
            learning_rate=3e-4,
            lr_schedule="linear",
            eval_dataset=str(HELDOUT_ROWS),
            eval_rows=HELD_OUT,
        ),
        rows[sft_rows:],
    )
    return taught, rewarded


def with_answer(row: dict[str, Any]) -> dict[str, Any]:
    """A row with its right answer, as ``sft_loop`` reads it."""
    answer = {"role": "assistant", "content": f"<answer>{row['ground_truth']}</answer>"}
    return {"messages": [*row["messages"], answer]}


if __name__ == "__main__":
    train(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/sft_then_rl"))
