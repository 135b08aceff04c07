"""The rows of recipes whose rollout functions understand any JSON object."""

from __future__ import annotations

from collections.abc import Sequence

from hearth.errors import ConfigError
from training.config.recipe import RecipeConfig
from training.data.rows import Row, check_object, load_rows


def choose_rows(config: RecipeConfig, rows: Sequence[Row] | None) -> Sequence[Row]:
    """The rows to train on: given ones, or those of the dataset.

    Raises:
        ConfigError: there are none, or one is no object.
    """
    if rows is None and not config.dataset:
        raise ConfigError("rows must be given where config.dataset is empty, got neither")
    if rows is None:
        return load_rows(config.dataset, config.max_rows, needs_messages=False)
    if not rows:
        raise ConfigError("rows must hold at least one row, got []")
    return [check_object(row, where=f"rows[{place}]") for place, row in enumerate(rows)]


def choose_eval_rows(config: RecipeConfig, rows: Sequence[Row] | None) -> Sequence[Row]:
    """The held-out rows: given ones, or those of ``eval_dataset``; none where there is neither.

    Raises:
        ConfigError: one is no object, or the dataset cannot be read.
    """
    if rows is not None:
        return [check_object(row, where=f"eval_rows[{place}]") for place, row in enumerate(rows)]
    if config.eval_dataset is None:
        return []
    return load_rows(config.eval_dataset, config.eval_rows, needs_messages=False)
