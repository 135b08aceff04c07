"""The sizes of a decoder, and how many parameters it has, counted from its config alone.

Legend: H hidden size, A heads, G key heads, D size of a head, I inner size of an MLP, E experts,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from hearth.errors import ConfigError

Linear = tuple[int, int]
"""Inputs and outputs of a linear layer."""
LoraPart = Literal["attn", "mlp", "unembed"]
"""The linear layers that an adapter can change: of attention, of the MLPs, the output head."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A decoder of the Llama kind, dense or with experts in some layers."""

    model_type: str
    """As transformers names it, such as ``qwen3``."""
    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    """Of a dense layer's MLP."""
    vocab: int
    is_tied: bool
    """Whether the head is the embedding."""
    max_positions: int | None = None
    """Longest sequence that the model has positions for."""
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    """Of the projection behind attention."""
    has_mlp_bias: bool = False
    has_head_norms: bool = False
    """RMS norms of each query's and key's head (Qwen3)."""
    sparse_layers: int = 0
    """Layers with experts in the place of their MLP."""
    experts: int = 0
    experts_per_token: int = 0
    expert_inner: int = 0

    @property
    def dense_layers(self) -> int:
        """Layers with one MLP for all tokens."""
        return self.num_layers - self.sparse_layers

    @property
    def attention_linears(self) -> list[Linear]:
        """Linear layers of one layer's attention: queries, keys, values, output."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return [
            (self.hidden, queries),
            (self.hidden, keys),
            (self.hidden, keys),
            (queries, self.hidden),
        ]

    @property
    def mlp_linears(self) -> list[Linear]:
        """Linear layers of one dense MLP: gate, up, down."""
        return [(self.hidden, self.inner), (self.hidden, self.inner), (self.inner, self.hidden)]

    @property
    def embedding_parameters(self) -> int:
        """Of the embedding, and of the head where that is its own."""
        return self.vocab * self.hidden * (1 if self.is_tied else 2)

    @property
    def attention_parameters(self) -> int:
        """Of one layer, its norms aside."""
        biases = 0
        if self.has_qkv_bias:
            biases += (self.heads + 2 * self.kv_heads) * self.head_dim
        if self.has_output_bias:
            biases += self.hidden
        norms = 2 * self.head_dim if self.has_head_norms else 0
        return _weights(self.attention_linears) + biases + norms

    @property
    def mlp_parameters(self) -> int:
        """Of one dense layer's MLP."""
        biases = 2 * self.inner + self.hidden if self.has_mlp_bias else 0
        return _weights(self.mlp_linears) + biases

    @property
    def expert_parameters(self) -> int:
        """Of one expert."""
        return 3 * self.hidden * self.expert_inner

    @property
    def sparse_parameters(self) -> int:
        """Of one layer's experts and their router."""
        return self.experts * (self.expert_parameters + self.hidden)

    @property
    def layer_parameters(self) -> int:
        """Of the largest layer."""
        sparse = self.sparse_parameters if self.sparse_layers else 0
        dense = self.mlp_parameters if self.dense_layers else 0
        return self.attention_parameters + max(sparse, dense) + 2 * self.hidden

    @property
    def parameters(self) -> int:
        """Of the whole model; a tied head counts once."""
        each = self.attention_parameters + 2 * self.hidden
        return (
            self.embedding_parameters
            + self.num_layers * each
            + self.dense_layers * self.mlp_parameters
            + self.sparse_layers * self.sparse_parameters
            + self.hidden
        )

    @property
    def active_parameters(self) -> int:
        """Those that one token is multiplied with: an embedding lookup is no product."""
        idle = self.sparse_layers * (self.experts - self.experts_per_token) * self.expert_parameters
        lookup = 0 if self.is_tied else self.vocab * self.hidden
        return self.parameters - idle - lookup

    @property
    def largest_tensor(self) -> int:
        """Parameters of the largest single tensor; all experts of a layer are one."""
        experts = 2 * self.experts * self.hidden * self.expert_inner if self.sparse_layers else 0
        linears = [*self.attention_linears, *(self.mlp_linears if self.dense_layers else [])]
        return max(self.vocab * self.hidden, experts, *(a * b for a, b in linears))

    def lora_parameters(self, rank: int, targets: Sequence[LoraPart] = ("attn", "mlp")) -> int:
        """Of an adapter of that rank on the linear layers of these parts.

        PEFT does not treat experts and their routers as linear layers: an adapter leaves them out.
        """
        attention = self.num_layers * sum(a + b for a, b in self.attention_linears)
        mlp = self.dense_layers * sum(a + b for a, b in self.mlp_linears)
        sizes = {"attn": attention, "mlp": mlp, "unembed": self.hidden + self.vocab}
        return rank * sum(sizes[part] for part in set(targets))

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Keys and values of one token in all layers, of ``itemsize`` bytes each."""
        return 2 * self.num_layers * self.kv_heads * self.head_dim * itemsize


def read_architecture(config: Mapping[str, Any]) -> Architecture:
    """The sizes in a ``config.json``, or in a transformers config's ``to_dict()``.

    Raises:
        ConfigError: the family is not one that is counted here, or a size is missing.
    """
    family = str(config.get("model_type"))
    if family not in _FAMILIES:
        raise ConfigError(
            f"model_type must be one of {sorted(_FAMILIES)}, got {family!r}: the parameters of "
            "other families are not counted"
        )
    heads, hidden = _size(config, "num_attention_heads"), _size(config, "hidden_size")
    num_layers = _size(config, "num_hidden_layers")
    architecture = Architecture(
        model_type=family,
        num_layers=num_layers,
        hidden=hidden,
        heads=heads,
        kv_heads=_size(config, "num_key_value_heads", heads),
        head_dim=_size(config, "head_dim", hidden // heads),
        inner=_size(config, "intermediate_size"),
        vocab=_size(config, "vocab_size"),
        is_tied=bool(config.get("tie_word_embeddings")),
        max_positions=config.get("max_position_embeddings"),
        **_FAMILIES[family](config),
    )
    if family == "qwen3_moe":
        return _with_experts(architecture, config)
    return architecture


def _with_experts(dense: Architecture, config: Mapping[str, Any]) -> Architecture:
    every, without = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    layers = range(dense.num_layers)
    # transformers writes the number under either name.
    name = "num_local_experts" if "num_local_experts" in config else "num_experts"
    return replace(
        dense,
        sparse_layers=sum(layer not in without and (layer + 1) % every == 0 for layer in layers),
        experts=_size(config, name),
        experts_per_token=_size(config, "num_experts_per_tok"),
        expert_inner=_size(config, "moe_intermediate_size"),
    )


def _llama(config: Mapping[str, Any]) -> dict[str, bool]:
    has_bias = bool(config.get("attention_bias"))
    return {
        "has_qkv_bias": has_bias,
        "has_output_bias": has_bias,
        "has_mlp_bias": bool(config.get("mlp_bias")),
    }


def _qwen3(config: Mapping[str, Any]) -> dict[str, bool]:
    has_bias = bool(config.get("attention_bias"))
    return {"has_qkv_bias": has_bias, "has_output_bias": has_bias, "has_head_norms": True}


_FAMILIES: Mapping[str, Callable[[Mapping[str, Any]], dict[str, bool]]] = {
    "llama": _llama,
    "mistral": lambda config: {},
    "qwen2": lambda config: {"has_qkv_bias": True},
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3,
}
"""Biases and norms of a family's layers."""


def _weights(linears: list[Linear]) -> int:
    return sum(inputs * outputs for inputs, outputs in linears)


def _size(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} must be a whole number >= 1 in the config, got {value!r}")
    return value
