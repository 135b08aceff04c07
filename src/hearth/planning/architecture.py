"""The sizes of a decoder that memory and speed follow from.

``hearth.models.sizes`` reads them from a model without weights; the rest here is arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

LoraPart = Literal["attn", "mlp", "unembed"]
"""The linear layers that an adapter can change: of attention, of the MLPs, the output head."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A decoder, dense or with experts in some layers."""

    model_type: str
    """As transformers names it, such as ``qwen3``."""
    parameters: int
    """Of the whole model; a tied head counts once."""
    outer_parameters: int
    """Of all that is in no layer: embedding, head, last norm."""
    layer_parameters: int
    """Of the largest layer."""
    largest_tensor: int
    """Parameters of the largest single tensor; all experts of a layer are one."""
    lookup_parameters: int = 0
    """Of an embedding that is not the head: its lookup is no product."""
    matrix_parameters: int = 0
    """In single matrices of layers, which Muon updates."""
    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    """Width of the MLP of a layer without experts, or of the experts that all tokens share."""
    vocab: int
    max_positions: int | None = None
    """Longest sequence that the model has positions for."""
    has_head_norms: bool = False
    """RMS norms of each query's and key's head (Qwen3)."""
    sparse_layers: int = 0
    """Layers with experts."""
    experts: int = 0
    experts_per_token: int = 0
    expert_inner: int = 0
    expert_parameters: int = 0
    """Of all experts of one layer."""
    adapted: Mapping[LoraPart, int] = field(default_factory=dict[LoraPart, int])
    """Inputs and outputs of all linear layers, and of all experts, that an adapter of a part
    changes."""
    cache_width: int = 0
    """Numbers that one layer's cache keeps of a token."""
    cache_heads: int = 1
    """Parts into which tensor parallelism can split that cache; more GPUs have copies."""
    cached_layers: int = 0
    """Layers that keep all tokens."""
    window_layers: int = 0
    """Layers that keep the last ``window`` tokens only."""
    window: int = 0

    @property
    def dense_layers(self) -> int:
        """Layers with one MLP for all tokens."""
        return self.num_layers - self.sparse_layers

    @property
    def active_parameters(self) -> int:
        """Those that one token is multiplied with."""
        return self.parameters - self.lookup_parameters - self.idle_parameters(1)

    def idle_parameters(self, tokens: int) -> int:
        """Those of experts that none of so many tokens uses, if all are equally likely."""
        if not self.sparse_layers:
            return 0
        unused = (1 - self.experts_per_token / self.experts) ** tokens
        return round(self.sparse_layers * self.expert_parameters * unused)

    def lora_parameters(self, rank: int, targets: Sequence[LoraPart] = ("attn", "mlp")) -> int:
        """Of an adapter of that rank on the linear layers of these parts."""
        return rank * sum(self.adapted.get(part, 0) for part in set(targets))

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """What a sequence's cache grows by with a token, once it is longer than all windows."""
        return self.cached_layers * self.cache_width * itemsize

    def kv_bytes(self, tokens: int, itemsize: int) -> int:
        """Keys and values of a sequence of so many tokens, of ``itemsize`` bytes each."""
        windows = self.window_layers * min(tokens, self.window)
        return (self.cached_layers * tokens + windows) * self.cache_width * itemsize
