"""Document 004: the asynchronous recipe with a rollout function, and ``rl_loop`` in new names."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
import types
from dataclasses import MISSING, dataclass, fields

import orjson
import pytest

from training.quickstart import MODEL

ROLLOUT, TRAIN = "rollout.py — the rollout function", "train.py — config, reward, and loss"
RL_LOOP = "The simpler rl_loop recipe"


def needs(*modules: str) -> None:
    for name in modules:
        parts = name.split(".")
        parents = (".".join(parts[:length]) for length in range(1, len(parts) + 1))
        if any(importlib.util.find_spec(one) is None for one in parents):
            pytest.skip(f"{name} does not exist yet")


def rollout_module():
    module = importlib.import_module("training.utils.rl.rollout")
    if not hasattr(module, "RolloutSample"):
        pytest.skip("training.utils.rl.rollout.RolloutSample does not exist yet")
    return module


def test_every_snippet_has_a_test(document):
    assert len(document("004").snippets) == 4


def test_rl_loop_takes_the_newest_names(
    document, substituted, platform, reader, tmp_path, monkeypatch, extraction
):
    monkeypatch.chdir(tmp_path)
    names = reader()

    extraction.execute(substituted(document("004").after(RL_LOOP).text), names)

    lines = (tmp_path / "grpo_logs" / "metrics.jsonl").read_bytes().splitlines()
    steps = [one for one in map(orjson.loads, lines) if one["type"] == "train"]
    assert len(steps) >= 2
    assert all(one["train/grad_norm"] > 0 and "train/mean_kl" in one for one in steps)
    states, replicas = platform.states()
    assert set(states) == {"JOB_STATE_CANCELLED"}
    assert replicas == [0]


def test_a_rollout_sample_has_the_documents_fields(document, reader, extraction):
    ours = rollout_module().RolloutSample
    names = reader() | {"dataclass": dataclass}

    extraction.execute(document("004").after(ROLLOUT, 1).text, names)

    def described(kind):
        return [(one.name, None if one.default is MISSING else one.default) for one in fields(kind)]

    assert described(ours) == described(names["RolloutSample"])


def test_the_rollout_function_draws_from_a_deployment_and_the_recipe_trains_on_it(
    document, substituted, platform, reader, tmp_path, monkeypatch, extraction
):
    needs("training.examples.rl.vanilla_sampler", "training.recipes.async_rl_loop")
    rollout_module()
    monkeypatch.chdir(tmp_path)
    names = reader()
    extraction.execute(substituted(document("004").after(ROLLOUT).text), names)
    assert inspect.isfunction(names["make_rollout_fn"])
    theirs = types.ModuleType("my_rollout")
    theirs.make_rollout_fn = names["make_rollout_fn"]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_rollout", theirs)
    code = substituted(document("004").after(TRAIN).text)

    extraction.execute(
        with_rows(code), names | {"rows_of_mine": prompt_rows(names["dataset"].rows)}
    )

    lines = (tmp_path / "gsm8k_logs" / "metrics.jsonl").read_bytes().splitlines()
    steps = [one for one in map(orjson.loads, lines) if one["type"] == "train"]
    assert len(steps) >= 1
    assert all(one["train/grad_norm"] > 0 for one in steps)


def with_rows(code: str) -> str:
    """The snippet with rows where it has only dots."""
    tree = ast.parse(code)
    for one in tree.body:
        if isinstance(one, ast.Assign) and ast.unparse(one.value) == "[...]":
            one.value = ast.parse("rows_of_mine", mode="eval").body
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
