"""Bytes on one GPU: what a trainer's rank holds, and what a deployment's replica holds.

Parameters, gradients, optimizer and the KV cache are exact. Activations are what autograd keeps of
each token, counted operation by operation; a test compares them with what it really keeps. The
rest (working memory, what a library takes) is estimated, and each estimate is a named constant.

Legend: T tokens of a micro-batch, H hidden size, A heads, G key heads, D size of a head, I inner
size of an MLP, K experts of a token, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from hearth.planning.architecture import Architecture

Dtype = Literal["float32", "bfloat16"]
Bytes = Mapping[str, int]
"""Bytes by what they are for."""

GIB = 2**30
ITEMSIZE: Mapping[str, int] = {"float32": 4, "bfloat16": 2}
LOGIT_BUDGET = 2**26
"""Most logits of a trainer at one time (``hearth.trainer.options``)."""
FEWEST_LOGIT_ROWS = 32
SNAPSHOTS_IN_MEMORY = 4
"""Snapshots that an embedded platform keeps (``hearth.sync.store.MemoryBuckets``)."""
PREFILL_TOKENS = 16384
"""Prompt tokens that a deployment takes at a time, at most."""
SERVING_FIXED = GIB // 2
"""Estimate: what recorded steps and libraries take of a deployment's GPU."""
FEWEST_CACHE_ROWS = 16
"""Rows that the embedded engine's cache has at least."""


@dataclass(frozen=True, kw_only=True)
class TrainerSetting:
    """How a trainer runs, as far as its memory goes."""

    dtype: Dtype = "bfloat16"
    """Of the weights; what is trained has float32 masters, gradients and moments."""
    ranks: int = 1
    lora_rank: int | None = None
    """None trains all parameters."""
    micro_batch_tokens: int = 16384
    recompute_above: int | None = None
    """Passes of more tokens compute activations again."""
    has_reference: bool = False
    """Whether a frozen model of its own stands beside the policy; LoRA shares its base."""
    offload_optimizer: bool = False
    """Whether ranks keep their parts of weights, gradients and moments in the host's memory."""
    snapshots_on_device: int = 0
    """Whole snapshots that lie in the trainer's memory; 0 where they go through folders."""
    is_fused: bool = False
    """Whether it takes the loops in C: a dense model in float32 on the CPU."""

    @property
    def recomputes(self) -> bool:
        """Whether a full micro-batch computes its activations again."""
        limit = self.recompute_above
        return limit is not None and self.micro_batch_tokens > limit


def trainer_bytes(model: Architecture, setting: TrainerSetting) -> dict[str, int]:
    """What one rank holds on its GPU at its fullest: in the backward pass of a full micro-batch."""
    size, tokens = ITEMSIZE[setting.dtype], setting.micro_batch_tokens
    found = {} if setting.offload_optimizer else rank_state_bytes(model, setting)
    if setting.has_reference and setting.lora_rank is None:
        found["reference"] = _share(size * model.parameters, setting.ranks)
    if setting.ranks > 1:
        found["gathered layers"] = gathered_bytes(model, setting)
        found["unreduced gradients"] = unreduced_bytes(model, setting)
    elif setting.lora_rank is None:
        # The gradient of one tensor as it arrives, and its sum with what has accumulated.
        found["arriving gradient"] = (size if size == 4 else size + 4) * model.largest_tensor
    found["activations"] = tokens * activation_bytes_per_token(model, setting)
    if setting.recomputes:
        found["recomputed layer"] = tokens * layer_bytes_per_token(model, setting)
    found["working memory"] = tokens * size * (3 * _widest(model) + 4 * model.hidden)
    found["logits"] = logit_bytes(model, setting)
    found["snapshots"] = setting.snapshots_on_device * snapshot_bytes(model, setting)
    return {name: one for name, one in found.items() if one}


