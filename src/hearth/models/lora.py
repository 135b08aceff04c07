"""LoRA adapters (arXiv:2106.09685) through ``peft``: attach, switch off, move, merge.

An adapter is injected into the module in place. Its tensors are float32 whatever the model's
dtype, and have the names that PEFT writes, so that either side reads the other's folders. Those of
a mixture's experts have shapes and names of their own (``hearth.models.experts``), and PEFT's in
its folders only: there an expert's numbers are not next to each other.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hearth.errors import ConfigError
from hearth.models.experts import (
    EXPERT_WEIGHTS,
    AdaptedExperts,
    find_experts,
    initialize_down,
    require_adaptable,
)
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
# Of a mixture: what weighs experts against each other, or the shared one against them.
_ROUTER_NAME = re.compile(".*gate|router")
# PEFT wraps the first of EXPERT_WEIGHTS inside of the second.
_PEFT_NAMES: Mapping[str, str] = dict(zip(EXPERT_WEIGHTS, (".base_layer", ""), strict=True))
_EXPERT_NAME = re.compile(rf"(.*)\.({'|'.join(EXPERT_WEIGHTS)})\.(lora_[AB])")


def attach_lora(loaded: LoadedModel, options: LoraOptions) -> None:
    """Add an adapter to ``loaded`` and freeze all other weights. Its initial update is 0.

    The down projections are Kaiming uniform from ``options.seed`` alone, generated in the order of
    their names on the CPU, so that every process and device starts from the same bits; the up
    projections are 0.

    Raises:
        ConfigError: the model has no layer of the wanted parts, its experts are computed in a way
            of their own, or it has an adapter already.
    """
    if loaded.lora is not None:
        raise ConfigError(f"{loaded.name!r} must have one adapter at most, got a second")
    largest = max(min(weight.shape) for weight in loaded.module.parameters() if weight.ndim == 2)
    if options.rank > largest:
        raise ConfigError(
            f"lora rank must be <= {largest}, the highest rank that a weight of {loaded.name!r} "
            f"can have, got {options.rank}: train all parameters with rank 0"
        )
    targets = target_modules(loaded.module, options)
    experts = target_experts(loaded.module, options)
    if targets:
        _inject(loaded.module, _make_config(options, targets))
    for name, layer in experts.items():
        adapted = AdaptedExperts(
            layer, rank=options.rank, scale=options.alpha / options.rank, device=loaded.device
        )
        _replace(loaded.module, name, adapted)
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
        _replace(loaded.module, name, base)
    loaded.module.requires_grad_(True)
    loaded.lora = None


def target_modules(module: nn.Module, options: LoraOptions) -> list[str]:
    """Full names of the linear layers that ``options`` adapts; ``target_experts`` has the rest.

    Raises:
        ConfigError: neither has any.
    """
    experts = find_experts(module)
    wanted: dict[Part, bool] = {
        "attn": options.train_attn,
        "mlp": options.train_mlp and (options.train_experts or not experts),
        "unembed": options.train_unembed,
    }
    targets = [name for name, part in linear_parts(module).items() if wanted[part]]
    if not targets and not (wanted["mlp"] and experts):
        parts = [part for part in wanted if getattr(options, f"train_{part}")]
        raise ConfigError(f"lora must find linear layers of {parts}, got none in this model")
    return targets


def target_experts(module: nn.Module, options: LoraOptions) -> dict[str, nn.Module]:
    """The modules of experts that ``options`` adapts, by full name; none in a dense model.

    Raises:
        ConfigError: they compute their experts in a way of their own.
    """
    if not options.changes_experts:
        return {}
    experts = find_experts(module)
    for name, layer in experts.items():
        require_adaptable(getattr(layer, "base_layer", layer), name)
    return experts


def has_experts(module: nn.Module) -> bool:
    """Whether the module has layers whose experts are one tensor."""
    return bool(find_experts(module))


def linear_parts(module: Any) -> dict[str, Part]:
    """Every linear layer's full name and its part, in the module's order.

    GPT-2's ``Conv1D`` counts as linear, a mixture's router does not. An attached adapter's base
    layers keep their plain names.
    """
    head = module.get_output_embeddings()
    is_mixture = has_experts(module)
    parts: dict[str, Part] = {}
    for name, layer in module.named_modules():
        if ".lora_" in name or not _is_linear(getattr(layer, "base_layer", layer)):
            continue
        is_router = is_mixture and _ROUTER_NAME.fullmatch(name.rpartition(".")[2])
        if not name.endswith(".base_layer") and not is_router:
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
            if isinstance(layer, AdaptedExperts):
                for part in EXPERT_WEIGHTS:
                    matrices = merged[f"{name}.{part}"]
                    merged[f"{name}.{part}"] = layer.merge(part, matrices)
                continue
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
    tensors = to_peft(adapter_tensors(loaded))
    config = _describe_adapter(loaded)
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


def is_expert_tensor(name: str) -> bool:
    """Whether an adapter's tensor of this name changes experts."""
    return _EXPERT_NAME.fullmatch(name) is not None


