"""Writes docs/tinker_cookbook.md: which recipes of tinker-cookbook run, and what is checked.

python -m tests.clients.cookbook_table > docs/tinker_cookbook.md
"""

from __future__ import annotations

import sys

from tests.clients.cookbook import NOT_RUN, RECIPES

_HEAD = """# Recipes of tinker-cookbook

Of tinker-cookbook 0.6.1. `make test-clients` runs these commands, unmodified, on small models and
data in folders named like the hub's, and prints how long each took. A test holds this page equal to
the program (`tests/clients/cookbook.py`). A command is what follows
`python -m tinker_cookbook.recipes.`; each must exit with 0.

| recipe | command | what else must hold |
|---|---|---|
"""


def write_table() -> str:
    """The page."""
    lines = [
        f"| {recipe.name} | `{' '.join([recipe.module, *recipe.arguments])}` | "
        f"{(recipe.check.__doc__ or '').rstrip('.')} |"
        for recipe in RECIPES
    ]
    reasons = [f"| `{name}` | {why} |" for name, why in NOT_RUN.items()]
    rest = ["", "| not run | because it |", "|---|---|", *reasons, ""]
    return _HEAD + "\n".join([*lines, *rest])


if __name__ == "__main__":
    sys.stdout.write(write_table())
