"""Every field of every recipe's config: type, default and meaning, from the dataclasses."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from training.config import parts
from training.config.async_recipe import AsyncConfig
from training.config.recipe import RecipeConfig
from training.config.rl import RLConfig
from training.config.single_turn import SingleTurnConfig
from training.config.supervised import SupervisedConfig
from training.config.turn_credit import TurnCreditConfig
from training.recipes import (
    async_rl_loop,
    distillation_loop,
    dpo_loop,
    igpo_loop,
    rl_loop,
    sft_loop,
)

SECTIONS: Mapping[str, tuple[type, ...]] = {
    "Every recipe": (RecipeConfig,),
    "Recipes that sample": (RLConfig,),
    "rl_loop": (SingleTurnConfig, rl_loop.Config),
    "async_rl_loop and igpo_loop": (AsyncConfig, async_rl_loop.Config),
    "igpo_loop": (TurnCreditConfig, igpo_loop.Config),
    "distillation_loop": (distillation_loop.Config,),
    "Recipes that train on given answers": (SupervisedConfig,),
    "sft_loop": (sft_loop.Config,),
    "dpo_loop": (dpo_loop.Config,),
}
"""The classes whose own fields a section has; a field that is there twice has another default."""
TOPICS = {
    "log_path": "Folder, model and rows",
    "learning_rate": "Optimizer",
    "lora_rank": "What is trained",
    "dcp_save_interval": "Checkpoints, the final model",
    "eval_dataset": "Held-out evaluation",
    "placement": "Where it runs",
    "completions_per_prompt": "Sampling",
    "policy_loss": "Objective",
    "grad_accumulation_normalization": "Steps, and in what pieces",
    "weight_sync_interval": "Weight sync",
    "no_signal_patience": "What the run watches and records",
}
"""Headings in the first two sections, each before the field that begins its topic."""
PARTS = {
    "trainer": parts.TrainerConfig,
    "deployment": parts.DeployConfig,
    "tokenizer": parts.TokenizerConfig,
    "teacher": parts.DeployConfig,
    "resume": parts.ResumeConfig,
    "wandb": parts.WandBConfig,
    "tis": parts.TISConfig,
    "dapo": parts.DAPOConfig,
    "gspo": parts.GSPOConfig,
    "cispo": parts.CISPOConfig,
    "dro": parts.DROConfig,
}
"""Fields that are configs themselves."""
OLDER = {
    "infra": parts.InfraConfig,
    "weight_sync": parts.WeightSyncConfig,
    "hotload": parts.HotloadConfig,
}
"""The same, for names of older programs."""


@dataclass(frozen=True)
class Setting:
    """A field as its class declares it."""

    name: str
    type: str
    default: str
    meaning: str


def read_settings(config: type) -> list[Setting]:
    """The fields that a dataclass itself declares, in order, each with the text behind it.

    Raises:
        ValueError: a field has no text.
    """
    fields = {field.name: field for field in dataclasses.fields(config)}
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(config))).body
    assert isinstance(tree, ast.ClassDef)
    settings = []
    for declared, text in zip(tree.body, [*tree.body[1:], None], strict=True):
        if not isinstance(declared, ast.AnnAssign) or not isinstance(declared.target, ast.Name):
            continue
        name = declared.target.id
        meaning = _read_text(text)
        if meaning is None:
            raise ValueError(
                f"{config.__name__}.{name} must have a docstring that says what it does"
            )
        kind = ast.unparse(declared.annotation)
        settings.append(Setting(name, kind, _show_default(fields[name]), meaning))
    return settings


def _read_text(statement: ast.stmt | None) -> str | None:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return " ".join(str(statement.value.value).split())
    return None


def _show_default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return repr(field.default)
    if field.default_factory is not dataclasses.MISSING:
        made = field.default_factory()
        return f"{type(made).__name__}()" if dataclasses.is_dataclass(made) else repr(made)
    return "required"


def _directive(owner: str, setting: Setting, prefix: str) -> Iterator[str]:
    flag = f"{prefix}{setting.name}".replace("_", "-")
    yield f"```{{py:attribute}} {owner}.{setting.name}"
    yield f":type: {setting.type}"
    yield f":value: {json.dumps(setting.default)}"  # quoted, or the quotes of a text are lost
    yield ""
    yield f"{setting.meaning} `--{flag}`"
    yield "```\n"


def _list_bases(config: type) -> list[type]:
    """The dataclasses that a config is made of, those of losses as a whole."""
    own = [base for base in reversed(config.__mro__) if dataclasses.is_dataclass(base)]
    return [base for base in own if base.__module__ == parts.__name__] or [config]


def _first_line(config: type) -> str:
    return " ".join((inspect.getdoc(config) or "").split("\n\n")[0].split())


def describe_config() -> str:
    """The sections of the page."""
    lines: list[str] = []
    for title, classes in SECTIONS.items():
        lines.append(f"## {title}\n")
        owner = "Config" if title == "Every recipe" else classes[0].__name__
        owner = title.split()[0] if "_loop" in title else owner
        for config in classes:
            for setting in read_settings(config):
                if config in (RecipeConfig, RLConfig) and setting.name in TOPICS:
                    lines.append(f"### {TOPICS[setting.name]}\n")
                lines += _directive(owner, setting, "")
    for title, group in (("Parts", PARTS), ("Names of older programs", OLDER)):
        lines.append(f"## {title}\n")
        for field, config in group.items():
            lines += [f"### {field}\n", f"{config.__name__}: {_first_line(config)}\n"]
            for base in _list_bases(config):
                for setting in read_settings(base):
                    lines += _directive(field, setting, f"{field}.")
    return "\n".join(lines)
