"""Random plain decoders on disk, and comparisons of gradients, for several test files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.unit.tiny import llama3_rope, make_decoder, shake
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hearth.losses import builtin_objective
from hearth.models.loading import LoadedModel, load_model
from hearth.models.lora import LoraOptions, adapter_tensors, attach_lora
from hearth.trainer.datums import read_datums
from hearth.trainer.logprobs import TargetScorer
from hearth.trainer.packing import Limits
from hearth.trainer.passes import Pass, PassResult
from hearth.trainer.residents import find_trainable
from hearth.trainer.segments import Kernel
from hearth.wire.tinker import DatumRecord

VOCAB_SIZE = 96
LIMITS = Limits(VOCAB_SIZE, 256, 256)
OBJECTIVE = builtin_objective("cross_entropy")
LORA = LoraOptions(rank=4, alpha=8.0, seed=1)
BODY: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 3,
    "pad_token_id": 7,
    "initializer_range": 0.15,
}

PLAIN: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"num_key_value_heads": 4}),
    "llama, tied": ("LlamaConfig", {"tie_word_embeddings": True, "head_dim": 8}),
    "llama 3's rotation": ("LlamaConfig", {"rope_parameters": llama3_rope(32)}),
    "mistral": ("MistralConfig", {"sliding_window": None, "num_key_value_heads": 1}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2, tied": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "qwen3, tied": ("Qwen3Config", {"head_dim": 6, "tie_word_embeddings": True}),
}
OTHER: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("Gemma2Config", {"head_dim": 16}),
    "experts": (
        "Qwen3MoeConfig",
        {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "a sliding window": ("MistralConfig", {"sliding_window": 16}),
    "some layers with a window": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    ),
    "biases where no family has them": ("LlamaConfig", {"mlp_bias": True}),
    "another activation": ("LlamaConfig", {"hidden_act": "gelu"}),
    "a rotation that depends on the length": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
    ),
}


class PaddedScorer(TargetScorer):
    """Pads what other scorers pack."""

    def _find_packed(self, loaded: LoadedModel, kernel: Kernel | None) -> None:
        return None


def make_folders(factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a random model of a kind; the same weights every time."""
    made: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in made:
            name, options = (PLAIN | OTHER)[kind]
            made[kind] = factory.mktemp("model")
            config = getattr(transformers, name)(**BODY | options)
            make_decoder(config).save_pretrained(made[kind])
        return made[kind]

    return folder


def load_trained(
    folder: Path, lora: LoraOptions | None = None, dtype: str = "float32"
) -> LoadedModel:
    """A model, with an adapter that is not zero where options for one are given."""
    loaded = load_model(folder, dtype=dtype)
    if lora is not None:
        attach_lora(loaded, lora)
        shake(adapter_tensors(loaded), 3)
    return loaded


def assert_same_gradient(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], tolerance: float = 1e-5
) -> None:
    """All parameters' gradients, within a part of the largest of all."""
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    assert largest > 0
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert float((found[name] - gradient).abs().max()) <= tolerance * largest, name


@dataclass(frozen=True)
class Trained:
    """What one pass gave."""

    result: PassResult
    gradient: dict[str, torch.Tensor]

    @property
    def logprobs(self) -> np.ndarray:
        return np.concatenate([logprob.ravel() for logprob in self.result.logprobs])


@dataclass(frozen=True)
class Way:
    """A model, and the scorer that computes it in rows of one kind."""

    loaded: LoadedModel
    scorer: TargetScorer

    def make_pass(
        self, data: Sequence[DatumRecord], budget: int = 4096, temperature: float = 1.0
    ) -> Pass:
        examples = read_datums(data, OBJECTIVE, LIMITS)
        return Pass(self.scorer, OBJECTIVE, examples, LIMITS, budget, temperature)

    def train(self, data: Sequence[DatumRecord], **options: Any) -> Trained:
        named = find_trainable(self.loaded)
        for parameter in named.values():
            parameter.grad = None
        result, _ = self.make_pass(data, **options).forward_backward()
        zeros = {name: torch.zeros_like(parameter) for name, parameter in named.items()}
        gradient = {
            name: zeros[name] if parameter.grad is None else parameter.grad
            for name, parameter in named.items()
        }
        return Trained(result, gradient)

    def batches(self, data: Sequence[DatumRecord], budget: int = 4096) -> Any:
        return self.scorer.batches(read_datums(data, OBJECTIVE, LIMITS), budget, LIMITS)

    def kinds(self, data: Sequence[DatumRecord]) -> set[type]:
        return {type(batch) for batch in self.batches(data)}


class LargestTensor(TorchDispatchMode):
    """Notes the elements of the largest tensor that is made."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return result
