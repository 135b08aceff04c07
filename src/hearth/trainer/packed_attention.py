"""Packed tokens through an unchanged ``transformers`` module.

The module sees one sequence in which each token has its own position. Segments, passed through its
layers as keyword arguments, say which token sees which.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from hearth.trainer.segments import Kernel, Segments, attend


def install(module: Any, name: str) -> None:
    """Register our attention with transformers as ``name``, and have the module use it.

    Padded batches still run through ``sdpa``.
    """
    AttentionInterface.register(name, _attention)
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    module.set_attn_implementation(name)


def run_packed(
    backbone: Any, tokens: Tensor, positions: Tensor, segments: Segments, kernel: Kernel
) -> Tensor:
    """Last hidden states [S, H] of packed tokens and their positions [S]."""
    output = backbone(
        input_ids=tokens[None],
        position_ids=positions[None],
        # A mask of four dimensions is used as it is; otherwise one of S by S would be made.
        attention_mask=torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=tokens.device),
        use_cache=False,
        packed_segments=segments,
        packed_kernel=kernel,
    )
    return output.last_hidden_state[0]


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    segments: Segments | None = options.pop("packed_segments", None)
    kernel: Kernel | None = options.pop("packed_kernel", None)
    if segments is None or kernel is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    return attend(q, k, v, segments, options["scaling"], kernel)[None], None
