"""Train a small model to answer questions of several hops, with credit for each turn.

``python -m training.examples.rl.multihop_qa.train``; every field of the recipe's config is a flag.
The first run makes the model (see ``policy``), which takes about a minute.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from training.examples.rl.multihop_qa.corpus import make_world, question_rows
from training.examples.rl.multihop_qa.policy import ensure_model
from training.examples.rl.multihop_qa.reward import ANSWER, credit_text
from training.examples.rl.multihop_qa.rollout import make_rollout_fn
from training.examples.rl.multihop_qa.search import SearchIndex
from training.examples.rl.trend import reward_trend
from training.recipes.igpo_loop import Config, main
from training.run.command import run_command
from training.samples.groups import PromptGroup
from training.utils import DeployConfig

DESCRIPTION = "Train a small model to answer questions of several hops, with credit for each turn."
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
    """The first and the last row's group of a run, to be shown; a group filter that refuses none.

    The place among the rows counts, and not the time: which row is sampled first is up to chance.
    """

    def __init__(self) -> None:
        self.first: PromptGroup | None = None
        self.last: PromptGroup | None = None

    def __call__(self, group: PromptGroup) -> bool:
        """Keep the group, and have it trained."""
        if self.first is None or group.row.index < self.first.row.index:
            self.first = group
        if self.last is None or group.row.index > self.last.row.index:
            self.last = group
        return True


def train(config: Config) -> None:
    """Make the model if need be, train, print how the reward went and what turns were worth.

    Raises:
        ConfigError: a setting breaks its rule; nothing was made.
    """
    config.validate()
    if config.base_model == str(MODEL):
        ensure_model(MODEL)
    examples = Examples()
    rows, _ = question_rows()
    done = main(config, rollout_fn_factory=make_rollout_fn, rows=rows, dynamic_filter_fn=examples)
    console = Console(soft_wrap=True, markup=False, highlight=False)
    search = SearchIndex(make_world().documents()).search
    for group in (examples.first, examples.last):
        if group is not None and group.credit is not None:
            where = f"row {group.row.index + 1} of {len(rows) * config.epochs}"
            rewards = " ".join(f"{reward:g}" for reward in group.rewards)
            console.print(f"\n{where}, outcomes {rewards}; the first trajectory:")
            console.print(credit_text(group, 0, search))
    console.print(f"\n{reward_trend(done.log_path)}")


def command(arguments: Sequence[str] | None = None) -> int:
    """Train as the flags say."""
    program = "python -m training.examples.rl.multihop_qa.train"
    return run_command(CONFIG, train, arguments, program=program, description=DESCRIPTION)


if __name__ == "__main__":
    sys.exit(command())
