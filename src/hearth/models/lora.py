"""LoRA adapters (arXiv:2106.09685) through ``peft``: attach, switch off, move, merge.

An adapter is injected into the module in place. Its tensors are float32 whatever the model's
dtype, and have the names that PEFT writes, so that either side reads the other's folders.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hearth.errors import ConfigError
from hearth.models.loading import LoadedModel, LoraOptions, base_tensors, copy_tensors

_ADAPTER = "default"
_PREFIX = "base_model.model."
_CONFIG_FILE = "adapter_config.json"
_WEIGHTS_FILE = "adapter_model.safetensors"

Part = Literal["attn", "mlp", "unembed"]

# Names in the decoder families of transformers. A linear layer with any other name is an MLP's.
_ATTENTION_NAME = re.compile(
    "(q|k|v|o|out|qkv|q_a|q_b|kv_b)_proj|kv_a_proj_with_mqa|query_key_value|Wqkv|c_attn|W_pack"
    "|w[qkvo]"
)
_ATTENTION_BLOCKS = ("attn", "attention")
EXPERT_WEIGHTS = ("gate_up_proj", "down_proj")
"""Parameters that hold all experts of a layer."""


def attach_lora(loaded: LoadedModel, options: LoraOptions) -> None:
    """Add an adapter to ``loaded`` and freeze all other weights. Its initial update is 0.

    The down projections are Kaiming uniform from ``options.seed`` alone, generated in the order of
    their names on the CPU, so that every process and device starts from the same bits; the up
    projections are 0.

    Raises:
        ConfigError: the model has no linear layer of the wanted parts, or has an adapter already.
    """
    # Importing takes a while, and only LoRA needs it.
    from hearth.models.peft_import import peft

    if loaded.lora is not None:
        raise ConfigError(f"{loaded.name!r} must have one adapter at most, got a second")
    largest = max(min(weight.shape) for weight in loaded.module.parameters() if weight.ndim == 2)
    if options.rank > largest:
        raise ConfigError(
            f"lora rank must be <= {largest}, the highest rank that a weight of {loaded.name!r} "
            f"can have, got {options.rank}: train all parameters with rank 0"
        )
    targets = target_modules(loaded.module, options)
    alpha: Any = int(options.alpha) if options.alpha == int(options.alpha) else options.alpha
    config = peft.LoraConfig(
        r=options.rank,
        lora_alpha=alpha,
        target_modules=targets,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings():
        # A tied head gets an adapter of its own here; its base stays tied, as intended. GPT-2's
        # transposed layers are recognized, with a warning.
        warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")
        warnings.filterwarnings("ignore", message=".*fan_in_fan_out.*")
        peft.inject_adapter_in_model(config, loaded.module, _ADAPTER)
    loaded.lora = options
    loaded.module.requires_grad_(False)
    generator = torch.Generator().manual_seed(options.seed)
    with torch.no_grad():
        for name, parameter in sorted(_adapter_parameters(loaded).items()):
            parameter.data = _initial_value(name, parameter, generator).to(loaded.device)
            parameter.requires_grad_(True)
    loaded.module.eval()


def detach_lora(loaded: LoadedModel) -> None:
    """Remove the adapter; the base weights are those from before ``attach_lora``."""
    for name, _, base in _find_adapted_layers(loaded.module):
        owner, _, attribute = name.rpartition(".")
        setattr(loaded.module.get_submodule(owner), attribute, base)
    # The injection leaves it, and transformers would treat the module as adapted.
    if hasattr(loaded.module, "peft_config"):
        del loaded.module.peft_config
    loaded.module.requires_grad_(True)
    loaded.lora = None


def target_modules(module: nn.Module, options: LoraOptions) -> list[str]:
    """Full names of the linear layers that ``options`` adapts.

    Of a mixture of experts these are none of an MLP: its experts are no linear layers, and PEFT
    takes the names of the others (a dense layer's, a shared expert's) for those of the experts.

    Raises:
        ConfigError: there are none.
    """
    is_mixture = has_experts(module)
    wanted: dict[Part, bool] = {
        "attn": options.train_attn,
        "mlp": options.train_mlp and not is_mixture,
        "unembed": options.train_unembed,
    }
    targets = [name for name, part in linear_parts(module).items() if wanted[part]]
    if not targets:
        parts = [part for part in wanted if getattr(options, f"train_{part}")]
        why = ", a mixture of experts: train attn or unembed" if is_mixture else ""
        raise ConfigError(f"lora must find linear layers of {parts}, got none in this model{why}")
    return targets


def has_experts(module: nn.Module) -> bool:
    """Whether the module has layers whose experts are one tensor."""
    return any(name.rpartition(".")[2] in EXPERT_WEIGHTS for name, _ in module.named_parameters())


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


def adapter_tensors(loaded: LoadedModel) -> dict[str, Tensor]:
    """The adapter's tensors, not copied, under PEFT's names.

    Raises:
        ConfigError: no adapter is attached.
    """
    return {
        _PREFIX + name.replace(f".{_ADAPTER}.", "."): parameter
        for name, parameter in _adapter_parameters(loaded).items()
    }


def load_adapter_tensors(loaded: LoadedModel, tensors: Mapping[str, Tensor]) -> None:
    """Copy ``tensors``, under PEFT's names, over the attached adapter.

    Raises:
        ConfigError: no adapter is attached.
        EngineError: names or shapes differ; nothing was changed.
    """
    copy_tensors(tensors, adapter_tensors(loaded))


@contextlib.contextmanager
def base_only(loaded: LoadedModel) -> Iterator[None]:
    """Inside the ``with`` the module computes without its adapter, if it has one."""
    layers = [layer for _, layer, _ in _find_adapted_layers(loaded.module)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def merge_tensors(
    loaded: LoadedModel, whole: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """``base_tensors`` with the adapter's update added in float32; changed tensors are copies.

    A head that is tied to the embedding and has an adapter gets its own name, untied.
    ``whole`` are the base tensors where the model's own are shards.
    """
    own = base_tensors(loaded.module)
    names = {id(tensor): name for name, tensor in own.items()}
    merged = dict(own if whole is None else whole)
    with torch.no_grad():
        for name, layer, base in _find_adapted_layers(loaded.module):
            weight = base.get_parameter("weight")
            if whole is not None:
                weight = whole[names[id(weight)]]
            update = layer.get_delta_weight(_ADAPTER).to(weight.device)
            total = weight.float() + update.float()
            merged[f"{name}.weight"] = total.to(weight.dtype)
    return merged


def write_adapter(loaded: LoadedModel, folder: Path) -> None:
    """Write the adapter as PEFT does; ``peft.PeftModel.from_pretrained`` loads the folder.

    Raises:
        ConfigError: no adapter is attached.
    """
    tensors = adapter_tensors(loaded)
    module: Any = loaded.module
    config = module.peft_config[_ADAPTER].to_dict()
    # PEFT makes sets of lists, and takes no text in the place of either.
    for name, value in config.items():
        if isinstance(value, set):
            config[name] = sorted(value) or None
    config["base_model_name_or_path"] = loaded.source
    config["inference_mode"] = True
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config, indent=2, sort_keys=True)
    (folder / _CONFIG_FILE).write_text(text, encoding="utf-8")
    arrays = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(arrays, folder / _WEIGHTS_FILE, metadata={"format": "pt"})


def read_adapter(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A PEFT adapter folder's config and its tensors, under PEFT's names.

    Raises:
        ConfigError: the folder holds no LoRA adapter in safetensors.
    """
    try:
        config = json.loads((folder / _CONFIG_FILE).read_text(encoding="utf-8"))
        tensors = load_file(folder / _WEIGHTS_FILE)
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(
            f"adapter_path must be a PEFT adapter's folder, got {str(folder)!r}: {error}"
        ) from None
    if config.get("peft_type") != "LORA":
        raise ConfigError(f"adapter must be LORA, got {config.get('peft_type')!r} in {folder}")
    # PEFT adds the whole frozen head when the head is adapted; the update does not need it.
    return config, {name: tensor for name, tensor in tensors.items() if ".lora_" in name}


