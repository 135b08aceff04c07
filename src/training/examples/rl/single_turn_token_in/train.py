"""Train the shipped model on arithmetic whose prompts are tokenized before the run.

``python -m training.examples.rl.single_turn_token_in.train``; every field of the recipe's config
is a flag.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from training.data.rows import load_rows, prompt_messages
from training.examples.rl.single_turn_token_in.rollout import make_rollout_fn
from training.examples.rl.trend import reward_trend
from training.platform.run_infra import load_tokenizer
from training.quickstart import MODEL, TRAIN_ROWS
from training.recipes.async_rl_loop import Config, main
from training.run.command import run_command
from training.utils import DeployConfig

DESCRIPTION = "Train the shipped model on arithmetic, with prompts that are tokenized already."


def default_config() -> Config:
    """Settings that learn on the shipped model within a minute."""
    return Config(
        log_path="runs/single_turn_token_in",
        base_model=str(MODEL),
        dataset=str(TRAIN_ROWS),
        max_rows=512,
        completions_per_prompt=8,
        prompt_groups_per_step=16,
        max_completion_tokens=16,
        max_seq_len=128,
        policy_loss="grpo",
        kl_beta=0.0,
        learning_rate=5e-4,
        weight_decay=0.0,
        max_head_offpolicy_versions=0,
        deployment=DeployConfig(tokenizer_model=str(MODEL), max_batch_size=128),
    )


def tokenized_rows(config: Config) -> list[dict[str, Any]]:
    """The dataset's rows as ``{"prompt_token_ids": [...], "ground_truth": "..."}``."""
    tokenizer = load_tokenizer(config.deployment)
    return [
        {
            "prompt_token_ids": tokenizer.apply_chat_template(
                prompt_messages(row), tokenize=True, add_generation_prompt=True, return_dict=False
            ),
            "ground_truth": row["ground_truth"],
        }
        for row in load_rows(config.dataset, config.max_rows)
    ]


def train(config: Config) -> None:
    """Train, and print how the reward went."""
    done = main(config, rollout_fn_factory=make_rollout_fn, rows=tokenized_rows(config))
    Console(soft_wrap=True).print(reward_trend(done.log_path), highlight=False)


def command(arguments: Sequence[str] | None = None) -> int:
    """Train as the flags say."""
    program = "python -m training.examples.rl.single_turn_token_in.train"
    return run_command(default_config(), train, arguments, program=program, description=DESCRIPTION)


if __name__ == "__main__":
    sys.exit(command())
