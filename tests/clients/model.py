"""A work folder for programs that name hub ids: tiny models and data in folders named like those.

``AutoTokenizer`` and ``datasets`` prefer an existing relative folder to the hub, and so does a
platform that is started in the work folder.
"""

from __future__ import annotations

import csv
import json
import random
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
)
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MODELS = {
    "Qwen/Qwen3-8B-Base": "<|endoftext|>",
    "Qwen/Qwen3-8B": "<|im_end|>",
    "Qwen/Qwen3.5-4B": "<|im_end|>",
    "Qwen/Qwen3.5-9B": "<|im_end|>",
    "Qwen/Qwen3.5-9B-Base": "<|endoftext|>",
    "Qwen/Qwen3.6-27B": "<|im_end|>",
    "Qwen/Qwen3.6-35B-A3B": "<|im_end|>",
}


def make_work_folder(folder: Path) -> Path:
    """The folder with all models and data sets; made once."""
    if not (folder / "made").exists():
        for name, end in MODELS.items():
            make_model(folder / name, end)
        make_data(folder)
        (folder / "made").touch()
    return folder


def make_model(folder: Path, end: str) -> None:
    """A Qwen3 of two small layers with random weights, and a tokenizer of single bytes."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: place for place, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=end, pad_token="<|endoftext|>"
    )
    fast.chat_template = _TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=len(fast),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=40960,
        tie_word_embeddings=True,
        eos_token_id=fast.eos_token_id,
        bos_token_id=None,
        pad_token_id=fast.pad_token_id,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def make_data(folder: Path) -> None:
    """Data sets in the columns of those that recipes name, with contents of our own."""
    dice = random.Random(0)

    def chat(count: int) -> list[dict[str, Any]]:
        turns = []
        for _ in range(count):
            a, b = dice.randint(1, 99), dice.randint(1, 99)
            question = {"role": "user", "content": f"What is {a} + {b}?"}
            turns.append(
                {"messages": [question, {"role": "assistant", "content": f"It is {a + b}."}]}
            )
        return turns

    def sums(count: int) -> list[dict[str, Any]]:
        made = []
        for _ in range(count):
            a, b = dice.randint(1, 99), dice.randint(1, 99)
            made.append({"question": f"{a} and {b} are?", "answer": f"{a}+{b}\n#### {a + b}"})
        return made

    def problems(count: int) -> list[dict[str, Any]]:
        made = []
        for place in range(count):
            a, b = dice.randint(1, 99), place
            made.append(
                {
                    "problem": f"{a}+{b}",
                    "solution": f"It is \\boxed{{{a + b}}}.",
                    "answer": str(a + b),
                    "question": f"{a}+{b}?",
                    "final_answer": str(a + b),
                }
            )
        return made

    def pairs(count: int) -> list[dict[str, Any]]:
        made = []
        for _ in range(count):
            a, b = dice.randint(1, 99), dice.randint(1, 99)
            asked = f"\n\nHuman: What is {a} + {b}?\n\nAssistant:"
            made.append({"chosen": f"{asked} {a + b}.", "rejected": f"{asked} I will not say."})
        return made

    def preferences(count: int) -> list[dict[str, Any]]:
        made = []
        for place in range(count):
            question = [{"role": "user", "content": f"Name a number above {place}."}]
            better = -1 if dice.random() < 0.5 else 1
            made.append(
                {
                    "context": question,
                    "response1": str(place + 1),
                    "response2": "No.",
                    "overall_preference": better,
                }
            )
        return made

    def choices(count: int) -> list[dict[str, Any]]:
        made = []
        for place in range(count):
            options = {"text": [str(place), str(place + 1)], "label": ["A", "B"]}
            made.append(
                {
                    "question": f"{place} + 1 = ?",
                    "choices": options,
                    "answerKey": "B",
                    "domain": "Chemistry",
                    "type": "mcq-4-choices",
                    "details": {"level": "L3", "task": "t", "subtask": "t"},
                    "prompt": {"default": "Answer with a letter."},
                }
            )
        return made

    conversations = [
        {
            "conversations": [
                {"from": "human", "value": row["messages"][0]["content"]},
                {"from": "gpt", "value": row["messages"][1]["content"]},
            ]
        }
        for row in chat(512)
    ]
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog"]
    text = [{"text": " ".join(dice.choice(words) for _ in range(40))} for _ in range(3000)]
    rubric = {
        "rubric_str": "Is the sum right?",
        "extraction_regex": "<score>(.*?)</score>",
        "grader_output_format_instruction": "Write <score>0</score> or <score>1</score>.",
    }
    asked = [row["messages"][:1] for row in chat(32)]
    _write_lines(folder / "rubric.jsonl", [{"convo": a, "rubric_items": [rubric]} for a in asked])
    _write_lines(folder / "prompts.jsonl", chat(64))
    sentences = folder / "tinker_cookbook" / "example_data" / "multilingual.txt"
    sentences.parent.mkdir(parents=True, exist_ok=True)
    sentences.write_text("Guten Tag.\nGood day.\nBuenas tardes.\n", encoding="utf-8")
    _write_forecasts(folder / "forecasts.csv")
    _write_continual(folder / "continual", chat(32))
    criteria = {f"orig_score{score}_description": f"It is {score} of 5." for score in range(1, 6)}
    feedback = [
        {
            "orig_instruction": row["messages"][0]["content"],
            "orig_criteria": "Is the sum right?",
            "orig_reference_answer": row["messages"][1]["content"],
            **criteria,
        }
        for row in chat(32)
    ]
    for name, configs in {
        "openai/gsm8k": {"main": {"train": sums(256), "test": sums(16)}},
        "HuggingFaceH4/no_robots": {"default": {"train": chat(512), "test": chat(64)}},
        "allenai/tulu-3-sft-mixture": {"default": {"train": chat(2048)}},
        "HuggingFaceH4/MATH-500": {"default": {"test": problems(8)}},
        "EleutherAI/hendrycks_math": {
            "algebra": {"train": problems(64), "test": problems(64)},
            "geometry": {"train": problems(64), "test": problems(64)},
        },
        "POLARIS-Project/Polaris-Dataset-53K": {"default": {"train": problems(64)}},
        "zwhe99/DeepMath-103K": {"default": {"train": problems(128)}},
        "Anthropic/hh-rlhf": {"default": {"train": pairs(256), "test": pairs(32)}},
        "nvidia/HelpSteer3": {
            "preference": {"train": preferences(256), "validation": preferences(32)}
        },
        "hicai-zju/SciKnowEval": {"default": {"test": choices(128)}},
        "open-thoughts/OpenThoughts3-1.2M": {"default": {"train": conversations}},
        "Salesforce/wikitext": {"wikitext-103-raw-v1": {"train": text}},
        "prometheus-eval/Feedback-Collection": {"default": {"train": feedback}},
        "tangqiaoyu/ToolAlpaca": {
            "default": {"train": [{"instruction": f"Do {n}.", "output": str(n)} for n in range(64)]}
        },
    }.items():
        _write(folder / name, configs)


def _write_forecasts(file: Path) -> None:
    """Markets that closed before, or opened after the recipes' day of split."""
    source = [{"title": "A report", "summary": "It may rain.", "ranking": 1}]
    with file.open("w", newline="", encoding="utf-8") as opened:
        markets = []
        for place in range(24):
            month = 9 if place < 16 else 11
            market = {
                "submission_id": f"s{place}",
                "event_ticker": f"e{place}",
                "title": f"Rain in town {place}?",
                "snapshot_time": f"2025-{month:02d}-01T00:00:00Z",
                "close_time": f"2025-{month:02d}-20T00:00:00Z",
                "market_outcome": json.dumps({"Rain": place % 2}),
                "category": "Weather",
                "markets": json.dumps(["Rain"]),
                "sources": json.dumps(source),
            }
            markets.append(market)
        writer = csv.DictWriter(opened, list(markets[0]))
        writer.writeheader()
        writer.writerows(markets)


