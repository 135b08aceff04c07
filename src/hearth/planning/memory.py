"""Bytes on one GPU: what a trainer's rank holds, and what a deployment's replica holds.

Parameters, gradients, optimizer and the KV cache are exact. Activations are what autograd keeps of
each token, counted operation by operation; a test compares them with the real numbers. The rest
(working memory, memory of libraries) is estimated, and each estimate is a named constant.

Legend: T tokens of a micro-batch, H hidden size, A heads, G key heads, D size of a head, I inner
size of an MLP, K experts of a token, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from hearth.planning.architecture import Architecture, LoraPart

Dtype = Literal["float32", "bfloat16"]

GIB = 2**30
ITEMSIZE: Mapping[str, int] = {"float32": 4, "bfloat16": 2}
LOGIT_BUDGET = 2**26
"""Most logits of a trainer at one time (``hearth.trainer.options``)."""
FEWEST_LOGIT_TOKENS = 32
SNAPSHOTS_IN_MEMORY = 4
"""Snapshots that an embedded platform keeps (``hearth.sync.store.MemoryBuckets``)."""
PREFILL_TOKENS = 16384
"""Prompt tokens that a deployment takes at a time, at most."""
SERVING_FIXED = GIB // 2
"""Estimate: memory of recorded steps and libraries on a deployment's GPU."""
FEWEST_CACHE_SLOTS = 16
"""Slots that the embedded engine's cache has at least."""


@dataclass(frozen=True, kw_only=True)
class TrainerSetting:
    """The settings of a trainer that its memory depends on."""

    dtype: Dtype = "bfloat16"
    """Of the weights; trained weights have float32 masters, gradients and moments."""
    ranks: int = 1
    lora_rank: int | None = None
    """None trains all parameters."""
    lora_targets: tuple[LoraPart, ...] = ("attn", "mlp")
    """Parts whose linear layers an adapter changes."""
    micro_batch_tokens: int = 16384
    recompute_above: int | None = None
    """Passes of more tokens than this compute activations again; None never does."""
    has_reference: bool = False
    """Whether a second, frozen model is the reference; LoRA uses its own base."""
    offload_optimizer: bool = False
    """Whether ranks keep their parts of weights, gradients and moments in the host's memory."""
    snapshots_on_device: int = 0
    """Whole snapshots in the trainer's memory; 0 if they go through folders."""
    is_fused: bool = False
    """Whether it uses the loops in C: a dense model in float32 on the CPU."""

    @property
    def recomputes(self) -> bool:
        """Whether a full micro-batch computes its activations again."""
        limit = self.recompute_above
        return limit is not None and self.micro_batch_tokens > limit

    def trains(self, part: LoraPart) -> bool:
        """Whether the linear layers of this part are trained, themselves or by an adapter."""
        return self.lora_rank is None or part in self.lora_targets


def trainer_bytes(model: Architecture, setting: TrainerSetting) -> dict[str, int]:
    """The most that one rank holds on its GPU: in the backward pass of a full micro-batch."""
    size, tokens = ITEMSIZE[setting.dtype], setting.micro_batch_tokens
    parts = {} if setting.offload_optimizer else rank_state_bytes(model, setting)
    if setting.has_reference and setting.lora_rank is None:
        parts["reference"] = _share(size * model.parameters, setting.ranks)
    if setting.ranks > 1:
        parts["gathered layers"] = gathered_bytes(model, setting)
        parts["unreduced gradients"] = unreduced_bytes(model, setting)
    elif setting.lora_rank is None:
        # A new gradient of one tensor, and its sum with the accumulated one.
        parts["arriving gradient"] = (size if size == 4 else size + 4) * model.largest_tensor
    parts["activations"] = tokens * activation_bytes_per_token(model, setting)
    if setting.recomputes:
        parts["recomputed layer"] = tokens * layer_bytes_per_token(model, setting)
    parts["working memory"] = tokens * size * (3 * _widest(model) + 4 * model.hidden)
    parts["logits"] = logit_bytes(model, setting)
    parts["snapshots"] = setting.snapshots_on_device * snapshot_bytes(model, setting)
    return {name: size for name, size in parts.items() if size}


