"""Train a small model to answer questions of several hops, with credit for each turn.

``python -m training.examples.rl.multihop_qa.train``; every field of the recipe's config is a flag.
The first run makes the model (see ``policy``), which takes a minute or two.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import tyro
from rich.console import Console

from training.examples.rl.multihop_qa.corpus import question_rows
from training.examples.rl.multihop_qa.policy import ensure_model
from training.examples.rl.multihop_qa.reward import ANSWER, credit_text
from training.examples.rl.multihop_qa.rollout import make_rollout_fn
from training.examples.rl.trend import reward_trend
from training.recipes.igpo_loop import Config, main
from training.utils import DeployConfig
from training.utils.command import exit_code
from training.utils.rl.groups import PromptGroup

MODEL = Path("runs/multihop_qa_model")
"""Where the example's own model is made."""

CONFIG = Config(
    log_path="runs/multihop_qa",
    base_model=str(MODEL),
    completions_per_prompt=8,
    prompt_groups_per_step=8,
    max_completion_tokens=8,
    max_seq_len=192,
    policy_loss="grpo",
    kl_beta=0.0,
    learning_rate=1e-3,
    weight_decay=0.0,
    ig_answer_prefix=ANSWER,
    deployment=DeployConfig(tokenizer_model=str(MODEL), max_batch_size=64),
)


class Examples:
    """The first and the last group of a run, kept to be shown; a group filter that refuses none."""

    def __init__(self) -> None:
        self.first: PromptGroup | None = None
        self.last: PromptGroup | None = None

    def __call__(self, group: PromptGroup) -> bool:
        """Keep the group, and have it trained."""
        self.first = self.first or group
        self.last = group
        return True


def train(config: Config) -> None:
    """Make the model if need be, train, print how the reward went and what turns were worth."""
    if config.base_model == str(MODEL):
        ensure_model(MODEL)
    examples = Examples()
    rows, _ = question_rows()
    done = main(config, rollout_fn_factory=make_rollout_fn, rows=rows, dynamic_filter_fn=examples)
    console = Console(soft_wrap=True, markup=False, highlight=False)
    for when, group in (("at the start", examples.first), ("at the end", examples.last)):
        if group is not None and group.credit is not None:
            console.print(f"\n{when}:\n{credit_text(group, 0)}")
    console.print(f"\n{reward_trend(done.log_path)}")


def command(arguments: Sequence[str] | None = None) -> int:
    """Train as the flags say."""
    config = tyro.cli(
        Config, default=CONFIG, args=arguments,
        prog="python -m training.examples.rl.multihop_qa.train",
    )  # fmt: skip
    return exit_code(lambda: train(config))


if __name__ == "__main__":
    sys.exit(command())
