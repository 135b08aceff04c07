"""The workload that systems are compared on: tiny Qwen3 models, sums to answer, digits rewarded.

Model, tokenizer, rows and reward are those that other systems' scripts use beside ours: a
character tokenizer, weights that depend on the seed alone, prompts of plain text.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

CHARACTERS = "0123456789+-*=() abcdefghijklmnopqrstuvwxyz.,?:"
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
CONTEXT = "you are given a sum. reply with digits only. "
SIZES: dict[str, dict[str, int]] = {
    "nano": {
        "hidden_size": 4,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "intermediate_size": 4,
    },
    "1m": {
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 384,
    },
    "3m": {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 768,
    },
    "10m": {
        "hidden_size": 384,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 1152,
    },
    "0.6b": {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
    },
}
"""Shapes of the models, by roughly their number of parameters; of the smallest, 340.

``0.6b`` is that of Qwen3-0.6B where the vocabulary is padded to 151,936.
"""


def make_model(
    folder: Path, size: str, *, vocab: int = 0, fixed_length: bool = False, seed: int = 0
) -> Path:
    """A folder with a randomly initialized Qwen3 and its tokenizer.

    ``vocab`` above the number of characters pads the vocabulary with words that no text has. A
    ``fixed_length`` model knows no end of sequence, so that every completion has all its tokens.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = make_tokenizer(vocab)
    torch.manual_seed(seed)
    end = None if fixed_length else tokenizer.eos_token_id
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        rope_theta=10000.0,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=end,
        **SIZES[size],
    )
    module: Any = Qwen3ForCausalLM(config).float()
    module.generation_config.eos_token_id = end
    module.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def model_folder(asked: argparse.Namespace, folder: Path) -> Path:
    """The folder that a script's ``--model`` names, or one made for the size that it names."""
    if asked.model not in SIZES:
        return Path(asked.model)
    return make_model(
        folder / "model",
        asked.model,
        vocab=asked.vocab,
        fixed_length=asked.fixed_len,
        seed=asked.seed,
    )


def make_tokenizer(vocab: int = 0) -> Any:
    """A tokenizer of single characters; a conversation is its last message, as it stands."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL, *CHARACTERS]
    words += [f"<extra_{number}>" for number in range(len(words), vocab)]
    known = {word: number for number, word in enumerate(words)}
    inner = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
    )
    tokenizer.chat_template = "{{ messages[-1]['content'] }}"
    return tokenizer


def make_rows(count: int, *, seed: int = 0, prompt_pad: int = 0) -> list[dict[str, Any]]:
    """Sums of two numbers; ``prompt_pad`` characters of context stand before each."""
    chance = random.Random(seed)
    context = (CONTEXT * (1 + prompt_pad // len(CONTEXT)))[:prompt_pad]
    rows: list[dict[str, Any]] = []
    for _ in range(count):
        left, right = chance.randint(0, 99), chance.randint(0, 99)
        content = f"{context}what is {left}+{right}? answer:"
        message = {"role": "user", "content": content}
        rows.append({"messages": [message], "ground_truth": str(left + right)})
    return rows


def digit_share(text: str, row: Mapping[str, Any]) -> float:
    """The share of digits among the characters: dense, and learned within some dozen steps."""
    return sum(character.isdigit() for character in text) / max(1, len(text))


def sgemm_gflops(size: int = 1024, rounds: int = 12) -> float:
    """What the machine multiplies now, in float32; a low figure means that others work here too."""
    values = torch.randn(size, size)
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        values @ values
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best / 1e9


def processor() -> str:
    """The processor's name and the number of cores, for a table's heading."""
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return f"{names[0] if names else 'unknown processor'}, {os.cpu_count()} cores"
