"""A tiny random model of each architecture whose exports are tested, and its exports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tests.unit.tiny import LATENT_ATTENTION, make_decoder, shake
from torch import Tensor

from hearth.models.loading import LoadedModel, base_tensors, load_model
from hearth.models.lora import LoraOptions, adapter_tensors, attach_lora
from hearth.sync.store import Snapshot
from hearth.trainer.export import ExportOptions, export_snapshot

TOKENS = (5, 9, 11, 2, 40, 7, 63, 30)
_BODY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": 3,
    "pad_token_id": 0,
}
MIXTURES = ("qwen3_moe", "qwen2_moe", "olmoe", "mixtral", "glm4_moe", "deepseek_v3")
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": _BODY,
    "mistral": _BODY,
    "qwen2": _BODY,
    "qwen3": _BODY | {"tie_word_embeddings": True},
    "gemma2": _BODY,
    "granite": _BODY | {"logits_scaling": 3.0},
    "phi3": _BODY,
    "gpt2": {
        "vocab_size": 96,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 256,
        "initializer_range": 0.1,
        "bos_token_id": None,
        "eos_token_id": 3,
    },
    "qwen3_moe": _BODY | _EXPERTS | {"mlp_only_layers": [0]},
    "qwen2_moe": _BODY | _EXPERTS | {"shared_expert_intermediate_size": 48},
    "olmoe": _BODY | _EXPERTS,
    "mixtral": _BODY | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "glm4_moe": _BODY | _ROUTED | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "deepseek_v3": {name: size for name, size in _BODY.items() if name != "head_dim"}
    | LATENT_ATTENTION
    | {"num_attention_heads": 4, "num_experts_per_tok": 2},
}
"""Configs by ``model_type``. Three of the mixtures have a dense layer, three a shared expert."""
GPT_OSS = transformers.GptOssConfig(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    num_local_experts=4,
    num_experts_per_tok=2,
    max_position_embeddings=256,
    initializer_range=0.1,
    eos_token_id=3,
    pad_token_id=0,
)
"""Its experts are transposed, interleaved, gated in another way, and have biases."""


@dataclass(frozen=True)
class Exports:
    """What was exported of one model, and what each export must compute of ``TOKENS``."""

    source: Path
    """The model before training."""
    folders: dict[str, Path]
    """Of ``full`` weights, of an ``adapter``, and of an adapter that is ``merged``."""
    logprobs: dict[str, Tensor]
    """Of all tokens but the first, for each folder; float32 [T - 1]."""


def make_config(kind: str, **changes: Any) -> Any:
    """The config of a tiny model."""
    return transformers.AutoConfig.for_model(kind, **ARCHITECTURES[kind] | changes)


def write_exports(kind: str, folder: Path) -> Exports:
    """Save a tiny model under a folder, change it, and export what came of it."""
    source = folder / "source"
    make_decoder(make_config(kind)).save_pretrained(source)
    trained = load_model(source)
    shake(base_tensors(trained.module), 1)
    whole = Snapshot.capture("full", "base", "tiny", base_tensors(trained.module))
    adapted = load_model(source)
    attach_lora(adapted, LoraOptions(rank=8, alpha=16))
    shake(adapter_tensors(adapted), 2)
    assert adapted.lora is not None
    tensors, facts = adapter_tensors(adapted), adapted.lora.as_metadata()
    adapter = Snapshot.capture("adapter", "lora", "tiny", tensors, facts)
    folders = {name: folder / name for name in ("full", "adapter", "merged")}
    for name, snapshot in (("full", whole), ("adapter", adapter), ("merged", adapter)):
        export_snapshot(
            snapshot,
            ExportOptions(
                base_model="tiny",
                source=str(source),
                folder=str(folders[name]),
                merge_adapter=name == "merged",
            ),
        )
    own = {"full": trained, "adapter": adapted, "merged": adapted}
    return Exports(source, folders, {name: _logprobs(model) for name, model in own.items()})


def compute_logprobs(module: Any, tokens: Sequence[int] = TOKENS) -> Tensor:
    """Of all tokens but the first; float32 [T - 1]."""
    ids = torch.tensor([list(tokens)])
    with torch.no_grad():
        logprobs = module.eval()(ids).logits[0].float().log_softmax(-1)
    return logprobs[:-1].gather(1, ids[0, 1:, None]).squeeze(1)


def _logprobs(loaded: LoadedModel) -> Tensor:
    return compute_logprobs(loaded.module)
