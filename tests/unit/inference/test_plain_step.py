"""A plain decoder's step in few operations against its module's."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hearth.inference.engine.cache import SlotCache
from hearth.inference.engine.plain_step import PlainStep
from hearth.inference.engine.prompts import Extras
from hearth.inference.engine.runner import ModelRunner
from hearth.models.loading import LoadedModel
from hearth.models.lora import LoraOptions, adapter_tensors, attach_lora, detach_lora

pytestmark = pytest.mark.slow

BODY: dict[str, Any] = {
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
    "eos_token_id": 257,
    "pad_token_id": 256,
    "bos_token_id": None,
}
PLAIN: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"num_key_value_heads": 4}),
    "llama with one key head, tied": (
        "LlamaConfig",
        {"num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "llama with large heads": ("LlamaConfig", {"head_dim": 24}),
    "mistral": ("MistralConfig", {"sliding_window": None, "head_dim": 32}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 80}),
}


class Operations(TorchDispatchMode):
    """Counts what a device would be asked for; views cost nothing."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def build(kind: str, dtype: torch.dtype = torch.float32) -> LoadedModel:
    name, options = PLAIN[kind]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**BODY | options)
    module = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            # As initialized norms are all one and biases all zero.
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn_like(parameter)
    module = module.to(dtype)
    return LoadedModel(module, kind, kind, dtype, torch.device("cpu"), (257,), 264, 1024)


def decoded(runner: ModelRunner, steps: int = 4) -> Tensor:
    """Logprobs [steps, P, V] after some prompts and the same tokens for all, one by one."""
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(0, 250, length).tolist()) for length in (1, 2, 63, 200)]
    cache = SlotCache(runner.cache_shape, budget_bytes=2**30, max_slots=16)
    cache.reserve(16, 200 + steps, active=0)
    positions = np.zeros(16, np.int64)
    for row, prompt in enumerate(prompts):
        (filled,), _ = runner.prefill([prompt], Extras())
        cache.fill([row], filled.keys, filled.values)
        positions[row] = len(prompt)
    tokens = np.zeros(16, np.int64)
    found: list[Tensor] = []
    for step in range(steps):
        tokens[: len(prompts)] = 11 * step + 5
        logits = runner.decode(tokens, positions, cache)
        found.append(logits[: len(prompts)].float().log_softmax(-1).clone())
        positions[: len(prompts)] += 1
    return torch.stack(found)


def runners(loaded: LoadedModel, other: LoadedModel) -> tuple[ModelRunner, ModelRunner]:
    """One that decodes in plain steps, and one that runs the module."""
    return (
        ModelRunner(loaded, max_seq_len=600, decoder="plain"),
        ModelRunner(other, max_seq_len=600, decoder="module"),
    )


@pytest.mark.parametrize("kind", PLAIN)
def test_logprobs_are_the_modules_own(kind: str) -> None:
    plain, module = runners(build(kind), build(kind))

    expected = decoded(module)

    torch.testing.assert_close(decoded(plain), expected, rtol=0, atol=1e-5)
    assert float(expected.std()) > 0.3


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_in_bfloat16_they_are_so_to_rounding(kind: str) -> None:
    plain, module = runners(build(kind, torch.bfloat16), build(kind, torch.bfloat16))
    exact = decoded(ModelRunner(build(kind), max_seq_len=600, decoder="module"))

    found, expected = decoded(plain), decoded(module)

    # No further from the exact ones than the module is.
    assert float((found - exact).abs().mean()) <= 1.1 * float((expected - exact).abs().mean())
    assert float((found - expected).abs().mean()) < 0.05


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_adapters_come_and_go(kind: str) -> None:
    loaded, other = build(kind), build(kind)
    plain, module = runners(loaded, other)
    before = decoded(plain)

    for options in (
        LoraOptions(rank=4, alpha=8.0),
        LoraOptions(rank=2, train_unembed=True, train_attn=False),
    ):
        for model in (loaded, other):
            attach_lora(model, options)
            generator = torch.Generator().manual_seed(1)
            with torch.no_grad():
                for tensor in adapter_tensors(model).values():
                    tensor += 0.05 * torch.randn(tensor.shape, generator=generator)
        plain.weights_changed()
        found = decoded(plain)
        torch.testing.assert_close(found, decoded(module), rtol=0, atol=2e-5)
        assert float((found - before).abs().max()) > 0.05
        for model in (loaded, other):
            detach_lora(model)
    plain.weights_changed()
    assert torch.equal(decoded(plain), before)


def test_a_step_takes_less_than_half_of_the_modules_operations() -> None:
    counts: list[int] = []
    for runner in runners(build("qwen3"), build("qwen3")):
        cache = SlotCache(runner.cache_shape, budget_bytes=2**30, max_slots=16)
        cache.reserve(16, 64, active=0)
        tokens = torch.zeros(16, dtype=torch.int64)
        with torch.inference_mode(), Operations() as operations:
            runner._step(tokens, tokens + 3, 64, cache)
        counts.append(operations.count)

    plain, module = counts
    assert plain < 0.5 * module


def test_a_step_that_differs_gives_way_to_the_module(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read = PlainStep.for_model

    def without_a_layer(loaded: LoadedModel, *, positions: int) -> PlainStep | None:
        step = read(loaded, positions=positions)
        assert step is not None
        step._decoder.layers.pop()
        return step

    # A step that computes something else: no model that we know makes one.
    monkeypatch.setattr(PlainStep, "for_model", without_a_layer)
    with caplog.at_level(logging.WARNING, "hearth.inference.engine.runner"):
        wrong, module = runners(build("qwen3"), build("qwen3"))

    (record,) = caplog.records
    assert "runs the whole module" in record.getMessage()
    torch.testing.assert_close(decoded(wrong), decoded(module), rtol=0, atol=1e-5)
