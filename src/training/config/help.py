"""What ``--help`` of a recipe prints: the settings that most runs give; all with ``--help-all``."""

from __future__ import annotations

import ast
import shutil
import textwrap
from collections.abc import Iterator

from training.config.describe import Setting, describe_settings

FIRST = (
    "base_model",
    "teacher_model",
    "dataset",
    "environment",
    "environment_args",
    "max_rows",
    "epochs",
    "reward",
    "rollout",
    "eval_dataset",
    "eval_every",
    "log_path",
    "batch_size",
    "completions_per_prompt",
    "prompt_groups_per_step",
    "max_completion_tokens",
    "policy_loss",
    "distill_loss",
    "teacher_top_k",
    "dpo_beta",
    "kl_beta",
    "learning_rate",
    "lr_schedule",
    "lora_rank",
    "max_head_offpolicy_versions",
    "ig_weight",
    "max_concurrent",
    "placement",
    "report_to",
    "seed",
)
"""In the order in which somebody who begins a run thinks of them."""
_WIDEST = 88


def format_help(module: str, program: str, summary: str) -> str:
    """The help of the recipe in ``module``, for a terminal of 88 columns or fewer.

    Nothing of the recipe is imported: it answers at once.
    """
    width = min(_WIDEST, shutil.get_terminal_size().columns)
    settings = describe_settings(module)
    shown = [settings[name] for name in FIRST if name in settings]
    lines = [
        f"usage: {program} [@FILE.toml] [--SETTING VALUE ...]",
        "",
        *textwrap.wrap(summary, width),
        "",
        f"{len(shown)} of {len(settings)} settings:",
    ]
    for setting in shown:
        lines += _format_setting(setting, width)
    lines += [
        "",
        "  @FILE.toml      read settings from a file, or from the config.json of a run; flags win",
        "  --print-config  print such a file, with every setting explained, and end",
        "  --help-all      explain every setting as a flag",
    ]
    return "\n".join(lines)


def _format_setting(setting: Setting, width: int) -> Iterator[str]:
    flag = setting.name.replace("_", "-")
    is_plain = setting.default is not None and setting.default != ""
    default = f" (default: {setting.default})" if is_plain else ""
    yield f"  --{flag} {_name_type(setting.type)}".rstrip()
    yield from textwrap.wrap(
        setting.meaning + default,
        width,
        initial_indent=" " * 6,
        subsequent_indent=" " * 6,
        break_on_hyphens=False,
    )


def _name_type(kind: str) -> str:
    """A type as usage lines have it; empty where the text behind the field says what it takes."""
    kind = kind.removesuffix(" | None")
    if kind.startswith("Literal["):
        return "{" + ",".join(ast.literal_eval(f"({kind[8:-1]},)")) + "}"
    return {"str": "TEXT", "int": "INT", "float": "FLOAT"}.get(kind, "")