def to_peft(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """An adapter's tensors as PEFT's files have them.

    PEFT stacks the experts of a weight: down projections in rows, [E * R, I], and up projections
    in columns with the expert as the last index, [O, R * E].
    """
    converted: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if match := _EXPERT_NAME.fullmatch(name):
            layer, weight, matrix = match.groups()
            name = f"{layer}{_PEFT_NAMES[weight]}.{matrix}.weight"
            is_down = matrix == "lora_A"
            tensor = tensor.flatten(0, 1) if is_down else tensor.permute(1, 2, 0).flatten(1)
        converted[name] = tensor
    return converted


def from_peft(tensors: Mapping[str, Tensor], loaded: LoadedModel) -> dict[str, Tensor]:
    """The tensors of PEFT's files as ``adapter_tensors`` has them.

    Where the files leave all experts alone, those of ``loaded`` begin with an update of 0.
    """
    converted = dict(tensors)
    experts = {
        name: tensor.detach()
        for name, tensor in adapter_tensors(loaded).items()
        if _EXPERT_NAME.fullmatch(name)
    }
    if not to_peft(experts).keys() & tensors.keys():
        fresh = {name: torch.zeros_like(own) for name, own in experts.items() if "lora_B" in name}
        return converted | experts | fresh
    for name, own in experts.items():
        (theirs, like), *_ = to_peft({name: own}).items()
        if theirs in converted and converted[theirs].shape == like.shape:
            count, rows, columns = own.shape
            value = converted.pop(theirs)
            is_down = "lora_A" in name
            value = value.view(own.shape) if is_down else value.view(rows, columns, count)
            converted[name] = value if is_down else value.permute(2, 0, 1)
    return converted


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


def _make_config(
    options: LoraOptions, modules: Sequence[str], parameters: Sequence[str] = ()
) -> Any:
    # Importing takes a while, and only LoRA needs it.
    from hearth.models.peft_import import peft

    alpha: Any = int(options.alpha) if options.alpha == int(options.alpha) else options.alpha
    return peft.LoraConfig(
        r=options.rank,
        lora_alpha=alpha,
        target_modules=list(modules),
        target_parameters=list(parameters) or None,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )


def _inject(module: nn.Module, config: Any) -> None:
    """Replace linear layers by PEFT's."""
    from hearth.models.peft_import import peft

    # Where PEFT sees a mixture's config, it takes the names of dense MLPs for those of experts.
    holder = nn.Module()
    for name, child in module.named_children():
        holder.add_module(name, child)
    with warnings.catch_warnings():
        # GPT-2's transposed layers are recognized, with a warning.
        warnings.filterwarnings("ignore", message=".*fan_in_fan_out.*")
        peft.inject_adapter_in_model(config, holder, _ADAPTER)
    for name, child in holder.named_children():
        setattr(module, name, child)


def _describe_adapter(loaded: LoadedModel) -> dict[str, Any]:
    """PEFT's config of the attached adapter."""
    module, options = loaded.module, loaded.lora
    assert options is not None, "whoever asks has its tensors"
    experts, parts = target_experts(module, options), linear_parts(module)
    modules: set[str] = set()
    parameters = {f"{name}.{weight}" for name in experts for weight in EXPERT_WEIGHTS}
    for name in target_modules(module, options):
        # PEFT takes the names of a mixture's dense MLPs for those of its experts, except here.
        if experts and parts[name] == "mlp":
            parameters.add(f"{name}.weight")
        else:
            modules.add(name)
    return _make_config(options, _drop_layers(modules), _drop_layers(parameters)).to_dict()


def _drop_layers(names: Iterable[str]) -> list[str]:
    """Names in a layer without the layer's own, which all layers have."""
    return sorted({re.sub(r".*\.\d+\.", "", name) for name in names})


def _replace(module: nn.Module, name: str, layer: nn.Module) -> None:
    owner, _, attribute = name.rpartition(".")
    setattr(module.get_submodule(owner), attribute, layer)


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
    if _EXPERT_NAME.fullmatch(name):
        if name.endswith(".lora_A"):
            initialize_down(value, generator)
    elif ".lora_A." in name:
        nn.init.kaiming_uniform_(value, a=math.sqrt(5), generator=generator)
    return value


def _is_linear(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D"


def _part_of(name: str) -> Part:
    *blocks, last = name.split(".")
    in_attention = any(word in block.lower() for block in blocks for word in _ATTENTION_BLOCKS)
    return "attn" if in_attention or _ATTENTION_NAME.fullmatch(last) else "mlp"