def state_bytes(model: Architecture, setting: TrainerSetting) -> dict[str, int]:
    """Weights, masters, gradients and moments of a trainer of one rank (``hearth.trainer.optim``).

    All of it is float32 except the weights, and an adapter is its own master.
    """
    size = ITEMSIZE[setting.dtype]
    adapter = adapter_parameters(model, setting)
    trained = adapter or model.parameters
    return {
        "weights": size * model.parameters + 4 * adapter,
        "masters": 0 if adapter or size == 4 else 4 * trained,
        "gradients": 4 * trained,
        "moments": 8 * trained,
    }


def adapter_parameters(model: Architecture, setting: TrainerSetting | ReplicaSetting) -> int:
    """Of the adapter; 0 where all parameters are trained."""
    if setting.lora_rank is None:
        return 0
    return model.lora_parameters(setting.lora_rank, setting.lora_targets)


def rank_state_bytes(model: Architecture, setting: TrainerSetting) -> dict[str, int]:
    """``state_bytes`` of one rank of several: its parts of the weights, float32 if trained.

    Every rank has all of an adapter.
    """
    if setting.ranks == 1:
        return state_bytes(model, setting)
    if setting.lora_rank is None:
        trained = _share(model.parameters, setting.ranks)
        return {"weights": 4 * trained, "gradients": 4 * trained, "moments": 8 * trained}
    whole = state_bytes(model, setting)
    adapter = 4 * adapter_parameters(model, setting)
    base = _share(ITEMSIZE[setting.dtype] * model.parameters, setting.ranks)
    return whole | {"weights": base + adapter}


def unreduced_bytes(model: Architecture, setting: TrainerSetting) -> int:
    """Gradients that a rank adds up whole, and reduces after a request's last micro-batch only.

    That saves communication; a request of one micro-batch per rank does not need them.
    """
    return 4 * model.parameters if setting.lora_rank is None else 0


def gathered_bytes(model: Architecture, setting: TrainerSetting) -> int:
    """What a rank holds unsharded at once: the embedding and head, a layer, and the next layer.

    If all parameters are trained, also the gradient of one of them before it is reduced.
    """
    size = ITEMSIZE[setting.dtype]
    whole = size * (model.embedding_parameters + 2 * model.layer_parameters)
    if setting.lora_rank is None:
        whole += size * max(model.embedding_parameters, model.layer_parameters)
    return whole


def activation_bytes_per_token(model: Architecture, setting: TrainerSetting) -> int:
    """What the backward pass needs of a token; with recomputation, the input of each layer."""
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
    """What the largest layer keeps of a token."""
    kinds = {False: model.dense_layers, True: model.sparse_layers}
    return max(
        _layer_bytes(model, setting, is_sparse=is_sparse)
        for is_sparse, count in kinds.items()
        if count
    )


def _layer_bytes(model: Architecture, setting: TrainerSetting, *, is_sparse: bool) -> int:
    linears = 4 * setting.trains("attn") + 3 * setting.trains("mlp")
    adapter = 0 if setting.lora_rank is None else 4 * linears * setting.lora_rank
    if setting.is_fused:
        return 4 * _count_fused_layer(model) + adapter
    size, hidden = ITEMSIZE[setting.dtype], model.hidden
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    # A norm keeps its input in float32, and the normalized input for its weight's gradient.
    norm = 4 if setting.lora_rank is not None else 4 + size
    kept = 2 * norm * hidden + _input_bytes(setting, "attn", hidden, 3)
    kept += size * (2 * queries + 2 * keys) + 4 * model.heads
    if model.has_head_norms:
        kept += norm * (queries + keys)
    if setting.lora_rank is not None and size == 2:
        kept += _input_bytes(setting, "attn", queries, 1)
    if is_sparse:
        # Frozen experts keep no inputs.
        inputs = 1 if setting.lora_rank is not None else 2
        each = inputs * size * hidden + (2 + inputs) * size * model.expert_inner
        kept += size * hidden + model.experts_per_token * each + (4 + size) * model.experts
    else:
        # Gate, its SiLU and up; inputs of gate and up, and of down.
        kept += 3 * size * model.inner
        kept += _input_bytes(setting, "mlp", hidden, 2)
        kept += _input_bytes(setting, "mlp", model.inner, 1)
    return kept + adapter


