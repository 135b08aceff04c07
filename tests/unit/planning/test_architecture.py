"""Parameters counted from a config are those of the module that transformers builds from it."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
import transformers
from tests.unit.architectures import ARCHITECTURES, make_config
from tests.unit.planning.families import PUBLISHED
from transformers.modeling_layers import GradientCheckpointingLayer

from hearth.control.catalog import read_catalog
from hearth.errors import ConfigError
from hearth.models.experts import EXPERT_WEIGHTS
from hearth.models.loading import LoraOptions
from hearth.models.lora import target_experts, target_modules
from hearth.models.sizes import read_architecture
from hearth.planning.architecture import LoraPart


def built(config: Any) -> Any:
    """The module without memory for its weights."""
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def counted(module: Any) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_sizes_are_read_from_the_model_of_any_architecture(kind: str) -> None:
    config = make_config(kind)
    module = built(config)

    model = read_architecture(config)

    layers = [part for part in module.modules() if isinstance(part, GradientCheckpointingLayer)]
    assert model.parameters == counted(module)
    assert model.layer_parameters == max(map(counted, layers))
    assert model.outer_parameters == counted(module) - sum(map(counted, layers))
    assert model.largest_tensor == max(parameter.numel() for parameter in module.parameters())
    assert (model.num_layers, model.vocab) == (2, 96)


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_the_parameters_that_the_catalog_says(name: str) -> None:
    config = PUBLISHED[name]()

    model = read_architecture(config)

    listed = read_catalog().models[f"accounts/fireworks/models/{name}"]
    assert model.parameters == listed.parameters == counted(built(config))
    assert model.max_positions == listed.context_length


def test_a_token_meets_the_experts_it_is_sent_to_and_no_others() -> None:
    model = read_architecture(PUBLISHED["qwen3-30b-a3b"]())

    # What the model's name calls 3 billion, without the embedding's lookup.
    idle = 48 * 120 * 3 * 2048 * 768
    assert model.active_parameters == model.parameters - idle - 151936 * 2048
    assert round(model.active_parameters / 1e9) == 3


@pytest.mark.parametrize("kind", ["llama", "gpt2", "phi3", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("part", ["attn", "mlp", "unembed"])
def test_an_adapter_has_the_parameters_that_peft_gives_it(kind: str, part: LoraPart) -> None:
    config = make_config(kind)
    module = built(config)
    flags: Any = {f"train_{name}": name == part for name in ("attn", "mlp", "unembed")}

    options = LoraOptions(rank=8, **flags)

    model = read_architecture(config)

    peft.inject_adapter_in_model(
        peft.LoraConfig(
            r=8,
            target_modules=[],
            target_parameters=[f"{name}.weight" for name in target_modules(module, options)]
            + [
                f"{name}.{weight}"
                for name in target_experts(module, options)
                for weight in EXPERT_WEIGHTS
            ],
        ),
        module,
    )
    adapter = [weight for name, weight in module.named_parameters() if ".lora_" in name]
    assert model.lora_parameters(8, (part,)) == sum(weight.numel() for weight in adapter)


def test_a_token_of_context_takes_keys_and_values_of_every_layer() -> None:
    model = read_architecture(PUBLISHED["qwen3-8b"]())

    assert model.kv_bytes_per_token(2) == 2 * 36 * 8 * 128 * 2


def test_layers_with_a_window_keep_no_more_than_it() -> None:
    # Gemma 2's layers have a window in turns; a plain Mistral's all have one.
    half = read_architecture(make_config("gemma2", sliding_window=16))
    all_layers = read_architecture(make_config("mistral", sliding_window=16))
    none = read_architecture(make_config("mistral", sliding_window=None))

    token = 2 * 32 * 4
    assert half.kv_bytes(100, 4) == (100 + 16) * token
    assert all_layers.kv_bytes(100, 4) == 2 * 16 * token
    assert none.kv_bytes(100, 4) == 100 * none.kv_bytes_per_token(4) == 2 * 100 * token


def test_latent_attention_keeps_latents_that_no_two_gpus_share() -> None:
    model = read_architecture(make_config("deepseek_v3"))

    assert model.kv_bytes_per_token(2) == 2 * (16 + 8) * 2
    assert model.cache_heads == 1


def test_a_config_that_cannot_be_counted_is_refused() -> None:
    with pytest.raises(ConfigError, match="model must be a causal LM that transformers knows"):
        read_architecture(transformers.AutoConfig.for_model("vit"))
