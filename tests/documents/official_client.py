"""Run document 001's or 003's loop with its import line as it stands: on the official client.

    python official_client.py NUMBER DOCUMENT MODEL DATASET

on an interpreter that has ``fireworks-ai[training]``, with FIREWORKS_BASE_URL and
FIREWORKS_API_KEY set. Prints the job that was trained, as JSON. Three things of 1.2.28 differ from
what the documents were written for, and are dealt with here: its data types are its own, and it
takes no others; its managers refuse ``account_id``; and sampling is a coroutine, which document 003
uses as a list.
"""

from __future__ import annotations

import ast
import asyncio
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import extraction
import tinker
from fireworks.training.sdk import types as official_types

from training.utils.rl import build_grpo_datums, make_grpo_loss_fn

SNIPPETS = {
    "001": ("Provision resources with `setup_infra`", "Training loop"),
    "003": (
        "Step 1: Provision resources",
        "Step 2: Build training data",
        "Step 3: GRPO loss function",
        "Step 4: On-policy training loop (prompt-batched)",
    ),
}


class Modern(ast.NodeTransformer):
    """What 1.2.28 demands of the documents' imports and calls."""

    def visit_Import(self, node: ast.Import) -> ast.AST:
        """Take the data types from the client."""
        if node.names[0].name != "tinker":
            return node
        return ast.parse("from fireworks.training.sdk import types as tinker").body[0]

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Leave ``account_id`` out; run a sampling call that nobody runs; make its own datums."""
        if ast.unparse(node.func) == "asyncio.run":
            return node
        self.generic_visit(node)
        node.keywords = [keyword for keyword in node.keywords if keyword.arg != "account_id"]
        if ast.unparse(node.func) == "sampler.sample_with_tokens":
            runner = ast.parse("asyncio.run", mode="eval").body
            return ast.copy_location(ast.Call(runner, [node], []), node)
        if ast.unparse(node.func) == "datum_from_tokens_weights":
            convert = ast.Name("official_datum", ast.Load())
            return ast.copy_location(ast.Call(convert, [node], []), node)
        return node


def official_datum(datum: tinker.Datum) -> official_types.Datum:
    """A datum as the client's own type."""
    return official_types.Datum(
        model_input=datum.model_input.model_dump(),
        loss_fn_inputs={name: data.to_numpy() for name, data in datum.loss_fn_inputs.items()},
    )


def main(number: str, document: str, model: str, dataset: str) -> None:
    """Run the snippets and say which job was trained."""
    rows = [json.loads(line) for line in Path(dataset).read_text().splitlines()][:2]
    names: dict[str, Any] = {"__name__": "reader", "asyncio": asyncio, "tinker": official_types}
    names["official_datum"] = official_datum
    count = itertools.count()
    names["score"] = lambda completion: float(next(count) % 2)
    names["dataset"] = rows
    page = extraction.Document.read(Path(document))
    parts = [page.after(heading).text for heading in SNIPPETS[number]]
    if number == "001":
        names |= {"build_grpo_datums": build_grpo_datums, "make_grpo_loss_fn": make_grpo_loss_fn}
        names["dataset"] = numbered(rows, names)
        parts = [extraction.one_block(*parts)]
    for code in parts:
        said = code.replace('"Qwen/Qwen3-8B"', json.dumps(model))
        tree = ast.fix_missing_locations(Modern().visit(ast.parse(said)))
        extraction.execute(tree, names)
    job = names["infra"].policy_job_id if number == "001" else names["policy_ep"].job_id
    tracker = names["tracker"]
    said = {"job": job, "syncer": type(tracker).__module__, "served": tracker.base_identity}
    sys.stdout.write(json.dumps(said) + "\n")


def numbered(rows: list[dict[str, Any]], names: dict[str, Any]) -> Any:
    """The rows, counted in ``step``."""
    for step, row in enumerate(rows, start=1):
        names["step"] = step
        yield row


if __name__ == "__main__":
    main(*sys.argv[1:])
