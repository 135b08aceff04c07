"""The rows of a run: given in Python, or those of its data set; either is checked the same way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from hearth.errors import ConfigError
from training.config.recipe import RecipeConfig
from training.data.rows import Row, check_object, check_row, load_rows


def choose_rows(
    config: RecipeConfig, rows: Sequence[Row] | None, *, needs_messages: bool = False
) -> Sequence[Row]:
    """The rows to train on: given ones, or those of the dataset.

    With ``needs_messages`` each row must have ``messages`` to sample from; else any object is one.

    Raises:
        ConfigError: there are none, or one is no row.
    """
    if rows is None and not config.dataset:
        raise ConfigError("rows must be given where config.dataset is empty, got neither")
    if rows is None:
        return load_rows(
            config.dataset, config.max_rows, columns=config.columns, needs_messages=needs_messages
        )
    checked = _check_rows(rows, "rows", needs_messages)
    if not checked:
        raise ConfigError("rows must hold at least one row, got []")
    return checked


def choose_eval_rows(
    config: RecipeConfig, rows: Sequence[Row] | None, *, needs_messages: bool = False
) -> Sequence[Row]:
    """The held-out rows: given ones, or those of ``eval_dataset``; none where there is neither.

    Raises:
        ConfigError: one is no row, or the dataset cannot be read.
    """
    if rows is not None:
        return _check_rows(rows, "eval_rows", needs_messages)
    if config.eval_dataset is None:
        return []
    return load_rows(
        config.eval_dataset,
        config.eval_rows,
        columns=config.columns,
        needs_messages=needs_messages,
        setting="eval_rows",
    )


def _check_rows(rows: object, name: str, needs_messages: bool) -> list[Row]:
    if isinstance(rows, str | bytes | Mapping) or not isinstance(rows, Iterable):
        raise ConfigError(f"{name} must be a list of rows, got a {type(rows).__name__}")
    check = check_row if needs_messages else check_object
    return [check(row, where=f"{name}[{place}]") for place, row in enumerate(rows)]
