"""``hearth train``: a recipe by its name. Help is printed without the libraries of a run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import NamedTuple

from training.config.help import format_help


class RecipeEntry(NamedTuple):
    """Where a recipe is, and what it does."""

    module: str
    summary: str


RECIPES: Mapping[str, RecipeEntry] = {
    "rl": RecipeEntry(
        "training.recipes.rl_loop",
        "GRPO and its relatives: sample, score, take a step, sync weights, repeat.",
    ),
    "async": RecipeEntry(
        "training.recipes.async_rl_loop",
        "The same with a rollout function of your own, and rollouts beside training.",
    ),
    "igpo": RecipeEntry(
        "training.recipes.igpo_loop",
        "The same for several turns, each rewarded for the information that it adds.",
    ),
    "sft": RecipeEntry(
        "training.recipes.sft_loop",
        "Supervised fine-tuning: train on the answers of given conversations.",
    ),
    "dpo": RecipeEntry(
        "training.recipes.dpo_loop",
        "Direct preference optimization: of two answers, make the better one likelier.",
    ),
    "distill": RecipeEntry(
        "training.recipes.distillation_loop",
        "On-policy distillation: the student samples, a teacher scores every token.",
    ),
}
DEFAULT_RECIPE = "rl"


def train(arguments: list[str]) -> int:
    """Train: hearth train [rl|async|igpo|sft|dpo|distill] [@FILE.toml] [--SETTING VALUE ...]."""
    name, rest = DEFAULT_RECIPE, arguments
    if arguments and arguments[0] in RECIPES:
        name, *rest = arguments
    recipe = RECIPES[name]
    program = f"hearth train {name}"
    if any(argument in ("-h", "--help") for argument in rest):
        others = [f"  hearth train {key:8}{entry.summary}" for key, entry in RECIPES.items()]
        listed = [] if name in arguments else ["recipes:", *others, ""]
        shown = [*listed, format_help(recipe.module, program, recipe.summary), ""]
        sys.stdout.write("\n".join(shown))
        return 0
    command: Callable[[list[str], str], int] = import_module(recipe.module).command
    return command(rest, program)
