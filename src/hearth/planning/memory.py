"""Bytes on one GPU: what a trainer's rank holds, and what a deployment's replica holds.

Parameters, gradients, optimizer and the KV cache are exact. Activations are what autograd keeps of
each token, counted operation by operation; a test compares them with the real numbers. The rest
(working memory, memory of libraries) is estimated, and each estimate is a named constant.

Legend: T tokens of a micro-batch, H hidden size, A heads, G key heads, D size of a head, I inner
size of an MLP, K experts of a token, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from hearth.planning.architecture import Architecture, LoraPart
from hearth.planning.gradients import TRAINED_BYTES, fits_one_machine, fits_whole_gradient

Dtype = Literal["float32", "bfloat16"]
OptimizerName = Literal["adamw", "adamw_8bit", "muon"]

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
CHANGED_SHARES = ((1e-6, 0.03), (1e-5, 0.2))
"""Of a bfloat16 model's elements, by learning rate: measured, at 1e-5 from 0.16 to 0.23."""
MOMENT_BLOCK = 256
"""Moments of eight bits that share a scale in float32."""
FEWEST_CACHE_SLOTS = 16
"""Slots that the embedded engine's cache has at least."""


@dataclass(frozen=True, kw_only=True)
class TrainerSetting:
    """The settings of a trainer that its memory depends on."""

    dtype: Dtype = "bfloat16"
    """Of the weights; trained weights have float32 masters, gradients and moments."""
    ranks: int = 1
    copies: int = 1
    """Machines that hold a copy of the weights each, divided over the machine's ranks."""
    reference_copies: int = 1
    """The same, of the reference."""
    lora_rank: int | None = None
    """None trains all parameters."""
    lora_targets: tuple[LoraPart, ...] = ("attn", "mlp")
    """Parts whose linear layers an adapter changes."""
    merges_adapter: bool = False
    """Whether weight syncs send the model with the adapter merged in."""
    optimizer: OptimizerName = "adamw"
    micro_batch_tokens: int = 16384
    recompute_above: int | None = None
    """Passes of more tokens than this compute activations again; None never does."""
    has_reference: bool = False
    """Whether a second, frozen model is the reference; LoRA uses its own base."""
    sums_whole: bool = True
    """Whether ranks add up whole gradients (``planning.gradients``), or each its own part."""
    offload_optimizer: bool = False
    """Whether ranks keep their parts of weights, gradients and moments in the host's memory."""
    snapshots_on_device: int = 0
    """Whole snapshots in the trainer's memory; 0 if they go through folders."""
    is_fused: bool = False
    """Whether it uses the loops in C: a dense model in float32 on the CPU."""

    @property
    def parts(self) -> int:
        """In how many parts ranks divide the weights."""
        return self.ranks // self.copies

    @property
    def recomputes(self) -> bool:
        """Whether a full micro-batch computes its activations again."""
        limit = self.recompute_above
        return limit is not None and self.micro_batch_tokens > limit

    def trains(self, part: LoraPart) -> bool:
        """Whether the linear layers of this part are trained, themselves or by an adapter."""
        return self.lora_rank is None or part in self.lora_targets


def trainer_bytes(model: Architecture, setting: TrainerSetting) -> dict[str, int]:
    """The most that one rank holds on its GPU, in the last backward pass of an optimizer step.

    Of the three moments that may be the fullest, this is the one that is.
    """
    kept = {} if setting.offload_optimizer else rank_state_bytes(model, setting)
    if setting.has_reference and setting.lora_rank is None:
        kept["reference"] = reference_bytes(model, setting)
    kept["snapshots"] = setting.snapshots_on_device * snapshot_bytes(model, setting)
    moments = (
        _at_the_head(model, setting),
        _in_a_layer(model, setting),
        _at_the_end(model, setting),
    )
    fullest = max(moments, key=lambda parts: sum(parts.values()))
    return {name: size for name, size in (kept | fullest).items() if size}


def _at_the_head(model: Architecture, setting: TrainerSetting) -> dict[str, int]:
    """When the backward pass begins: activations of all layers, and a chunk of logits."""
    # The head's gradient, and the next chunk's beside it.
    head = 2 * ITEMSIZE[setting.dtype] * model.vocab * model.hidden
    return {
        "gathered weights": _gathered(model, setting, layers=0),
        "gradients on their way": _whole_sums(model, setting) + _if_full(head, setting),
        "activations": setting.micro_batch_tokens * activation_bytes_per_token(model, setting),
        "logits": logit_bytes(model, setting),
    }


def _in_a_layer(model: Architecture, setting: TrainerSetting) -> dict[str, int]:
    """When the last layer has been computed: its gradient is complete, and is sent."""
    size, tokens = ITEMSIZE[setting.dtype], setting.micro_batch_tokens
    if setting.ranks > 1:
        own = size * model.vocab * model.hidden + (size + 4) * model.layer_parameters
    else:
        # A new gradient of one tensor, and its sum with the accumulated one.
        own = (size if size == 4 else size + 4) * model.largest_tensor
    return {
        "gathered weights": _gathered(model, setting, layers=2),
        "gradients on their way": _whole_sums(model, setting) + _if_full(own, setting),
        "activations": tokens * activation_bytes_per_token(model, setting),
        "recomputed layer": tokens * layer_bytes_per_token(model, setting) * setting.recomputes,
        "working memory": _working_bytes(model, setting),
    }


