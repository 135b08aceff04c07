"""The parts of a plain pre-norm decoder (Llama, Mistral, Qwen2, Qwen3), for fused code.

Families that do anything else (experts, sliding windows, capped logits, partial rotation) are not
read; their own module runs them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hearth.kernels.training import Linear
from hearth.models.loading import LoadedModel

FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
# Of processors, by torch's names: with one of them torch multiplies bfloat16 fast.
_BFLOAT16_PRODUCTS = ("avx512_bf16", "amx_bf16", "bf16")
# The C loops keep a head on the stack.
_LARGEST_DIM = 1024
# Rotations that depend on the position alone, not on the sequence's length.
_STATIC_ROPE = frozenset({"default", "linear", "llama3", "yarn"})


@dataclass(frozen=True, eq=False)
class DecoderLayer:
    """The modules of one layer; linear ones may have an adapter."""

    input_norm: Any
    q_proj: Any
    k_proj: Any
    v_proj: Any
    q_norm: Any | None
    """The RMS norm of a query's head; None in families without one."""
    k_norm: Any | None
    o_proj: Any
    post_norm: Any
    gate_proj: Any
    up_proj: Any
    down_proj: Any


@dataclass(frozen=True, eq=False)
class Decoder:
    """A whole decoder, read from its module."""

    module: Any
    layers: list[DecoderLayer]
    heads: int
    kv_heads: int
    dim: int
    """Size of a head."""
    eps: float
    """Of the RMS norms."""
    scale: float
    """Factor of attention's dot products."""

    @property
    def backbone(self) -> Any:
        """The module without its head."""
        return self.module.base_model

    def list_linears(self) -> list[Any]:
        """The linear modules: q, k, v, o, gate, up and down of each layer, then the head."""
        modules: list[Any] = []
        for layer in self.layers:
            modules += [layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj]
            modules += [layer.gate_proj, layer.up_proj, layer.down_proj]
        return [*modules, self.module.get_output_embeddings()]

    @torch.no_grad()
    def compute_rotations(self, positions: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines [C, D] (float32) of the first positions."""
        at = torch.arange(positions, device=self.backbone.embed_tokens.weight.device)[None]
        like = torch.zeros(1, dtype=torch.float32, device=at.device)
        cosines, sines = self.backbone.rotary_emb(like, at)
        return cosines[0].contiguous(), sines[0].contiguous()


def read_decoder(loaded: LoadedModel) -> Decoder | None:
    """The parts of a model; None for a model that is no plain decoder."""
    config = loaded.config
    if config.model_type not in FAMILIES or not _is_plain(config):
        return None
    module: Any = loaded.module
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    layers = [_read_layer(layer) for layer in module.base_model.layers]
    if any(
        _has_bias(layer.o_proj, layer.gate_proj, layer.up_proj, layer.down_proj) for layer in layers
    ):
        return None
    if module.base_model.rotary_emb.inv_freq.shape[0] * 2 != dim or dim > _LARGEST_DIM:
        return None
    return Decoder(
        module=module,
        layers=layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        dim=dim,
        eps=float(config.rms_norm_eps),
        scale=float(module.base_model.layers[0].self_attn.scaling),
    )


def read_cpu_decoder(loaded: LoadedModel) -> Decoder | None:
    """The parts of a plain decoder on a CPU that loops compute in float32; None for any other.

    Weights are float32, or bfloat16 on a processor without products in it, which become float32 as
    they are read: then every linear layer must be one that ``read_linear`` reads.
    """
    if torch.device(loaded.device).type != "cpu":
        return None
    decoder = read_decoder(loaded)
    if decoder is None or loaded.dtype == torch.float32:
        return decoder
    has_products = any(map(torch.cpu.get_capabilities().get, _BFLOAT16_PRODUCTS))
    if loaded.dtype != torch.bfloat16 or has_products:
        return None
    is_read = all(read_linear(module) is not None for module in decoder.list_linears())
    return decoder if is_read else None


def base_weight(linear: nn.Module) -> Tensor:
    """The weight of a linear module, without its adapter's update."""
    return getattr(linear, "base_layer", linear).get_parameter("weight")


def read_linear(linear: nn.Module) -> Linear | None:
    """The tensors of a linear module, with its adapter's if that is on; None of any other module.

    They are the module's own, not copies.
    """
    layer: Any = linear
    if type(linear) is nn.Linear:
        return Linear(layer.weight, layer.bias)
    base = getattr(linear, "base_layer", None)
    if type(base) is not nn.Linear or not hasattr(linear, "lora_A"):
        return None
    names = () if layer.disable_adapters else layer.active_adapters
    if not names:
        return Linear(base.weight, base.bias)
    (name,) = names
    down, up = layer.lora_A[name].weight, layer.lora_B[name].weight
    return Linear(base.weight, base.bias, down, up, layer.scaling[name])


def plain_weight(linear: nn.Module) -> Tensor:
    """The weight of a linear module, with its adapter's update added."""
    layer: Any = linear
    weight, names = base_weight(linear), getattr(layer, "active_adapters", ())
    if not names:
        return weight
    with torch.no_grad():
        return weight + sum(layer.get_delta_weight(name) for name in names)


def plain_bias(linear: nn.Module) -> Tensor | None:
    """The bias of a linear module; None where it has none."""
    inner: Any = getattr(linear, "base_layer", linear)
    return inner.bias


def _is_plain(config: Any) -> bool:
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    return (
        config.hidden_act == "silu"
        and rope.get("rope_type", "default") in _STATIC_ROPE
        and kinds == {"full_attention"}
        and not getattr(config, "sliding_window", None)
    )


def _read_layer(module: Any) -> DecoderLayer:
    attention, mlp = module.self_attn, module.mlp
    return DecoderLayer(
        input_norm=module.input_layernorm,
        q_proj=attention.q_proj,
        k_proj=attention.k_proj,
        v_proj=attention.v_proj,
        q_norm=getattr(attention, "q_norm", None),
        k_norm=getattr(attention, "k_norm", None),
        o_proj=attention.o_proj,
        post_norm=module.post_attention_layernorm,
        gate_proj=mlp.gate_proj,
        up_proj=mlp.up_proj,
        down_proj=mlp.down_proj,
    )


def _has_bias(*linears: nn.Module) -> bool:
    return any(plain_bias(linear) is not None for linear in linears)
