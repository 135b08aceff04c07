"""Document 004: the asynchronous recipe with a rollout function, and ``rl_loop`` in new names."""

from __future__ import annotations

import ast
import json
import sys
from dataclasses import MISSING, dataclass, fields
from typing import get_type_hints

import orjson
import pytest
from tests.documents import extraction
from tests.integration.runs import read_steps

from training.quickstart import MODEL
from training.samples.rollout import RolloutSample

ROLLOUT, TRAIN = "rollout.py — the rollout function", "train.py — config, reward, and loss"
DOCUMENTED_MODEL = '"accounts/fireworks/models/qwen3-8b"'
ITS_SHAPE = '"accounts/fireworks/trainingShapes/qwen3-8b-128k-h200"'
RL_LOOP = "The simpler rl_loop recipe"
# What the reader's rollout.py has beside the snippet.
SCORE = """
import itertools

count = itertools.count()


def score(completion):
    return float(next(count) % 2)
"""


def test_every_snippet_has_a_test(document):
    assert len(document("004").snippets) == 4


def test_rl_loop_takes_the_newest_names(
    document, substituted, platform, reader, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    names = reader()

    extraction.execute(substituted(document("004").after(RL_LOOP).text), names)

    steps = read_steps(tmp_path / "grpo_logs")
    assert len(steps) >= 2
    assert all(step["train/grad_norm"] > 0 and "train/mean_kl" in step for step in steps)
    platform.assert_released()


def test_a_rollout_sample_begins_with_the_documents_fields(document, reader):
    names = reader() | {"dataclass": dataclass}

    extraction.execute(document("004").after(ROLLOUT, 1).text, names)

    def described(kind):
        types = get_type_hints(kind)
        return [(field.name, types[field.name], field.default) for field in fields(kind)]

    theirs, ours = described(names["RolloutSample"]), described(RolloutSample)
    assert len(theirs) == 6
    assert ours[: len(theirs)] == theirs
    assert all(default is not MISSING for _, _, default in ours[len(theirs) :])


@pytest.mark.parametrize("place", ["served", "embedded"])
def test_the_rollout_function_samples_from_a_deployment_and_the_recipe_trains_on_it(
    place, document, substituted, platform, reader, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    code = substituted(document("004").after(TRAIN).text)
    if place == "embedded":
        monkeypatch.delenv("FIREWORKS_BASE_URL")
        monkeypatch.delenv("HEARTH_URL")
        code = code.replace(DOCUMENTED_MODEL, json.dumps(str(MODEL))).replace(ITS_SHAPE, "None")
    names = reader()
    program = substituted(document("004").after(ROLLOUT).text) + SCORE
    (tmp_path / "my_rollout.py").write_text(program)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_rollout", raising=False)

    extraction.execute(
        with_rows(code), names | {"rows_of_mine": prompt_rows(names["dataset"].rows)}
    )

    steps = read_steps(tmp_path / "gsm8k_logs")
    assert [step["rollout/valid_prompt_groups"] for step in steps] == [8.0, 4.0]
    assert all(step["train/grad_norm"] > 0 for step in steps)
    assert all(step["async/version_offset_max"] <= 4 for step in steps)
    saved = orjson.loads((tmp_path / "gsm8k_logs" / "config.json").read_bytes())
    names = (
        "learning_rate",
        "completions_per_prompt",
        "prompt_groups_per_step",
        "max_head_offpolicy_versions",
    )
    assert [saved[name] for name in names] == [1.7e-5, 8, 8, 4]
    platform.assert_released()


def with_rows(code: str) -> str:
    """The snippet with rows where it has only dots."""
    tree = ast.parse(code)
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.value) == "[...]":
            statement.value = ast.parse("rows_of_mine", mode="eval").body
    return ast.unparse(ast.fix_missing_locations(tree))


def prompt_rows(rows):
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    return [
        {
            **row,
            "prompt_token_ids": tokenizer.apply_chat_template(
                row["messages"], tokenize=True, add_generation_prompt=True, return_dict=False
            ),
        }
        for row in rows * 4
    ]
