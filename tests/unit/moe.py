"""A tiny random mixture of experts, and what it computes written down once more.

Legend: N layers, E experts of each, K experts per token, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tests.unit.tiny import write_tokenizer
from torch import Tensor
from torch.nn import functional

LAYERS, TOP_K, HEADS, HEAD_DIM = 2, 2, 4, 8
_EPS, _THETA = 1e-6, 10000.0


def moe_config(**changes: Any) -> Any:
    """A Qwen3-MoE of two layers that send each token to 2 of 8 experts."""
    from transformers import Qwen3MoeConfig

    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 512,
        "num_experts": 8,
        "num_experts_per_tok": TOP_K,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
        "tie_word_embeddings": True,
        "eos_token_id": 3,
        "bos_token_id": None,
        "pad_token_id": 0,
        "rms_norm_eps": _EPS,
        "rope_parameters": {"rope_type": "default", "rope_theta": _THETA},
        # Wide enough that experts differ, and that some tokens are likelier than others.
        "initializer_range": 0.2,
    }
    return Qwen3MoeConfig(**(sizes | changes))


def write_moe(folder: Path, **changes: Any) -> Path:
    """The model with a tokenizer of 64 words; the same weights every time."""
    from transformers import Qwen3MoeForCausalLM

    torch.manual_seed(0)
    module = Qwen3MoeForCausalLM(moe_config(**changes))
    module.save_pretrained(folder)
    return write_tokenizer(folder)


def write_tied_moe(folder: Path, *, noise: float) -> Path:
    """A model whose routers hardly tell three experts from each other, with some noise on top.

    Other noise sends tokens to other experts, which then weigh as much to 1e-6.
    """
    from transformers import Qwen3MoeForCausalLM

    torch.manual_seed(0)
    module: Any = Qwen3MoeForCausalLM(moe_config(num_experts=6))
    tie_routers(module, noise=noise)
    module.save_pretrained(folder)
    return write_tokenizer(folder)


@torch.no_grad()
def tie_routers(module: Any, *, noise: float = 0.0) -> None:
    """Make routers of six experts hardly tell three of them from each other, and the others."""
    fresh = torch.Generator().manual_seed(1)
    for layer in module.model.layers:
        router = layer.mlp.gate.weight
        close = 5e-8 * torch.randn(router.shape, generator=fresh)
        router.copy_(router[:2].repeat_interleave(3, dim=0) + close)
        router.add_(noise * torch.randn(router.shape, generator=fresh))


def plain_logprobs(
    weights: Mapping[str, Tensor], tokens: list[int], experts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Logprobs [T - 1] of the tokens after the first, and the experts [T, N, K] they went by.

    ``weights`` are a state dict; all is computed in their dtype. ``experts`` forces the choice
    where it is not negative.
    """
    hidden = weights["model.embed_tokens.weight"][torch.tensor(tokens)]
    chosen: list[Tensor] = []
    for layer in range(LAYERS):
        own = _part(weights, f"model.layers.{layer}.")
        hidden = hidden + _attended(own, _normed(hidden, own["input_layernorm.weight"]))
        wanted = None if experts is None else experts[:, layer]
        added, took = _mixed(own, _normed(hidden, own["post_attention_layernorm.weight"]), wanted)
        hidden = hidden + added
        chosen.append(took)
    hidden = _normed(hidden, weights["model.norm.weight"])
    rows = torch.log_softmax(hidden @ weights["model.embed_tokens.weight"].T, dim=-1)[:-1]
    targets = torch.tensor(tokens[1:])
    return rows[torch.arange(len(targets)), targets], torch.stack(chosen, dim=1)


def _part(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): weight
        for name, weight in weights.items()
        if name.startswith(prefix)
    }


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + _EPS)


def _attended(own: Mapping[str, Tensor], x: Tensor) -> Tensor:
    def heads(name: str) -> Tensor:
        return (x @ own[f"self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, HEAD_DIM))

    query = _rotated(_normed(heads("q"), own["self_attn.q_norm.weight"]))
    key = _rotated(_normed(heads("k"), own["self_attn.k_norm.weight"]))
    shared = HEADS // key.shape[1]
    key, value = key.repeat_interleave(shared, 1), heads("v").repeat_interleave(shared, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) / HEAD_DIM**0.5
    future = torch.ones(len(x), len(x)).triu(1).bool()
    seen = scores.masked_fill(future, -torch.inf).softmax(-1)
    mixed = torch.einsum("hqk,khd->qhd", seen, value).flatten(1)
    return mixed @ own["self_attn.o_proj.weight"].T


def _rotated(x: Tensor) -> Tensor:
    half = HEAD_DIM // 2
    rates = _THETA ** (-torch.arange(half, dtype=x.dtype) / half)
    angles = (torch.arange(len(x), dtype=x.dtype)[:, None] * rates)[:, None]
    first, second = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _mixed(own: Mapping[str, Tensor], x: Tensor, wanted: Tensor | None) -> tuple[Tensor, Tensor]:
    """Each token through its experts, one at a time."""
    shares = (x @ own["mlp.gate.weight"].T).softmax(-1)
    chosen = shares.topk(TOP_K, dim=-1).indices
    if wanted is not None:
        chosen = torch.where(wanted >= 0, wanted, chosen)
    rows: list[Tensor] = []
    for token, experts in enumerate(chosen.tolist()):
        share = shares[token, experts]
        parts = [_expert(own, x[token], expert) for expert in experts]
        rows.append((share / share.sum()) @ torch.stack(parts))
    return torch.stack(rows), chosen


def _expert(own: Mapping[str, Tensor], x: Tensor, expert: int) -> Tensor:
    gate, up = (own["mlp.experts.gate_up_proj"][expert] @ x).chunk(2)
    return own["mlp.experts.down_proj"][expert] @ (functional.silu(gate) * up)