def _at_the_end(model: Architecture, setting: TrainerSetting) -> dict[str, int]:
    """When all layers are done: the gradient of what is in no layer is complete, and is sent."""
    if setting.ranks == 1:
        return {}
    size, sums = ITEMSIZE[setting.dtype], 4 * setting.sums_whole
    return {
        "gathered weights": _gathered(model, setting, layers=0),
        "gradients on their way": _if_full((size + 4 + sums) * model.outer_parameters, setting),
    }


def _if_full(num_bytes: int, setting: TrainerSetting) -> int:
    return num_bytes if setting.lora_rank is None else 0


def _whole_sums(model: Architecture, setting: TrainerSetting) -> int:
    """Gradients of a request's earlier micro-batches: whole, or those of this machine's ranks."""
    if setting.ranks > 1 and setting.sums_whole:
        return _if_full(4 * model.parameters, setting)
    return _if_full(4 * _share(model.parameters, setting.parts) * (setting.copies > 1), setting)


def _gathered(model: Architecture, setting: TrainerSetting, *, layers: int) -> int:
    """Weights that a rank has whole: those that are in no layer, a layer's and the next one's."""
    if setting.ranks == 1:
        return 0
    whole = model.outer_parameters + layers * model.layer_parameters
    return ITEMSIZE[setting.dtype] * whole


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
        "moments": _moment_bytes(model, setting),
    }


