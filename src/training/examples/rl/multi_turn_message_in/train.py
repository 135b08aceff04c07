"""Train the shipped model on arithmetic in which a wrong answer may be mended once.

``python -m training.examples.rl.multi_turn_message_in.train``; every field of the recipe's config
is a flag.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from training.data.rows import load_rows
from training.examples.rl.multi_turn_message_in.retries import Retries
from training.examples.rl.multi_turn_message_in.rollout import make_rollout_fn
from training.examples.rl.trend import reward_trend
from training.quickstart import MODEL, TRAIN_ROWS
from training.recipes.async_rl_loop import Config, main
from training.run.command import run_command
from training.utils import DeployConfig

DESCRIPTION = "Train the shipped model on arithmetic in which a wrong answer may be mended once."


def default_config() -> Config:
    """Settings that learn on the shipped model within a minute."""
    return Config(
        log_path="runs/multi_turn_message_in",
        base_model=str(MODEL),
        dataset=str(TRAIN_ROWS),
        max_rows=80,
        epochs=6,
        completions_per_prompt=8,
        prompt_groups_per_step=16,
        max_completion_tokens=16,
        max_seq_len=128,
        policy_loss="grpo",
        kl_beta=0.0,
        learning_rate=5e-4,
        weight_decay=0.0,
        max_head_offpolicy_versions=1,
        deployment=DeployConfig(tokenizer_model=str(MODEL), max_batch_size=256),
    )


def message_rows(config: Config) -> list[dict[str, Any]]:
    """The dataset's first ``max_rows`` rows with an answer of one character.

    The shipped model has never seen a second turn, and begins to learn one where it now and then
    hits the answer by luck. A model that has can take all rows.
    """
    rows = load_rows(config.dataset)
    return [row for row in rows if len(row["ground_truth"]) == 1][: config.max_rows]


def train(config: Config) -> None:
    """Train, and print how the reward and the second answers went."""
    retries = Retries()
    done = main(
        config,
        rollout_fn_factory=lambda setup: retries.watch(make_rollout_fn(setup)),
        rows=message_rows(config),
    )
    console = Console(soft_wrap=True)
    console.print(reward_trend(done.log_path), highlight=False)
    console.print(retries.trend(), highlight=False)


def command(arguments: Sequence[str] | None = None) -> int:
    """Train as the flags say."""
    program = "python -m training.examples.rl.multi_turn_message_in.train"
    return run_command(default_config(), train, arguments, program=program, description=DESCRIPTION)


if __name__ == "__main__":
    sys.exit(command())
