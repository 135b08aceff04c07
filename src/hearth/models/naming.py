"""Which part of a model a linear layer belongs to, by its name.

Covers the names that the decoder families in transformers use; a linear layer that matches neither
list counts as MLP, so that every layer has a part.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from torch import nn

Part = Literal["attn", "mlp", "unembed"]

_ATTENTION_NAME = re.compile(
    "(q|k|v|o|out|qkv|q_a|q_b|kv_b)_proj|kv_a_proj_with_mqa|query_key_value|Wqkv|c_attn|W_pack"
    "|w[qkvo]"
)
_ATTENTION_BLOCKS = ("attn", "attention")


def linear_parts(module: Any) -> dict[str, Part]:
    """Every linear layer's full name and its part, in the module's order.

    GPT-2's ``Conv1D`` counts as linear. An attached adapter's base layers keep their plain names.
    """
    head = module.get_output_embeddings()
    parts: dict[str, Part] = {}
    for name, layer in module.named_modules():
        if ".lora_" in name or not _is_linear(getattr(layer, "base_layer", layer)):
            continue
        if not name.endswith(".base_layer"):
            parts[name] = "unembed" if layer is head else _part_of(name)
    return parts


def _is_linear(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D"


def _part_of(name: str) -> Part:
    *blocks, last = name.split(".")
    in_attention = any(word in block.lower() for block in blocks for word in _ATTENTION_BLOCKS)
    return "attn" if in_attention or _ATTENTION_NAME.fullmatch(last) else "mlp"
