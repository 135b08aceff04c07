"""Runs one recipe of the Fireworks cookbook, unmodified. Runs in the cookbook's environment.

    FIREWORKS_BASE_URL=... FIREWORKS_API_KEY=any PYTHONPATH=CLONE:. \
        python -m tests.clients.fireworks_recipe RECIPE RANK MODEL TOKENIZER FOLDER

MODEL is a model of the platform's catalog, TOKENIZER a folder. RANK 0 trains all weights. The
result is promoted to a model that is named like FOLDER.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

_SUMS = [(f"{number}+3=", str(number + 3), str(number + 5)) for number in range(16)]


def _write(folder: Path, rows: Iterable[dict[str, Any]]) -> str:
    file = folder / "data.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


def _chat(question: str, answer: str) -> dict[str, Any]:
    turns = [("user", question), ("assistant", answer)]
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def make_conversations(folder: Path) -> str:
    """Sixteen questions with their right answers."""
    return _write(folder, (_chat(question, right) for question, right, _ in _SUMS))


def make_preferences(folder: Path) -> str:
    """Eight questions, each with a right and a wrong answer."""
    return _write(
        folder,
        (
            {"chosen": _chat(question, right), "rejected": _chat(question, wrong)}
            for question, right, wrong in _SUMS[:8]
        ),
    )


def make_prompts(folder: Path) -> str:
    """Six questions, with what a reward function compares with."""
    return _write(
        folder,
        (
            {
                "messages": [{"role": "user", "content": question}],
                "ground_truth": f"<answer>{right}</answer>",
            }
            for question, right, _ in _SUMS[:6]
        ),
    )


def score(completion: str, row: dict[str, Any]) -> float:
    """A reward that differs between the completions of a tiny model."""
    del row
    return float(len(completion) % 3)


def make_rollouts(setup: Any) -> Callable[..., Any]:
    """The cookbook's rollouts from token ids, scored."""
    from training.examples.rl.single_turn_token_in.rollout import make_rollout_fn

    sample = make_rollout_fn(setup)

    async def rollout(row: dict[str, Any]) -> Any:
        run = await sample(row)
        for segment in run.segments if run else ():
            segment.reward = float(sum(segment.tokens) % 3)
        return run

    return rollout


def run(recipe: str, rank: int, model: str, tokenizer: str, folder: Path) -> None:
    """Run it to its end, which promotes what it trained."""
    from training.utils import DeployConfig, TrainerConfig, WandBConfig

    name, _, mode = recipe.partition(", ")
    module = importlib.import_module(f"training.recipes.{name}")
    shape = model.replace("/models/", "/trainingShapes/") + ("-lora" if rank else "")
    common = {
        "log_path": str(folder),
        "base_model": model,
        "lora_rank": rank,
        "max_seq_len": 256,
        "trainer": TrainerConfig(training_shape_id=shape),
        "wandb": WandBConfig(project=None),
        "output_model_id": folder.name,
    }
    supervised = {"tokenizer_model": tokenizer, "renderer_name": "role_colon", "epochs": 2}
    sampling = {
        "deployment": DeployConfig(tokenizer_model=tokenizer),
        "max_completion_tokens": 16,
        "max_rows": 6,
    }
    keywords: dict[str, Any] = {}
    match name:
        case "sft_loop":
            more = {**supervised, "dataset": make_conversations(folder), "batch_size": 8}
        case "dpo_loop" | "orpo_loop":
            more = {**supervised, "dataset": make_preferences(folder)}
        case "distillation_loop":
            more = {**sampling, "dataset": make_prompts(folder), "teacher_model": model}
            more["distill_mode"] = module.DistillMode(mode)
        case "async_rl_loop":
            from transformers import AutoTokenizer

            encode = AutoTokenizer.from_pretrained(tokenizer).encode
            questions = [question for question, _, _ in _SUMS[:6]]
            keywords["rows"] = [
                {"prompt_token_ids": encode(question, add_special_tokens=False)}
                for question in questions
            ]
            keywords["rollout_fn_factory"] = make_rollouts
            more = {**sampling, "max_head_offpolicy_versions": 1}
        case "rl_loop":
            module.reward_fn = score
            module.should_accept = lambda group: True
            more = {**sampling, "dataset": make_prompts(folder), "renderer_name": "role_colon"}
        case _:
            raise ValueError(f"recipe must be one of the cookbook's, got {recipe}")
    module.main(module.Config(**common, **more), **keywords)


def main() -> None:
    """Read the arguments, and run the recipe."""
    parser = argparse.ArgumentParser(description=__doc__)
    for argument in ("recipe", "rank", "model", "tokenizer", "folder"):
        parser.add_argument(argument)
    options = parser.parse_args()
    folder = Path(options.folder)
    folder.mkdir(parents=True)
    run(options.recipe, int(options.rank), options.model, options.tokenizer, folder)


if __name__ == "__main__":
    main()