def state_bytes(model: Architecture, setting: TrainerSetting) -> dict[str, int]:
    """Weights, masters, gradients and moments of a trainer of one rank (``hearth.trainer.optim``).

    All of it is float32 but the weights, and an adapter is its own master.
    """
    size = ITEMSIZE[setting.dtype]
    adapter = model.lora_parameters(setting.lora_rank) if setting.lora_rank is not None else 0
    trained = adapter or model.parameters
    return {
        "weights": size * model.parameters + 4 * adapter,
        "masters": 0 if adapter or size == 4 else 4 * trained,
        "gradients": 4 * trained,
        "moments": 8 * trained,
    }


def rank_state_bytes(model: Architecture, setting: TrainerSetting) -> dict[str, int]:
    """The same of one rank of several: its parts of the weights, which are float32 if trained.

    Every rank has all of an adapter.
    """
    if setting.ranks == 1:
        return state_bytes(model, setting)
    if setting.lora_rank is None:
        trained = _share(model.parameters, setting.ranks)
        return {"weights": 4 * trained, "gradients": 4 * trained, "moments": 8 * trained}
    whole = state_bytes(model, setting)
    adapter = 4 * model.lora_parameters(setting.lora_rank)
    base = _share(ITEMSIZE[setting.dtype] * model.parameters, setting.ranks)
    return whole | {"weights": base + adapter}


def unreduced_bytes(model: Architecture, setting: TrainerSetting) -> int:
    """Gradients that a rank adds up whole, and shares after a request's last micro-batch only.

    That saves communication; a request of one micro-batch per rank does without.
    """
    return 4 * model.parameters if setting.lora_rank is None else 0


def gathered_bytes(model: Architecture, setting: TrainerSetting) -> int:
    """What a rank has whole for a moment: the embedding and head, a layer, and the one after it.

    Where all parameters are trained, also the gradient of one of them before it is reduced.
    """
    size = ITEMSIZE[setting.dtype]
    whole = size * (model.embedding_parameters + 2 * model.layer_parameters)
    if setting.lora_rank is None:
        whole += size * max(model.embedding_parameters, model.layer_parameters)
    return whole


def activation_bytes_per_token(model: Architecture, setting: TrainerSetting) -> int:
    """What is kept of a token for the backward pass; with recomputation, what enters each layer."""
    size, hidden = ITEMSIZE[setting.dtype], model.hidden
    if setting.recomputes and setting.is_fused:
        return 2 * model.num_layers * size * hidden
    last_norm = (4 if setting.lora_rank is not None else 4 + size) * hidden
    if setting.recomputes:
        return model.num_layers * size * hidden + last_norm
    kinds = {False: model.dense_layers, True: model.sparse_layers}
    return last_norm + sum(
        count * _layer_bytes(model, setting, is_sparse=is_sparse)
        for is_sparse, count in kinds.items()
    )


def layer_bytes_per_token(model: Architecture, setting: TrainerSetting) -> int:
    """What one layer keeps of a token, the largest."""
    kinds = {False: model.dense_layers, True: model.sparse_layers}
    return max(
        _layer_bytes(model, setting, is_sparse=is_sparse)
        for is_sparse, count in kinds.items()
        if count
    )


def _layer_bytes(model: Architecture, setting: TrainerSetting, *, is_sparse: bool) -> int:
    adapter = 0 if setting.lora_rank is None else 4 * 7 * setting.lora_rank
    if setting.is_fused:
        return 4 * _fused_layer(model) + adapter
    size, hidden = ITEMSIZE[setting.dtype], model.hidden
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    # A norm keeps its input in float32, and for its own weight's gradient the same normalized.
    norm = 4 if adapter else 4 + size
    kept = 2 * norm * hidden + _input_bytes(setting, hidden, 3)
    kept += size * (2 * queries + 2 * keys) + 4 * model.heads
    if model.has_head_norms:
        kept += norm * (queries + keys)
    if adapter and size == 2:
        kept += _input_bytes(setting, queries, 1)
    if is_sparse:
        # Of frozen experts no inputs are kept.
        inputs = 1 if adapter else 2
        each = inputs * size * hidden + (2 + inputs) * size * model.expert_inner
        kept += size * hidden + model.experts_per_token * each + (4 + size) * model.experts
    else:
        # Gate, its SiLU and up; the two that take the hidden state, and the one that gives it.
        kept += 3 * size * model.inner
        kept += _input_bytes(setting, hidden, 2) + _input_bytes(setting, model.inner, 1)
    return kept + adapter