def _write_continual(folder: Path, rows: list[dict[str, Any]]) -> None:
    """The two tasks of the continual-learning recipe; it reads them as Arrow files."""
    for place, row in enumerate(rows):
        question, answer = row["messages"]
        reasoned = "<reasoning>\nSo.\n</reasoning>\n<answer>\nA\n</answer>"
        messages = [{"role": "system", "content": "Answer."}, question]
        rows[place] = {
            "messages": messages,
            "output_text": reasoned,
            "answer": "A",
            "prompt": question["content"],
            "golden_response": [answer["content"]],
            "golden_answer": [{"Action": "add", "Action_Input": "{}"}],
        }
    for task in ("science_data", "tooluse_data"):
        for split, part in (("train_data", rows), ("eval_data", rows[:4])):
            _write_lines(folder / task / f"{split}.jsonl", part)


def _write_lines(file: Path, rows: list[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _write(folder: Path, configs: dict[str, dict[str, list[dict[str, Any]]]]) -> None:
    lines = ["---", "configs:"]
    for config, splits in configs.items():
        lines += [f"- config_name: {config}", "  data_files:"]
        for split, rows in splits.items():
            _write_lines(folder / config / f"{split}.jsonl", rows)
            lines += [f"  - split: {split}", f"    path: {config}/{split}.jsonl"]
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]), encoding="utf-8")


def run_program(
    argv: Sequence[str | Path], work: Path, environment: Mapping[str, str], log: Path
) -> int:
    """The exit code of a program in the work folder; -1 where it took longer than five minutes."""
    with log.open("wb") as output:
        try:
            return subprocess.run(
                argv,
                cwd=work,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                timeout=300,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            return -1