def _input_bytes(setting: TrainerSetting, part: LoraPart, width: int, linears: int) -> int:
    """What some linear layers of a part keep of the input that they share."""
    if not setting.trains(part):
        return 0
    size = ITEMSIZE[setting.dtype]
    if setting.lora_rank is None or size == 4:
        return size * width
    # Frozen weights need no input; each adapter makes a copy in float32.
    return 4 * width * linears


def _count_fused_layer(model: Architecture) -> int:
    """Numbers that the loops in C keep of a token (``hearth.kernels.training``)."""
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    kept = 4 * model.hidden + 2 * queries + 2 * keys + 3 * model.inner
    if model.has_head_norms:
        kept += queries + keys
    # Scales of norms, and attention's sums.
    return kept + 2 * model.heads + model.kv_heads + 2


def logit_bytes(model: Architecture, setting: TrainerSetting) -> int:
    """Logits of the largest chunk, with their softmax and gradients."""
    tokens = max(FEWEST_LOGIT_TOKENS, LOGIT_BUDGET // model.vocab)
    each = 4 if setting.is_fused else 12 if setting.dtype == "float32" else 14
    return min(tokens, setting.micro_batch_tokens) * model.vocab * each


def snapshot_bytes(model: Architecture, setting: TrainerSetting) -> int:
    """A whole snapshot for a deployment: all weights, or the adapter."""
    if setting.lora_rank is not None:
        return 4 * adapter_parameters(model, setting)
    return ITEMSIZE[setting.dtype] * model.parameters


def host_bytes(model: Architecture, setting: TrainerSetting) -> int:
    """CPU memory of a trainer that publishes through folders, all ranks together.

    A full policy keeps a copy of its last snapshot, and makes the next one beside it.
    """
    copies = (1 if setting.lora_rank is not None else 2) * snapshot_bytes(model, setting)
    kept = sum(rank_state_bytes(model, setting).values()) if setting.offload_optimizer else 0
    return copies + setting.ranks * kept


@dataclass(frozen=True, kw_only=True)
class ReplicaSetting:
    """The settings of a deployment's server that its memory depends on."""

    engine: Literal["embedded", "vllm"] = "vllm"
    dtype: Dtype = "bfloat16"
    gpus: int = 1
    """GPUs that share its weights and cache (tensor parallelism)."""
    context: int = 4096
    sequences: int = 64
    """Completions in flight, all as long as the context allows."""
    lora_rank: int | None = None
    lora_targets: tuple[LoraPart, ...] = ("attn", "mlp")
    stages_weights: bool = False
    """Whether new weights are on the GPU beside the old ones until they are verified."""


def replica_bytes(model: Architecture, setting: ReplicaSetting) -> dict[str, int]:
    """What a replica holds on each of its GPUs."""
    size, slots = ITEMSIZE[setting.dtype], setting.sequences
    if setting.engine == "embedded":
        slots = max(slots, FEWEST_CACHE_SLOTS)
    # Tensor parallelism splits heads: a GPU has at least one.
    splits = min(setting.gpus, model.kv_heads)
    cache = slots * setting.context * model.kv_bytes_per_token(size)
    weights = _share(size * model.parameters, setting.gpus)
    if setting.lora_rank is not None:
        weights += 4 * adapter_parameters(model, setting)
    prefill = PREFILL_TOKENS * size * (3 * _widest(model) + 4 * model.hidden)
    workspace = SERVING_FIXED + prefill + 8 * setting.sequences * model.vocab
    parts = {"weights": weights, "KV cache": _share(cache, splits), "workspace": workspace}
    if setting.stages_weights and setting.lora_rank is None:
        parts["weight sync"] = weights
    return parts


def _widest(model: Architecture) -> int:
    dense = model.inner if model.dense_layers else 0
    return max(dense, model.experts_per_token * model.expert_inner)


def _share(num_bytes: int, count: int) -> int:
    return -(-num_bytes // count)
