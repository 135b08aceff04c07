"""Random plain decoders in memory, and what they say to the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transformers
from tests.unit.tiny import llama3_rope, make_decoder
from torch import Tensor

from hearth.inference.engine.cache import SlotCache
from hearth.inference.engine.prompts import Extras
from hearth.inference.engine.runner import ModelRunner
from hearth.models.loading import LoadedModel

BODY: dict[str, Any] = {
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
    "eos_token_id": 257,
    "pad_token_id": 256,
    "bos_token_id": None,
}
WIDE = "wide layers"
"""The kind of a plain one whose weights no core's cache holds."""
PLAIN: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"num_key_value_heads": 4}),
    "llama with one key head, tied": (
        "LlamaConfig",
        {"num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "llama 3's rotation": ("LlamaConfig", {"rope_parameters": llama3_rope(64)}),
    "llama with large heads": ("LlamaConfig", {"head_dim": 24}),
    "mistral": ("MistralConfig", {"sliding_window": None, "head_dim": 32}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 80}),
    "qwen3 with heads of its own": ("Qwen3Config", {"head_dim": 6, "num_key_value_heads": 4}),
    WIDE: (
        "Qwen2Config",
        {"hidden_size": 1024, "intermediate_size": 1040, "initializer_range": 0.03},
    ),
}
OTHER: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("Gemma2Config", {"head_dim": 16, "sliding_window": 512}),
    "a sliding window": ("MistralConfig", {"sliding_window": 512}),
    "partial rotation": ("PhiConfig", {"num_key_value_heads": 4, "partial_rotary_factor": 0.5}),
    "biases where no family has them": ("LlamaConfig", {"attention_bias": True}),
    "experts": (
        "Qwen3MoeConfig",
        {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
}


def build(kind: str, dtype: torch.dtype = torch.float32) -> LoadedModel:
    """A random model of a kind; the same weights every time."""
    name, options = (PLAIN | OTHER)[kind]
    module = make_decoder(getattr(transformers, name)(**BODY | options)).eval().to(dtype)
    return LoadedModel(module, kind, kind, dtype, torch.device("cpu"), (257,), 264, 1024)


def make_prompts(*lengths: int, seed: int = 0) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(seed)
    return [tuple(rng.integers(0, 250, length).tolist()) for length in lengths]


def decode(
    runner: ModelRunner, prompts: Sequence[tuple[int, ...]], steps: int = 6, slots: int = 16
) -> Tensor:
    """Logprobs [steps, P, V] after the prompts and the same tokens for all, one by one."""
    cache = SlotCache(runner.cache_shape, budget_bytes=2**30, max_slots=slots)
    cache.reserve(slots, max(map(len, prompts)) + steps, active=0)
    positions = np.zeros(slots, np.int64)
    for slot, prompt in enumerate(prompts):
        (filled,), _ = runner.prefill([prompt], Extras())
        cache.fill([slot], filled.keys, filled.values)
        positions[slot] = len(prompt)
    tokens = np.zeros(slots, np.int64)
    logprobs: list[Tensor] = []
    for step in range(steps):
        tokens[: len(prompts)] = 11 * step + 5
        logits = runner.decode(tokens, positions, cache)
        logprobs.append(logits[: len(prompts)].float().log_softmax(-1).clone())
        positions[: len(prompts)] += 1
    return torch.stack(logprobs)
