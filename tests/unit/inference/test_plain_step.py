"""A plain decoder's step in few operations against its module's."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from tests.unit.inference.decoders import build, decode, make_prompts
from tests.unit.tiny import shake
from torch.utils._python_dispatch import TorchDispatchMode

from hearth.inference.engine.cache import SlotCache
from hearth.inference.engine.plain_step import PlainStep
from hearth.inference.engine.runner import ModelRunner
from hearth.models.loading import LoadedModel
from hearth.models.lora import LoraOptions, adapter_tensors, attach_lora, detach_lora

pytestmark = pytest.mark.slow

KINDS = [
    "llama",
    "llama with one key head, tied",
    "llama with large heads",
    "mistral",
    "qwen2",
    "qwen3",
]
PROMPTS = make_prompts(1, 2, 63, 200)


class Operations(TorchDispatchMode):
    """Counts what a device would be asked for; views cost nothing."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def runners(loaded: LoadedModel, other: LoadedModel) -> tuple[ModelRunner, ModelRunner]:
    """One that decodes in plain steps, and one that runs the module."""
    return (
        ModelRunner(loaded, max_seq_len=600, decoder="plain"),
        ModelRunner(other, max_seq_len=600, decoder="module"),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_are_the_modules_own(kind: str) -> None:
    plain, module = runners(build(kind), build(kind))

    expected = decode(module, PROMPTS)

    torch.testing.assert_close(decode(plain, PROMPTS), expected, rtol=0, atol=1e-5)
    assert float(expected.std()) > 0.3


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_in_bfloat16_they_are_so_to_rounding(kind: str) -> None:
    plain, module = runners(build(kind, torch.bfloat16), build(kind, torch.bfloat16))
    exact = decode(ModelRunner(build(kind), max_seq_len=600, decoder="module"), PROMPTS)

    found, expected = decode(plain, PROMPTS), decode(module, PROMPTS)

    # No further from the exact ones than the module is.
    assert float((found - exact).abs().mean()) <= 1.1 * float((expected - exact).abs().mean())
    assert float((found - expected).abs().mean()) < 0.05


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_adapters_come_and_go(kind: str) -> None:
    loaded, other = build(kind), build(kind)
    plain, module = runners(loaded, other)
    before = decode(plain, PROMPTS)

    for options in (
        LoraOptions(rank=4, alpha=8.0),
        LoraOptions(rank=2, train_unembed=True, train_attn=False),
    ):
        for model in (loaded, other):
            attach_lora(model, options)
            shake(adapter_tensors(model), 1)
        plain.weights_changed()
        found = decode(plain, PROMPTS)
        torch.testing.assert_close(found, decode(module, PROMPTS), rtol=0, atol=2e-5)
        assert float((found - before).abs().max()) > 0.05
        for model in (loaded, other):
            detach_lora(model)
    plain.weights_changed()
    assert torch.equal(decode(plain, PROMPTS), before)


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
    torch.testing.assert_close(decode(wrong, PROMPTS), decode(module, PROMPTS), rtol=0, atol=1e-5)
