"""One run of ``rl_loop`` in a process of its own: FOLDER RANKS."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from training.quickstart import MODEL, TRAIN_ROWS
from training.recipes.rl_loop import Config, main
from training.utils import DeployConfig, TrainerConfig


def spread(text: str, row: Any) -> float:
    """A reward that tells almost any two answers apart."""
    return sum(map(ord, text)) % 97 / 97


def config(folder: Path, **changes: Any) -> Config:
    """Two steps on the shipped model, with a reference."""
    small: dict[str, Any] = {
        "log_path": str(folder),
        "base_model": str(MODEL),
        "dataset": str(TRAIN_ROWS),
        "max_rows": 4,
        "completions_per_prompt": 4,
        "prompt_groups_per_step": 2,
        "max_completion_tokens": 16,
        "max_seq_len": 128,
        "learning_rate": 1e-4,
        "kl_beta": 0.01,
        "truncated_completions": "score",
        "deployment": DeployConfig(tokenizer_model=str(MODEL)),
    }
    return Config(**small | changes)


if __name__ == "__main__":
    trainer = TrainerConfig(ranks=int(sys.argv[2]))
    main(config(Path(sys.argv[1]), placement="process", trainer=trainer), reward_fn=spread)