def _find_adapted_layers(module: nn.Module) -> list[tuple[str, Any, nn.Module]]:
    """Name, PEFT layer and the layer inside it, of each layer that an adapter has replaced."""
    pairs = [
        (name, layer, getattr(layer, "base_layer", None)) for name, layer in module.named_modules()
    ]
    return [(name, layer, base) for name, layer, base in pairs if isinstance(base, nn.Module)]


def _adapter_parameters(loaded: LoadedModel) -> dict[str, nn.Parameter]:
    if loaded.lora is None:
        raise ConfigError(f"{loaded.name!r} must have a LoRA adapter, got none attached")
    return {
        name: parameter for name, parameter in loaded.module.named_parameters() if ".lora_" in name
    }


def _initial_value(name: str, parameter: Tensor, generator: torch.Generator) -> Tensor:
    value = torch.zeros(parameter.shape, dtype=torch.float32)
    if ".lora_A." in name:
        nn.init.kaiming_uniform_(value, a=math.sqrt(5), generator=generator)
    return value


def _is_linear(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D"


def _part_of(name: str) -> Part:
    *blocks, last = name.split(".")
    in_attention = any(word in block.lower() for block in blocks for word in _ATTENTION_BLOCKS)
    return "attn" if in_attention or _ATTENTION_NAME.fullmatch(last) else "mlp"
