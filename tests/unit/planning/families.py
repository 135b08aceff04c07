"""Configs of real models, as their folders have them, and of tiny ones of each family."""

from __future__ import annotations

from typing import Any

import transformers

_TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 3,
    "pad_token_id": 0,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def tiny(kind: str, **changes: Any) -> Any:
    """A tiny config of ``llama``, ``mistral``, ``qwen2``, ``qwen3`` or ``qwen3_moe``."""
    sizes = _TINY | (_EXPERTS if kind == "qwen3_moe" else {}) | changes
    return transformers.AutoConfig.for_model(kind, **sizes)


def qwen3(**changes: Any) -> Any:
    """The config of a dense Qwen3 as published."""
    sizes = {
        "vocab_size": 151936,
        "head_dim": 128,
        "num_key_value_heads": 8,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    }
    return transformers.AutoConfig.for_model("qwen3", **(sizes | changes))


def qwen3_moe(**changes: Any) -> Any:
    """The config of a Qwen3 with experts as published."""
    sizes = {
        "vocab_size": 151936,
        "head_dim": 128,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    }
    return transformers.AutoConfig.for_model("qwen3_moe", **(sizes | changes))


PUBLISHED: dict[str, Any] = {
    "qwen3-0p6b": lambda: qwen3(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        tie_word_embeddings=True,
    ),
    "qwen3-1p7b": lambda: qwen3(
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=28,
        num_attention_heads=16,
        tie_word_embeddings=True,
    ),
    "qwen3-4b": lambda: qwen3(
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
        tie_word_embeddings=True,
    ),
    "qwen3-8b": lambda: qwen3(
        hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32
    ),
    "qwen3-14b": lambda: qwen3(
        hidden_size=5120, intermediate_size=17408, num_hidden_layers=40, num_attention_heads=40
    ),
    "qwen3-32b": lambda: qwen3(
        hidden_size=5120, intermediate_size=25600, num_hidden_layers=64, num_attention_heads=64
    ),
    "qwen3-30b-a3b": lambda: qwen3_moe(
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=48,
        num_attention_heads=32,
        moe_intermediate_size=768,
    ),
}
"""Configs by the names that the catalog gives the models."""
OTHERS: dict[str, Any] = {
    "qwen3-235b-a22b": lambda: qwen3_moe(
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=94,
        num_attention_heads=64,
        moe_intermediate_size=1536,
    )
}
"""Configs of models that the catalog does not have."""
