"""How fast a GPU samples and trains, estimated from its datasheet, to divide GPUs by.

The estimates are good to a factor of about two; ``benchmarks/gpu.py`` measures a real device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hearth.planning.architecture import Architecture
from hearth.planning.memory import ITEMSIZE, ReplicaSetting, TrainerSetting


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU. The defaults are an H100's (SXM) datasheet, and the share that programs reach."""

    operations_per_s: float = 989e12
    """bfloat16 products, dense."""
    bytes_per_s: float = 3.35e12
    training_share: float = 0.35
    """Of the operations, in a forward and backward pass (MFU)."""
    decoding_share: float = 0.5
    """Of the memory's bandwidth, in a decoding step."""
    split_share: float = 0.85
    """Factor of a GPU's speed each time that a replica is split in two."""


def training_tokens_per_s(
    model: Architecture, setting: TrainerSetting, context: int, gpu: Gpu
) -> float:
    """Tokens of sequences of ``context`` tokens that one GPU trains in a second.

    A forward pass is two operations per parameter and token; a backward pass is twice that, or as
    much where the parameters are frozen; recomputation is another forward pass.
    """
    passes = (2 if setting.lora_rank is not None else 3) + setting.recomputes
    attention = 2 * model.num_layers * context * model.heads * model.head_dim
    operations = passes * (2 * model.active_parameters + attention)
    return gpu.training_share * gpu.operations_per_s / operations


def sampling_tokens_per_s(model: Architecture, setting: ReplicaSetting, gpu: Gpu) -> float:
    """Tokens that one replica samples in a second, its sequences half done on average.

    A step reads the weights once and every sequence's keys and values. Of experts it reads those
    that at least one sequence uses; all experts are taken as equally likely.
    """
    size, sequences = ITEMSIZE[setting.dtype], setting.sequences
    weights = model.parameters - model.lookup_parameters - model.idle_parameters(sequences)
    cache = sequences * model.kv_bytes(setting.context // 2, size)
    read_s = (size * weights + cache) / (gpu.decoding_share * gpu.bytes_per_s)
    product_s = (
        2 * model.active_parameters * sequences / (gpu.training_share * gpu.operations_per_s)
    )
    split = setting.gpus * gpu.split_share ** math.log2(setting.gpus)
    return sequences * split / max(read_s, product_s)
