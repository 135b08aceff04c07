"""Rows with answers, arithmetic in float64, and what tests of supervised recipes share."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tests.integration.runs import read_steps
from tests.unit.tiny import shake
from transformers import AutoModelForCausalLM, AutoTokenizer

from training.data.rows import load_rows
from training.quickstart import MODEL, TRAIN_ROWS

END = "<|im_end|>"


def answered_rows(count: int, first: int = 0) -> list[dict[str, Any]]:
    """Shipped rows with their right answers, as ``sft_loop`` reads them."""
    rows = load_rows(str(TRAIN_ROWS), first + count)[first:]
    return [{"messages": [*row["messages"], answer(row["ground_truth"])]} for row in rows]


def preferences(count, first=0):
    """Shipped questions; the right answer is better than one that is off by one."""
    pairs = []
    for row in answered_rows(count, first):
        question, right = row["messages"]
        value = int(right["content"].removeprefix("<answer>").removesuffix("</answer>"))
        wrong = f"<answer>{value + 1}</answer>"
        pairs.append({"messages": [question], "chosen": right["content"], "rejected": wrong})
    return pairs


def answer(value: object) -> dict[str, str]:
    """The assistant's message with this answer."""
    return {"role": "assistant", "content": f"<answer>{value}</answer>"}


def write_rows(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def copy_model(folder: Path) -> Path:
    """The shipped model's folder, to be changed."""
    shutil.copytree(MODEL, folder)
    return folder


def shaken_model(folder: Path) -> Path:
    """The shipped model with other weights, which says other things."""
    path = copy_model(folder) / "model.safetensors"
    weights = load_file(path)
    shake(weights, seed=0)
    save_file(weights, path, metadata={"format": "pt"})
    return folder


class Reference:
    """A model in float64, by transformers: nothing of ours is in its arithmetic."""

    def __init__(self, folder: Path = MODEL) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.grad_norm = math.nan
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)

    def logprobs(self, question: str, text: str) -> torch.Tensor:
        """Logprobs of an answer's tokens and of its end, after a user's question."""
        prompt = f"<|im_start|>user\n{question}{END}\n<|im_start|>assistant\n"
        asked, said = (self.tokenizer(part).input_ids for part in (prompt, text + END))
        logits = self.model(torch.tensor([asked + said])).logits[0, len(asked) - 1 : -1]
        return logits.log_softmax(-1).gather(1, torch.tensor(said)[:, None])[:, 0]

    def step(self, loss: torch.Tensor, *, rate: float, eps: float) -> dict[str, torch.Tensor]:
        """The weights after AdamW's first step without decay, by its formula."""
        weights = dict(self.model.named_parameters())
        gradients = torch.autograd.grad(loss, list(weights.values()))
        self.grad_norm = math.sqrt(sum(float((gradient**2).sum()) for gradient in gradients))
        return {
            name: weight.detach() - rate * gradient / (gradient.abs() + eps)
            for (name, weight), gradient in zip(weights.items(), gradients, strict=True)
        }


def exported(folder: Path) -> dict[str, torch.Tensor]:
    """The weights that a run has left."""
    return load_file(folder / "models" / "final" / "model.safetensors")


def check_weights(folder: Path, expected: dict[str, torch.Tensor], tolerance: float) -> None:
    """The run's weights moved as expected, but for a share of the largest move."""
    base, found = load_file(MODEL / "model.safetensors"), exported(folder)
    moves = {name: expected[name] - base[name].double() for name in found}
    largest = max(float(move.abs().max()) for move in moves.values())
    assert largest > 0
    for name, move in moves.items():
        difference = (found[name].double() - base[name].double() - move).abs().max()
        assert float(difference) <= tolerance * largest, name


def sha256(folder: Path) -> str:
    """Of the exported weights."""
    path = folder / "models" / "final" / "model.safetensors"
    return hashlib.sha256(path.read_bytes()).hexdigest()


def without_times(folder: Path) -> list[dict[str, Any]]:
    """The records of a run's steps without wall times."""
    return [
        {name: value for name, value in step.items() if not name.startswith("perf/")}
        for step in read_steps(folder)
    ]
