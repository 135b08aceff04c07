"""The place where a ``transformers`` module meets packed rows. Nothing of the module is changed.

Packed rows are one sequence to the module, each with its own position; which row sees which is in
the segments that go with them through its layers.
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
    """Run the module's ``sdpa`` attention through ours, which transformers is to call ``name``.

    Padded rows take the same way as ever.
    """
    AttentionInterface.register(name, _attention)
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    module.set_attn_implementation(name)


def packed_states(
    backbone: Any, tokens: Tensor, positions: Tensor, segments: Segments, kernel: Kernel
) -> Tensor:
    """Last hidden states [S, H] of rows with these tokens and positions [S]."""
    output = backbone(
        input_ids=tokens[None],
        position_ids=positions[None],
        # Four dimensions mean that there is nothing to be made of it: no mask of rows by rows.
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
    packed_segments: Segments | None = None,
    packed_kernel: Kernel | None = None,
    **rest: Any,
) -> tuple[Tensor, Tensor | None]:
    if packed_segments is None or packed_kernel is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **rest)
    q, k, v = (one[0].transpose(0, 1) for one in (query, key, value))
    return attend(q, k, v, packed_segments, rest["scaling"], packed_kernel)[None], None
