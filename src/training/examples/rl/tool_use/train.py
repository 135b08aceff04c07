"""Train an agent with a calculator, which only knows OpenAI's client, on products of two numbers.

``python -m training.examples.rl.tool_use.train``; every field of the config is a flag.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from hearth.errors import ConfigError
from training.examples.rl.tool_use.problems import ROWS, problem_rows
from training.examples.rl.trend import reward_trend, trend
from training.recipes.async_rl_loop import Config, main
from training.run.command import run_command
from training.utils import DeployConfig

DESCRIPTION = "Train an agent with a calculator, which only knows OpenAI's client."


@dataclass(kw_only=True)
class ToolUseConfig(Config):
    """Settings of ``async_rl_loop``, and the warm-up's."""

    warm_up_steps: int = 200
    """Supervised batches that make the policy from the shipped model, where base_model is empty."""


def default_config() -> ToolUseConfig:
    """Settings that learn on the example's own policy within minutes."""
    return ToolUseConfig(
        log_path="runs/tool_use",
        base_model="",
        dataset="",
        max_rows=192,
        completions_per_prompt=8,
        prompt_groups_per_step=8,
        max_completion_tokens=40,
        max_seq_len=512,
        policy_loss="grpo",
        kl_beta=0.0,
        learning_rate=5e-4,
        weight_decay=0.0,
        max_head_offpolicy_versions=0,
        deployment=DeployConfig(max_batch_size=128),
    )


def train(config: ToolUseConfig) -> None:
    """Make the policy if none is named, train it, and print how reward and tool calls went.

    Raises:
        ConfigError: a setting breaks its rule, or OpenAI's client is not installed.
    """
    check_openai()
    # After the check: OpenAI's client is an extra of ours, hearth-rl[agents].
    from training.examples.rl.tool_use.agent import Outcome
    from training.examples.rl.tool_use.rollout import make_rollout_fn

    rows = problem_rows(config.max_rows or ROWS)
    outcomes: list[Outcome] = []
    done = main(
        with_policy(config),
        rollout_fn_factory=lambda setup: make_rollout_fn(setup, outcomes.append),
        rows=rows,
    )
    console = Console(soft_wrap=True, highlight=False)
    console.print(reward_trend(done.log_path))
    console.print(
        trend("tool calls", [outcome.tool_calls for outcome in outcomes], "conversations")
    )
    console.print(
        trend("failed calls", [outcome.failed_calls for outcome in outcomes], "conversations")
    )


def check_openai() -> None:
    """Refuse to go on without OpenAI's client.

    Raises:
        ConfigError: it is not installed.
    """
    if importlib.util.find_spec("openai") is None:
        raise ConfigError(
            "the openai package must be installed, got none: the agent is written against it; "
            "pip install 'hearth-rl[agents]'"
        )


def with_policy(config: ToolUseConfig) -> ToolUseConfig:
    """The config with the example's own policy, which is made at first use, if it names no model.

    Raises:
        ConfigError: a setting breaks its rule; nothing was made.
    """
    if config.base_model:
        return config
    if config.warm_up_steps < 0:
        raise ConfigError(f"warm_up_steps must be >= 0, got {config.warm_up_steps}")
    folder = Path(config.log_path).expanduser() / f"policy-{config.warm_up_steps}"
    deployment = replace(config.deployment, tokenizer_model=str(folder))
    complete = replace(config, base_model=str(folder), deployment=deployment)
    complete.validate()
    if not folder.exists():
        # After the checks: a few seconds to import.
        from training.examples.rl.tool_use.policy import make_policy

        make_policy(folder, config.warm_up_steps)
    return complete


def command(arguments: Sequence[str] | None = None) -> int:
    """Train as the flags say."""
    program = "python -m training.examples.rl.tool_use.train"
    return run_command(default_config(), train, arguments, program=program, description=DESCRIPTION)


if __name__ == "__main__":
    sys.exit(command())
