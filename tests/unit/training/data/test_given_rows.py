"""Rows given in Python are judged like those of a file."""

import re

import pytest

from hearth.errors import ConfigError
from training.data.given_rows import choose_eval_rows, choose_rows
from training.recipes.rl_loop import Config

ROW = {"messages": [{"role": "user", "content": "1 + 1?"}], "ground_truth": "2"}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "rows must hold at least one row, got []"),
        (["hi"], "rows[0] must be a JSON object, got 'hi'"),
        ([ROW, {"prompt": "hi"}], "rows[1]: messages must be a non-empty list"),
        (ROW, "rows must be a list of rows, got a dict"),
        ("rows.jsonl", "rows must be a list of rows, got a str"),
        (7, "rows must be a list of rows, got a int"),
    ],
)
def test_rows_that_cannot_be_sampled_from_are_refused_by_their_place(rows, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        choose_rows(Config(), rows, needs_messages=True)


def test_held_out_rows_are_judged_too_and_rollouts_take_any_object():
    with pytest.raises(ConfigError, match=re.escape("eval_rows[0]: messages must be")):
        choose_eval_rows(Config(), [{"prompt": "hi"}], needs_messages=True)

    assert choose_rows(Config(), iter([{"prompt": "hi"}])) == [{"prompt": "hi"}]