def _moment_bytes(model: Architecture, setting: TrainerSetting) -> int:
    """What the optimizer keeps of all that is trained (``hearth.trainer.optim``)."""
    trained, matrices = model.parameters, model.matrix_parameters
    if setting.lora_rank is not None:
        trained = adapter_parameters(model, setting)
        head = setting.lora_rank * model.adapted.get("unembed", 0) * setting.trains("unembed")
        matrices = trained - head
    if setting.optimizer == "muon":
        return 4 * matrices + 8 * (trained - matrices)
    if setting.optimizer == "adamw_8bit":
        return 2 * (trained + 4 * -(-trained // MOMENT_BLOCK))
    return 8 * trained


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
        trained = _share(model.parameters, setting.parts)
        moments = _share(_moment_bytes(model, setting), setting.parts)
        return {"weights": 4 * trained, "gradients": 4 * trained, "moments": moments}
    whole = state_bytes(model, setting)
    adapter = 4 * adapter_parameters(model, setting)
    base = _share(ITEMSIZE[setting.dtype] * model.parameters, setting.parts)
    return whole | {"weights": base + adapter}


def choose_sums(model: Architecture, setting: TrainerSetting, memory: int) -> bool:
    """What the trainer chooses for ``sums_whole`` on GPUs of so many bytes."""
    held = 0 if setting.offload_optimizer else sum(rank_state_bytes(model, setting).values())
    return fits_whole_gradient(model.parameters, held=held, memory=memory)


def choose_copies(
    model: Architecture, setting: TrainerSetting, memory: int, *, ranks_of_machine: int
) -> TrainerSetting:
    """With what trainer and reference choose for ``copies``, on GPUs of so many bytes."""
    machines, rest = divmod(setting.ranks, ranks_of_machine)
    if rest or machines < 2 or setting.offload_optimizer:
        return setting

    def count(bytes_each: int) -> int:
        fits = fits_one_machine(
            model.parameters, ranks=ranks_of_machine, bytes_each=bytes_each, memory=memory
        )
        return machines if fits else 1

    frozen = ITEMSIZE[setting.dtype]
    trained = TRAINED_BYTES if setting.lora_rank is None else frozen
    return replace(setting, copies=count(trained), reference_copies=count(frozen))


def reference_bytes(model: Architecture, setting: TrainerSetting) -> int:
    """What a frozen model beside the policy holds: a trainer of its own, of as many ranks."""
    held = 0 if setting.offload_optimizer else reference_share(model, setting)
    held += _gathered(model, setting, layers=2)
    return held + _working_bytes(model, setting) + logit_bytes(model, setting) // 2


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
    # Updates of experts keep their inputs alone.
    linears = 4 * setting.trains("attn") + 3 * setting.trains("mlp") * (not is_sparse)
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
        # Experts that are neither trained nor adapted keep no inputs.
        inputs = 2 if setting.trains("mlp") else 1
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
    kept = 2 * model.hidden + 2 * queries + 2 * keys + 2 * model.inner
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
    if setting.lora_rank is not None and not setting.merges_adapter:
        return 4 * adapter_parameters(model, setting)
    return ITEMSIZE[setting.dtype] * model.parameters


def changed_share(setting: TrainerSetting, learning_rate: float) -> float:
    """The part of all elements that an optimizer step changes in the stored dtype.

    In bfloat16 a step of Adam is smaller than most elements' last bit. Between the measured rates,
    and beyond them, the share is taken as a power of the rate.
    """
    if setting.dtype == "float32":
        return 1.0
    (low, few), (high, many) = CHANGED_SHARES
    power = math.log(many / few) / math.log(high / low)
    return min(1.0, few * (learning_rate / low) ** power)


def delta_bytes(model: Architecture, setting: TrainerSetting, learning_rate: float) -> int:
    """A weight sync that sends changed elements: each with a byte that says where, or a bitmap."""
    whole = snapshot_bytes(model, setting)
    if setting.lora_rank is not None:
        return whole
    share = changed_share(setting, learning_rate)
    each = ITEMSIZE[setting.dtype] * share + min(share, 1 / 8)
    return min(whole, round(each * model.parameters))


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
    # Tensor parallelism splits key heads. On more GPUs than these, each has a copy of one of them:
    # of its keys and values, and of the weights that compute them.
    splits = min(setting.gpus, model.cache_heads)
    cache = slots * model.kv_bytes(setting.context, size)
    copied = model.num_layers * model.hidden * model.cache_width if model.cache_heads > 1 else 0
    weights = _share(size * (model.parameters - copied), setting.gpus)
    weights += _share(size * copied, splits)
    if setting.lora_rank is not None:
        weights += 4 * adapter_parameters(model, setting)
    prefill = PREFILL_TOKENS * size * (3 * _widest(model) + 4 * model.hidden)
    workspace = SERVING_FIXED + prefill + 8 * setting.sequences * model.vocab
    parts = {"weights": weights, "KV cache": _share(cache, splits), "workspace": workspace}
    if setting.stages_weights and setting.lora_rank is None:
        parts["weight sync"] = weights
    return parts


def reference_share(model: Architecture, setting: TrainerSetting) -> int:
    """One rank's part of the reference's weights; 0 where it has none of its own."""
    if not setting.has_reference or setting.lora_rank is not None:
        return 0
    parts = setting.ranks // setting.reference_copies
    return _share(ITEMSIZE[setting.dtype] * model.parameters, parts)


def _working_bytes(model: Architecture, setting: TrainerSetting) -> int:
    """Estimate: what the operations of one layer have beside what they keep."""
    each = ITEMSIZE[setting.dtype] * (3 * _widest(model) + 4 * model.hidden)
    return setting.micro_batch_tokens * each


def _widest(model: Architecture) -> int:
    dense = model.inner if model.dense_layers else 0
    return max(dense, model.experts_per_token * model.expert_inner)


def _share(num_bytes: int, count: int) -> int:
    return -(-num_bytes // count)


@dataclass(frozen=True)
class Machine:
    """What one machine runs of a trainer and a deployment."""

    ranks: int
    """The first of the trainer's, if any."""
    replicas: int


def host_bytes(
    model: Architecture,
    trainer: TrainerSetting,
    replica: ReplicaSetting,
    machine: Machine,
    *,
    learning_rate: float,
    is_inline: bool = False,
) -> dict[str, int]:
    """The machine's memory for weights at the ``start``, and in a weight ``sync``.

    The memory of the processes themselves, some 1 GiB each, and files in the page cache are not
    in it. ``is_inline`` says that snapshots never leave the GPU.
    """
    kept = 0
    if trainer.offload_optimizer:
        own = sum(rank_state_bytes(model, trainer).values()) + reference_share(model, trainer)
        kept = machine.ranks * own
    start = machine.ranks * start_bytes(model, trainer)
    if is_inline:
        return {"start": start, "sync": kept}
    sent = snapshot_bytes(model, trainer)
    delta = delta_bytes(model, trainer, learning_rate)
    sync = 0
    if machine.ranks and trainer.lora_rank is not None:
        # Rank 0 has the adapter, or the merged model.
        sync += sent
    elif machine.ranks:
        # Each rank has its part of the last snapshot, of the new one, of a delta where that is not
        # the new one, and of the two largest tensors twice, which are compared at the same time.
        whole = 2 * sent + delta * (trainer.dtype != "float32")
        whole += 4 * ITEMSIZE[trainer.dtype] * model.largest_tensor
        # Of equal parts, the first rank's alone.
        sync += round(whole * min(machine.ranks, trainer.parts) / trainer.parts)
    # All of vLLM's workers on a machine share the served weights and the new ones; Hearth's own
    # engine has them on the GPU.
    if machine.replicas:
        sync += delta + (2 * sent if replica.engine == "vllm" else 0)
    return {"start": max(start, kept), "sync": kept + sync}


def start_bytes(model: Architecture, setting: TrainerSetting) -> int:
    """What a rank has in the host's memory while it starts, and its reference's rank with it.

    Each reads its part of the weights, and moves one after another to its GPU, where trained ones
    become float32.
    """
    read = _share(ITEMSIZE[setting.dtype] * model.parameters, setting.parts)
    return read + reference_share(model, setting)