def _input_bytes(setting: TrainerSetting, width: int, linears: int) -> int:
    """What some linear layers keep of the input that they share."""
    size = ITEMSIZE[setting.dtype]
    if setting.lora_rank is None or size == 4:
        return size * width
    # The frozen weights need none of it; each adapter makes a copy in float32.
    return 4 * width * linears


def _fused_layer(model: Architecture) -> int:
    """Numbers that the loops in C keep of a token (``hearth.kernels.training``)."""
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    kept = 4 * model.hidden + 2 * queries + 2 * keys + 3 * model.inner
    if model.has_head_norms:
        kept += queries + keys
    # Scales of norms, and attention's sums.
    return kept + 2 * model.heads + model.kv_heads + 2


def logit_bytes(model: Architecture, setting: TrainerSetting) -> int:
    """Logits of one chunk with their softmax and gradients, at their most."""
    rows = max(FEWEST_LOGIT_ROWS, LOGIT_BUDGET // model.vocab)
    each = 4 if setting.is_fused else 12 if setting.dtype == "float32" else 14
    return min(rows, setting.micro_batch_tokens) * model.vocab * each


def snapshot_bytes(model: Architecture, setting: TrainerSetting) -> int:
    """A whole snapshot for a deployment: all weights, or the adapter."""
    if setting.lora_rank is not None:
        return 4 * model.lora_parameters(setting.lora_rank)
    return ITEMSIZE[setting.dtype] * model.parameters


def host_bytes(model: Architecture, setting: TrainerSetting) -> int:
    """CPU memory of a trainer that publishes through folders, all ranks together.

    A full policy keeps a copy of what it published last, and makes the next one beside it.
    """
    copies = (1 if setting.lora_rank is not None else 2) * snapshot_bytes(model, setting)
    kept = sum(rank_state_bytes(model, setting).values()) if setting.offload_optimizer else 0
    return copies + setting.ranks * kept


@dataclass(frozen=True, kw_only=True)
class ReplicaSetting:
    """How one server of a deployment runs, as far as its memory goes."""

    engine: Literal["embedded", "vllm"] = "vllm"
    dtype: Dtype = "bfloat16"
    gpus: int = 1
    """GPUs that share its weights and cache (tensor parallelism)."""
    context: int = 4096
    sequences: int = 64
    """Completions in flight, all as long as the context allows."""
    lora_rank: int | None = None
    stages_weights: bool = False
    """Whether new weights stand beside the old ones on the GPU until they are proved."""


def replica_bytes(model: Architecture, setting: ReplicaSetting) -> dict[str, int]:
    """What a replica holds on each of its GPUs."""
    size, rows = ITEMSIZE[setting.dtype], setting.sequences
    if setting.engine == "embedded":
        rows = max(rows, FEWEST_CACHE_ROWS)
    # Heads are what is split: a GPU has one of them at least.
    parts = min(setting.gpus, model.kv_heads)
    cache = rows * setting.context * model.kv_bytes_per_token(size)
    weights = _share(size * model.parameters, setting.gpus)
    if setting.lora_rank is not None:
        weights += 4 * model.lora_parameters(setting.lora_rank)
    passing = PREFILL_TOKENS * size * (3 * _widest(model) + 4 * model.hidden)
    workspace = SERVING_FIXED + passing + 8 * setting.sequences * model.vocab
    found = {"weights": weights, "KV cache": _share(cache, parts), "workspace": workspace}
    if setting.stages_weights and setting.lora_rank is None:
        found["weight sync"] = weights
    return found


def _widest(model: Architecture) -> int:
    dense = model.inner if model.dense_layers else 0
    return max(dense, model.experts_per_token * model.expert_inner)


def _share(num_bytes: int, parts: int) -> int:
    return -(-num_bytes // parts)
