"""Parameters counted from a config are those of the module that transformers builds from it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import transformers
from tests.unit.planning.families import PUBLISHED, tiny

from hearth.control.catalog import read_catalog
from hearth.errors import ConfigError
from hearth.models.lora import linear_parts
from hearth.planning.architecture import read_architecture


def built(config: Any) -> Any:
    """The module without memory for its weights."""
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def counted(module: Any) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
        ("llama", {"head_dim": 32}),
        ("mistral", {}),
        ("qwen2", {}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {}),
        ("qwen3", {"head_dim": 24, "attention_bias": True}),
        ("qwen3_moe", {}),
        ("qwen3_moe", {"decoder_sparse_step": 2, "attention_bias": True}),
        ("qwen3_moe", {"mlp_only_layers": [0], "tie_word_embeddings": True}),
    ],
)
def test_parameters_are_those_of_the_module(kind: str, changes: dict[str, Any]) -> None:
    config = tiny(kind, **changes)

    model = read_architecture(config.to_dict())

    assert model.parameters == counted(built(config))


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_the_parameters_that_the_catalog_says(name: str) -> None:
    config = PUBLISHED[name]()

    model = read_architecture(config.to_dict())

    listed = read_catalog().models[f"accounts/fireworks/models/{name}"]
    assert model.parameters == listed.parameters == counted(built(config))
    assert model.max_positions == listed.context_length


def test_a_token_meets_the_experts_it_is_sent_to_and_no_others() -> None:
    model = read_architecture(PUBLISHED["qwen3-30b-a3b"]().to_dict())

    # What the model's name calls 3 billion, without the embedding's lookup.
    idle = 48 * 120 * 3 * 2048 * 768
    assert model.active_parameters == model.parameters - idle - 151936 * 2048
    assert round(model.active_parameters / 1e9) == 3


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_the_largest_layer_and_tensor_are_those_of_the_module(kind: str) -> None:
    config = tiny(kind, **({"mlp_only_layers": [0]} if kind == "qwen3_moe" else {}))
    module = built(config)

    model = read_architecture(config.to_dict())

    assert model.layer_parameters == max(map(counted, module.model.layers))
    assert model.largest_tensor == max(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_moe"])
def test_an_adapter_has_the_parameters_that_peft_gives_it(kind: str) -> None:
    config = tiny(kind, **({"mlp_only_layers": [1]} if kind == "qwen3_moe" else {}))
    module = built(config)
    linears = [
        module.get_submodule(name)
        for name, part in linear_parts(module).items()
        if part != "unembed"
    ]

    model = read_architecture(config.to_dict())

    expected = sum(8 * (linear.in_features + linear.out_features) for linear in linears)
    assert model.lora_parameters(8) == expected


def test_a_token_of_context_takes_keys_and_values_of_every_layer() -> None:
    model = read_architecture(PUBLISHED["qwen3-8b"]().to_dict())

    assert model.kv_bytes_per_token(2) == 2 * 36 * 8 * 128 * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type must be one of ['llama', 'mistral', 'qwen2', 'qwen3'"),
        ({"hidden_size": None}, "hidden_size must be a whole number >= 1 in the config, got None"),
        ({"vocab_size": "9"}, "vocab_size must be a whole number >= 1 in the config, got '9'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a whole number >= 1"),
    ],
)
def test_a_config_that_cannot_be_counted_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_architecture(tiny("llama").to_dict() | changes)
