"""The sizes of a causal LM, read from the module that its config describes, without its weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from hearth.errors import ConfigError
from hearth.models.experts import EXPERT_WEIGHTS, expert_sizes, find_experts
from hearth.models.loading import loading_lock
from hearth.models.lora import linear_parts
from hearth.planning.architecture import Architecture, LoraPart


def read_architecture(config: Any) -> Architecture:
    """The sizes of any model that ``AutoModelForCausalLM`` makes from a transformers config.

    Raises:
        ConfigError: transformers makes no causal LM of it, or the config lacks a size.
    """
    module = _build(config)
    layers = _find_layers(module)
    parameters = _count(module)
    inside = [_count(layer) for layer in layers]
    embedding = module.get_input_embeddings().weight
    return Architecture(
        model_type=str(config.model_type),
        parameters=parameters,
        outer_parameters=parameters - sum(inside),
        layer_parameters=max(inside, default=0),
        largest_tensor=max(parameter.numel() for parameter in module.parameters()),
        lookup_parameters=0 if _is_tied(module) else embedding.numel(),
        matrix_parameters=sum(matrix.numel() for matrix in find_matrices(module).values()),
        num_layers=_size(config, "num_hidden_layers"),
        hidden=_size(config, "hidden_size"),
        heads=_size(config, "num_attention_heads"),
        kv_heads=_kv_heads(config),
        head_dim=_head_dim(config),
        inner=_inner(module, _size(config, "hidden_size")),
        vocab=int(embedding.shape[0]),
        max_positions=getattr(config, "max_position_embeddings", None),
        has_head_norms=any(name.endswith(".q_norm") for name, _ in module.named_modules()),
        adapted=_count_adapted(module),
        **_read_experts(config, layers),
        **_read_cache(config),
    )


def find_matrices(module: Any) -> dict[str, nn.Parameter]:
    """The single matrices of a causal LM's layers: none of its embeddings and its head."""
    head = module.get_output_embeddings()
    outside = {
        id(parameter)
        for part in module.modules()
        if part is head or isinstance(part, nn.Embedding)
        for parameter in part.parameters()
    }
    return {
        name: parameter
        for name, parameter in module.named_parameters()
        if parameter.ndim == 2 and id(parameter) not in outside
    }


def _build(config: Any) -> Any:
    # Importing takes two seconds; who has a config has done so.
    import transformers

    try:
        with loading_lock, torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(config)
    except (ValueError, KeyError, ImportError, RuntimeError, TypeError, ZeroDivisionError) as error:
        raise ConfigError(
            f"model must be a causal LM that transformers knows, got {config.model_type!r}: {error}"
        ) from None


def _find_layers(module: nn.Module) -> list[nn.Module]:
    """The layers that ranks gather one by one (``hearth.models.parallel.shard``)."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [part for part in module.modules() if isinstance(part, GradientCheckpointingLayer)]


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _is_tied(module: Any) -> bool:
    head = module.get_output_embeddings()
    return head is not None and head.weight is module.get_input_embeddings().weight


def _sizes(layer: Any) -> tuple[int, int]:
    """Inputs and outputs of a linear layer, or of GPT-2's."""
    rows, columns = layer.weight.shape
    return (columns, rows) if isinstance(layer, nn.Linear) else (rows, columns)


def _count_adapted(module: nn.Module) -> dict[LoraPart, int]:
    sums: dict[LoraPart, int] = {}
    for name, part in linear_parts(module).items():
        sums[part] = sums.get(part, 0) + sum(_sizes(module.get_submodule(name)))
    for experts in find_experts(module).values():
        for weight in EXPERT_WEIGHTS:
            count, inputs, outputs = expert_sizes(experts, weight)
            sums["mlp"] = sums.get("mlp", 0) + count * (inputs + outputs)
    return sums


def _inner(module: nn.Module, hidden: int) -> int:
    mlps = [name for name, part in linear_parts(module).items() if part == "mlp"]
    sizes = [_sizes(module.get_submodule(name)) for name in mlps]
    return max((inputs for inputs, outputs in sizes if outputs == hidden), default=0)


def _experts(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in module.named_parameters():
        last = name.rpartition(".")[2]
        if last in EXPERT_WEIGHTS:
            yield last, parameter


def _read_experts(config: Any, layers: list[nn.Module]) -> dict[str, int]:
    weights = [dict(_experts(layer)) for layer in layers]
    sparse = [experts for experts in weights if experts]
    if not sparse:
        return {}
    down = sparse[0]["down_proj"]
    return {
        "sparse_layers": len(sparse),
        "experts": int(down.shape[0]),
        "experts_per_token": _size(config, "num_experts_per_tok"),
        "expert_inner": down.numel() // (int(down.shape[0]) * _size(config, "hidden_size")),
        "expert_parameters": sum(parameter.numel() for parameter in sparse[0].values()),
    }


def _read_cache(config: Any) -> dict[str, int]:
    num_layers = _size(config, "num_hidden_layers")
    window = getattr(config, "sliding_window", None) or 0
    default = "sliding_attention" if window else "full_attention"
    kinds = getattr(config, "layer_types", None) or [default] * num_layers
    windows = kinds.count("sliding_attention") if window else 0
    # Layers of another kind, such as linear attention, keep a state that does not grow.
    kept = sum(kind.endswith("_attention") and kind != "linear_attention" for kind in kinds)
    latent = getattr(config, "kv_lora_rank", None)
    if latent:
        # vLLM keeps the latents that all heads share, and each GPU has all of them.
        sizes = {"cache_width": latent + config.qk_rope_head_dim, "cache_heads": 1}
    else:
        heads = _kv_heads(config)
        sizes = {"cache_width": 2 * heads * _head_dim(config), "cache_heads": heads}
    return sizes | {"cached_layers": kept - windows, "window_layers": windows, "window": window}


def _kv_heads(config: Any) -> int:
    return _size(config, "num_key_value_heads", _size(config, "num_attention_heads"))


def _head_dim(config: Any) -> int:
    if getattr(config, "kv_lora_rank", None):
        return config.qk_nope_head_dim + config.qk_rope_head_dim
    heads, hidden = _size(config, "num_attention_heads"), _size(config, "hidden_size")
    return _size(config, "head_dim", hidden // heads)


def _size(config: Any, name: str, default: int | None = None) -> int:
    value = getattr(config, name, None)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} must be a whole number >= 1 in the config, got {value!r}")
    return value
