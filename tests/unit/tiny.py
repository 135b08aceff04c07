"""A tiny random model on disk, for the tests of several packages."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig


LATENT_ATTENTION = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "v_head_dim": 12,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
}
"""The fields of a small ``DeepseekV3Config`` that other families do not have."""


def llama3_rope(positions: int) -> dict[str, Any]:
    """Llama 3's rotation of a model that was first trained on ``positions`` positions."""
    return {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": positions,
    }


def checksum(tensor: "Tensor") -> str:
    """The checksum of a tensor, as a manifest has it."""
    from hearth.sync.manifest import describe

    return describe({"": tensor})[""]["checksum"]


def shake(tensors: "Mapping[str, Tensor]", seed: int) -> None:
    """Change weights a little, in place."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in tensors.values():
            tensor += 0.05 * torch.randn(tensor.shape, generator=generator)


def make_decoder(config: "PretrainedConfig") -> Any:
    """A random model of a config; the same weights every time."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in module.parameters():
            # As initialized norms are all one and biases all zero.
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn_like(parameter)
    return module


def write_qwen(folder: Path) -> Path:
    """A Qwen3 of two layers with a tokenizer of 64 words; the same weights every time."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=3,
        bos_token_id=None,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return write_tokenizer(folder)


def write_tokenizer(folder: Path) -> Path:
    """The tokenizer of 64 words ``w0`` to ``w63``, of which ``w3`` ends a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(64)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w3").save_pretrained(folder)
    return folder
